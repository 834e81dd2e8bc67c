# SPDX-License-Identifier: Apache-2.0
"""Sealed pages with known content, for tests of stores."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvtiers.objects import HEADER_BYTES, seal
from kvtiers.store import Store

LAYOUT = "00112233445566778899aabbccddeeff"
OTHER_LAYOUT = LAYOUT[::-1]
PAGE_BYTES = 20_000


def page(key: str, num_bytes: int = PAGE_BYTES, *, seed: int = 0) -> memoryview:
    """A sealed object whose body follows from key and seed alone."""
    body = random.Random(f"{key}/{seed}").randbytes(num_bytes)
    blob = memoryview(bytearray(HEADER_BYTES) + body)
    seal(blob, key, LAYOUT)
    return blob


def pages(keys: Sequence[str], num_bytes: int = PAGE_BYTES) -> list[memoryview]:
    return [page(key, num_bytes) for key in keys]


def blank(count: int, num_bytes: int = PAGE_BYTES) -> list[memoryview]:
    """Buffers to read pages of `num_bytes` into."""
    return [memoryview(bytearray(HEADER_BYTES + num_bytes)) for _ in range(count)]


def chain(name: str, count: int) -> list[str]:
    """Keys of one prefix, head first."""
    return [f"ns/{name}/{at:04d}" for at in range(count)]


def read(store: Store, keys: Sequence[str], num_bytes: int = PAGE_BYTES) -> list[bool]:
    """What the store has of these, each compared with what `page` makes; a wrong byte fails."""
    into = blank(len(keys), num_bytes)
    hits = store.get(keys, into)
    for key, buffer, is_hit in zip(keys, into, hits, strict=True):
        assert not is_hit or buffer == page(key, num_bytes), f"{key} came back wrong"
    return hits
