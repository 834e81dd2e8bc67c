# SPDX-License-Identifier: Apache-2.0
"""Reads pages of L2 and L3 back and checks every byte of them; changes nothing, blocks nobody.

Does not know: who asks, which pages are worth checking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers import objects
from kvtiers.host_pool import HostPool
from kvtiers.store import Store

BATCH = 8


@dataclass(frozen=True, slots=True)
class Checked:
    """Pages whose bytes were read, and how many of them were not what they should be."""

    num_checked: int
    num_bad: int


def verify_l2(pool: HostPool, pages: Sequence[tuple[int, bytes]]) -> Checked:
    """Sum up slots (page, name). One that is given to another page meanwhile is passed over.

    A bad slot is marked, so that a load-back will look at its bytes and refuse them.
    """
    num_checked = num_bad = 0
    for page, page_hash in pages:
        if not pool.is_sealed_for(page, page_hash):
            continue
        is_sound = pool.is_sound(page, page_hash)
        # A slot that is being filled anew has lost its seal before its first byte changed.
        if is_sound or pool.is_sealed_for(page, page_hash):
            num_checked += 1
        if not is_sound and pool.is_sealed_for(page, page_hash):
            num_bad += 1
            pool.doubt(page)
    return Checked(num_checked, num_bad)


def verify_l3(pool: HostPool, store: Store, page_hashes: Sequence[bytes]) -> Checked:
    """Read pages of the store; those that are no longer there do not count."""
    size = objects.object_bytes(pool.shape.page_bytes)
    buffers = [memoryview(bytearray(size)) for _ in range(min(BATCH, len(page_hashes)))]
    before = _num_bad(store)
    num_read = 0
    for start in range(0, len(page_hashes), BATCH):
        keys = [pool.key(page_hash) for page_hash in page_hashes[start : start + BATCH]]
        num_read += sum(store.get(keys, buffers[: len(keys)]))
    num_bad = _num_bad(store) - before
    return Checked(num_read + num_bad, num_bad)


def _num_bad(store: Store) -> int:
    return store.status().counters.get("bad_reads", 0)
