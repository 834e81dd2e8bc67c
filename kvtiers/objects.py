# SPDX-License-Identifier: Apache-2.0
"""A stored page: a header and the page's bytes, one contiguous blob in L2, in L3 and on the wire.

Does not know: stores, pools, what a page means. The header says what the bytes are and how they
sum up, so whoever reads a blob back can tell whole from doubtful; doubtful is a miss.

Header, 256 bytes, little-endian (bodies stay aligned as their slots are):
  [0, 4)     magic
  [4, 8)     format version
  [8, 24)    layout fingerprint, from its 32 hex digits
  [24, 40)   hash of the key
  [40, 48)   length of the body
  [48, 56)   xxh3-64 of the body
  [56, 72)   in a store that has nowhere else to write it: hash of the key of the page before it
  [72, 80)   there too: when it was put, ms since 1970; elsewhere both are zero, as sealed
  [80, 248)  zero
  [248, 256) xxh3-64 of [0, 248)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvtiers.errors import StoreCallError

HEADER_BYTES = 256
FORMAT_VERSION = 1
KEY_HASH_BYTES = 16
MAGIC = b"MRPG"

_FIELDS = struct.Struct("<4sI16s16sQQ")
_WANTED = struct.Struct("<4sI16s16sQ")  # the fields that the caller knows
_KEY_HASH_WORDS = slice(3, 5)  # of 8 bytes
_SUM = struct.Struct("<Q")
_STAMP = struct.Struct("<16sQ")
_STAMP_AT = _FIELDS.size
_SUMMED_BYTES = HEADER_BYTES - _SUM.size
_PADDING = bytes(_SUMMED_BYTES - _FIELDS.size)


def object_bytes(page_bytes: int) -> int:
    """The length of the blob that holds a page of `page_bytes`."""
    return HEADER_BYTES + page_bytes


def key_hash(key: str) -> bytes:
    """16 bytes that stand for a key in a header and in a store's index."""
    return hashlib.blake2b(key.encode("utf-8"), digest_size=KEY_HASH_BYTES).digest()


def seal(blob: memoryview, key: str, layout_fingerprint: str) -> None:
    """Write the header of a blob whose body [256, len) is in place.

    Args:
        blob: the whole object, writable, contiguous bytes.
        layout_fingerprint: `KvLayout.fingerprint()`, 32 hex digits.

    Raises:
        StoreCallError: the blob has no body, or the fingerprint is not 32 hex digits.
    """
    view = _as_bytes(blob)
    body = view[HEADER_BYTES:]
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        _raw_fingerprint(layout_fingerprint),
        key_hash(key),
        len(body),
        xxh3_64_intdigest(body),
    )
    summed = fields + _PADDING
    view[:HEADER_BYTES] = summed + _SUM.pack(xxh3_64_intdigest(summed))


def verify(blob: memoryview, key: str, layout_fingerprint: str) -> bool:
    """Whether a blob is, whole and unchanged, what `seal` made for this key and layout."""
    if not is_sealed_for(blob, key, layout_fingerprint):
        return False
    view = _as_bytes(blob)
    return bool(_FIELDS.unpack_from(view)[5] == xxh3_64_intdigest(view[HEADER_BYTES:]))


def is_sealed_for(blob: memoryview, key: str, layout_fingerprint: str) -> bool:
    """Whether the header is whole and speaks of this key, layout and length; reads no body."""
    view = _as_bytes(blob)
    summed = view[:_SUMMED_BYTES]
    if _SUM.unpack_from(view, _SUMMED_BYTES)[0] != xxh3_64_intdigest(summed):
        return False
    magic, version, fingerprint, hashed, body_bytes, _ = _FIELDS.unpack_from(view)
    return bool(
        magic == MAGIC
        and version == FORMAT_VERSION
        and fingerprint == _raw_fingerprint(layout_fingerprint)
        and hashed == key_hash(key)
        and body_bytes == len(view) - HEADER_BYTES
    )


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a stamped header says: of which page it is, which one that follows, since when."""

    key_hash: bytes
    parent_hash: bytes
    """Zeros: it is a prefix's first, or nobody said."""
    put_ms: int
    num_bytes: int
    """Of the whole object."""


def stamp(blob: memoryview, parent_hash: bytes, put_ms: int) -> None:
    """Write into a sealed header which page this one follows, and when it was put."""
    _write_stamp(_as_bytes(blob), _STAMP.pack(parent_hash, put_ms))


def unstamp(blob: memoryview) -> None:
    """Make a sealed header what `seal` had made it, whoever stamped it."""
    view = _as_bytes(blob)
    if any(view[_STAMP_AT : _STAMP_AT + _STAMP.size]):
        _write_stamp(view, bytes(_STAMP.size))


def read_stamp(header: memoryview) -> Stamp | None:
    """What the first 256 bytes of an object say; None: they are no header of this format."""
    view = header.cast("B")
    if len(view) < HEADER_BYTES:
        return None
    if _SUM.unpack_from(view, _SUMMED_BYTES)[0] != xxh3_64_intdigest(view[:_SUMMED_BYTES]):
        return None
    magic, version, _, hashed, body_bytes, _ = _FIELDS.unpack_from(view)
    if magic != MAGIC or version != FORMAT_VERSION:
        return None
    parent_hash, put_ms = _STAMP.unpack_from(view, _STAMP_AT)
    return Stamp(hashed, parent_hash, put_ms, HEADER_BYTES + body_bytes)


def are_sealed_for(
    headers: NDArray[np.uint8],
    key_hashes: Sequence[bytes],
    layout_fingerprint: str,
    body_bytes: int,
) -> NDArray[np.bool_]:
    """What `is_sealed_for` says of many blobs, for less than a microsecond each.

    Args:
        headers: uint8 [num_blobs, 256]; copied first, so that all is said of the same bytes.
        key_hashes: `key_hash` of the key each is asked for.
        body_bytes: the length of the body behind each.

    Returns:
        [num_blobs].
    """
    num = len(key_hashes)
    if not num:
        return np.zeros(0, np.bool_)
    raw = memoryview(headers.tobytes())
    words = np.frombuffer(raw, "<u8").reshape(num, HEADER_BYTES // 8)
    wanted = np.empty((num, _WANTED.size // 8), "<u8")
    said = _WANTED.pack(
        MAGIC, FORMAT_VERSION, _raw_fingerprint(layout_fingerprint), b"", body_bytes
    )
    wanted[:] = np.frombuffer(said, "<u8")
    wanted[:, _KEY_HASH_WORDS] = np.frombuffer(b"".join(key_hashes), "<u8").reshape(num, 2)
    starts = range(0, num * HEADER_BYTES, HEADER_BYTES)
    sums = (xxh3_64_intdigest(raw[at : at + _SUMMED_BYTES]) for at in starts)
    is_whole = words[:, -1] == np.fromiter(sums, np.uint64, num)
    good: NDArray[np.bool_] = is_whole & (words[:, : wanted.shape[1]] == wanted).all(axis=1)
    return good


def _write_stamp(view: memoryview, raw: bytes) -> None:
    view[_STAMP_AT : _STAMP_AT + _STAMP.size] = raw
    view[_SUMMED_BYTES:HEADER_BYTES] = _SUM.pack(xxh3_64_intdigest(view[:_SUMMED_BYTES]))


def _as_bytes(blob: memoryview) -> memoryview:
    if not blob.contiguous:
        raise StoreCallError("blob", "not contiguous", "contiguous bytes")
    view = blob.cast("B")
    if len(view) <= HEADER_BYTES:
        raise StoreCallError("blob", f"{len(view)} bytes", f"more than {HEADER_BYTES}")
    return view


def _raw_fingerprint(text: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise StoreCallError("layout_fingerprint", text, "32 hex digits")
    return raw
