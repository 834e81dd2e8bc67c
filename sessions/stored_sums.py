# SPDX-License-Identifier: Apache-2.0
"""Sums over bytes at rest: what a disk or a memory changed is an error, not another history.

SQLite sums up its write-ahead log but not its database file, and Redis neither its append-only file
nor its memory: one flipped bit of token ids would decode as other tokens.

    0xc1 | BLAKE2b of all that is covered, 64 bits | body

MessagePack never begins with 0xc1, so bytes of a schema without sums are told apart; they are
believed as they were. Does not know: what the bytes mean.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from sessions.errors import StoreCorrupt

MARK: Final = b"\xc1"
_SUM_BYTES: Final = 8
_START: Final = len(MARK) + _SUM_BYTES


def seal(body: bytes, *others: bytes) -> bytes:
    """`body` behind a sum over it and `others`, which are stored elsewhere."""
    return MARK + _sum(body, others) + body


def unseal(stored: bytes, *others: bytes) -> bytes:
    """The inverse of `seal`, given the same `others`. Raises `StoreCorrupt`."""
    if not stored.startswith(MARK):
        return stored
    body = stored[_START:]
    if stored[len(MARK) : _START] != _sum(body, others):
        raise StoreCorrupt(
            f"{len(stored)} stored bytes are not as they were written (hint: check disk and memory)"
        )
    return body


def _sum(body: bytes, others: tuple[bytes, ...]) -> bytes:
    digest = blake2b(body, digest_size=_SUM_BYTES)
    for other in others:
        digest.update(len(other).to_bytes(8, "little"))
        digest.update(other)
    return digest.digest()
