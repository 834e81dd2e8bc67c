# SPDX-License-Identifier: Apache-2.0
"""Sealed pages: whole and unchanged is told from everything else."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import xxhash

from kvtiers.errors import StoreCallError
from kvtiers.objects import (
    HEADER_BYTES,
    are_sealed_for,
    is_sealed_for,
    key_hash,
    object_bytes,
    read_stamp,
    seal,
    stamp,
    unstamp,
    verify,
)

_LAYOUT = "0123456789abcdef" * 2
_KEY = "namespace/ab/abcdef"


def _sealed(body: bytes = b"page" * 250, key: str = _KEY, layout: str = _LAYOUT) -> bytearray:
    blob = bytearray(HEADER_BYTES) + body
    seal(memoryview(blob), key, layout)
    return blob


def test_a_sealed_page_is_right_for_its_key_and_layout_alone() -> None:
    blob = memoryview(_sealed())
    assert verify(blob, _KEY, _LAYOUT)
    assert not verify(blob, _KEY + "0", _LAYOUT)
    assert not verify(blob, _KEY, _LAYOUT[::-1])


def test_the_header_is_what_the_docs_say() -> None:
    body = bytes(range(256)) * 4
    blob = _sealed(body)
    assert blob[:4] == b"MRPG"
    assert struct.unpack_from("<I", blob, 4) == (1,)
    assert blob[8:24].hex() == _LAYOUT
    assert struct.unpack_from("<QQ", blob, 40) == (1024, xxhash.xxh3_64_intdigest(body))
    assert bytes(blob[56:248]) == bytes(192)
    assert bytes(blob[HEADER_BYTES:]) == body
    assert object_bytes(1024) == len(blob)


def test_any_flipped_bit_is_seen() -> None:
    blob = _sealed(random.Random(1).randbytes(300))
    for bit in range(8 * len(blob)):
        blob[bit // 8] ^= 1 << bit % 8
        assert not verify(memoryview(blob), _KEY, _LAYOUT), f"bit {bit}"
        blob[bit // 8] ^= 1 << bit % 8
    assert verify(memoryview(blob), _KEY, _LAYOUT)


@pytest.mark.parametrize("num_bytes", [257, 500, 1255])
def test_a_shortened_or_grown_page_is_doubted(num_bytes: int) -> None:
    blob = _sealed()
    assert len(blob) == 1256
    assert not verify(memoryview(blob)[:num_bytes], _KEY, _LAYOUT)
    assert not verify(memoryview(blob + b"\0"), _KEY, _LAYOUT)


def test_memory_never_written_is_no_page() -> None:
    assert not verify(memoryview(bytearray(1000)), _KEY, _LAYOUT)


def test_a_header_alone_can_be_asked_without_reading_the_page() -> None:
    blob = _sealed()
    blob[-1] ^= 1
    assert is_sealed_for(memoryview(blob), _KEY, _LAYOUT)
    assert not verify(memoryview(blob), _KEY, _LAYOUT)


def test_views_of_other_element_types_are_taken_as_bytes() -> None:
    blob = _sealed(bytes(1024))
    assert verify(memoryview(blob).cast("I"), _KEY, _LAYOUT)


def test_a_stamp_says_what_it_was_given_and_leaves_no_trace() -> None:
    blob, before = _sealed(), _sealed()
    unstamp(memoryview(blob))
    assert blob == before
    stamp(memoryview(blob), key_hash("the page before"), 1_764_000_000_123)
    assert verify(memoryview(blob), _KEY, _LAYOUT), "still the same page"
    assert bytes(blob[56:72]) == key_hash("the page before")
    assert struct.unpack_from("<Q", blob, 72) == (1_764_000_000_123,)
    said = read_stamp(memoryview(blob)[:HEADER_BYTES])
    assert said is not None
    assert (said.key_hash, said.parent_hash) == (key_hash(_KEY), key_hash("the page before"))
    assert (said.put_ms, said.num_bytes) == (1_764_000_000_123, len(blob))
    unstamp(memoryview(blob))
    assert blob == before


def test_a_stamp_under_a_damaged_header_says_nothing() -> None:
    blob = _sealed()
    stamp(memoryview(blob), key_hash("before"), 5)
    for bit in range(8 * HEADER_BYTES):
        blob[bit // 8] ^= 1 << bit % 8
        assert read_stamp(memoryview(blob)[:HEADER_BYTES]) is None
        blob[bit // 8] ^= 1 << bit % 8
    assert read_stamp(memoryview(bytes(HEADER_BYTES))) is None
    assert read_stamp(memoryview(blob)[:255]) is None
    assert read_stamp(memoryview(blob)) is not None


def test_what_can_hold_no_page_is_refused() -> None:
    with pytest.raises(StoreCallError, match="blob = '256 bytes': allowed: more than 256"):
        seal(memoryview(bytearray(HEADER_BYTES)), _KEY, _LAYOUT)
    with pytest.raises(StoreCallError, match="blob = 'not contiguous'"):
        seal(memoryview(bytearray(2000))[::2], _KEY, _LAYOUT)
    with pytest.raises(StoreCallError, match="layout_fingerprint = 'zz'"):
        seal(memoryview(bytearray(2000)), _KEY, "zz")


def test_many_headers_are_told_apart_as_one_is() -> None:
    """Every bit of a header flipped, once as it is and once under a sum that is right again."""
    whole = _sealed()
    blobs = [whole, _sealed(key=_KEY + "0"), _sealed(layout=_LAYOUT[::-1]), _sealed(b"page" * 249)]
    blobs.append(bytearray(len(whole)))
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        blobs.append(flipped)
        if bit < 8 * 248:
            total = xxhash.xxh3_64_intdigest(bytes(flipped[:248]))
            blobs.append(flipped[:248] + struct.pack("<Q", total) + flipped[256:])
    headers = np.array([list(blob[:HEADER_BYTES]) for blob in blobs], np.uint8)
    hashes = [key_hash(_KEY)] * len(blobs)
    got = are_sealed_for(headers, hashes, _LAYOUT, len(whole) - HEADER_BYTES)
    # One blob is shorter: of a slot the length is known, of a blob alone it is its own.
    want = [
        len(one) == len(whole) and is_sealed_for(memoryview(one), _KEY, _LAYOUT) for one in blobs
    ]
    assert got.tolist() == want
    # The body's sum and the zeros behind it are no part of what is asked.
    assert sum(want) == 1 + 8 * (8 + 192)


def test_each_header_is_held_against_its_own_key() -> None:
    blobs = [_sealed(key=f"key {number}") for number in range(20)]
    headers = np.array([list(blob[:HEADER_BYTES]) for blob in blobs], np.uint8)
    asked = [0, 1, 3, 2, *range(4, 19), 0]
    hashes = [key_hash(f"key {number}") for number in asked]
    got = are_sealed_for(headers, hashes, _LAYOUT, len(blobs[0]) - HEADER_BYTES)
    assert got.tolist() == [at == number for at, number in enumerate(asked)]
    assert are_sealed_for(headers[:0], [], _LAYOUT, 8).tolist() == []
