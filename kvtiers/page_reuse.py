# SPDX-License-Identifier: Apache-2.0
"""How far apart the pages of a store are used again, and what it let go of is put again.

As csrc/prefix/reuse.h for L1 and L2: time is the number of pages used. A page used again after more
time than the store holds pages would have been lost under LRU; while such uses outweigh the others
by half, the working set goes round in a loop larger than the store.

Does not know: the order of pages, files, locks. One thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict

LOST_PER_PAGE = 8
MOST_LOST = 1 << 18
_UNIT = 1024


class ReuseHistory:
    """Times of use of what is held and of what was lost lately."""

    def __init__(self) -> None:
        self._now = 0
        self._used_at: dict[bytes, int] = {}
        self._lost: OrderedDict[bytes, int] = OrderedDict()
        self._fitting = 0  # uses that LRU would have served
        self._beyond = 0  # the share of the others that the store could serve at best

    def use(self, key_hash: bytes) -> None:
        """A page that is held is used now."""
        self._now += 1
        self._used_at[key_hash] = self._now

    def age(self, key_hash: bytes) -> int:
        """How long a page that is held was not used."""
        return self._now - self._used_at.get(key_hash, 0)

    def forget(self, key_hash: bytes) -> None:
        self._used_at.pop(key_hash, None)

    def lose(self, key_hash: bytes, num_held: int) -> None:
        """A page made room for others."""
        self._lost[key_hash] = self._used_at.pop(key_hash, 0)
        self._lost.move_to_end(key_hash)
        while len(self._lost) > min(MOST_LOST, LOST_PER_PAGE * num_held + 64):
            self._lost.popitem(last=False)

    def is_lost(self, key_hash: bytes) -> bool:
        """Whether a page made room for others lately, and was not put again since."""
        return key_hash in self._lost

    def find_lost(self, key_hash: bytes) -> int | None:
        """How long a page was not used that was lost and is there again; None: it was not lost."""
        used_at = self._lost.pop(key_hash, None)
        return None if used_at is None else self._now - used_at

    def note(self, distance: int, num_held: int) -> None:
        """A page was used again after that time."""
        if distance <= num_held:
            self._fitting += _UNIT
        else:
            self._beyond += _UNIT * num_held // distance
        if self._fitting + self._beyond >= 4 * num_held * _UNIT:
            self._fitting //= 2
            self._beyond //= 2

    def is_looping(self, num_held: int) -> bool:
        """Not for a page or two that came back late, nor where as much of what is used fits."""
        return 2 * self._beyond > 3 * self._fitting and self._beyond >= num_held * _UNIT // 16
