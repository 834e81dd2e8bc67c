# SPDX-License-Identifier: Apache-2.0
"""In which order the pages of a store may go.

Does not know: stores, where pages lie, locks. The order is least recently used first, with one rule
on top: a page stands before (goes before) every page it follows. Using a page uses all the pages
before it, so whatever stands first has no page that still needs it, and heads never go before
tails.

Where sessions take turns in a loop larger than the store, the least recently used page is always
the next one wanted. While it is so (kvtiers.page_reuse), a page that was lost and is put again
stands on probation: it goes before all others until it is read. So what others read again stays,
and is read in the next round too.

Invariants: `live_bytes` is the sum over the pages held; for every page whose parent is held, the
page stands before its parent; of a page that is not on probation none before it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain as chained
from typing import Generic, Protocol, TypeVar

from kvtiers.page_reuse import ReuseHistory

NO_PARENT = bytes(16)
MOST_REFUSED = 1 << 16  # names remembered; one that is forgotten costs an end without its head


class StoredPage(Protocol):
    """A page that a store holds; hashes of 16 bytes."""

    @property
    def key_hash(self) -> bytes: ...

    @property
    def parent_hash(self) -> bytes:
        """Of the page it follows; NO_PARENT where it is a prefix's first."""
        ...

    @property
    def num_bytes(self) -> int:
        """What it takes of the store's room."""
        ...


P = TypeVar("P", bound=StoredPage)


class PageOrder(Generic[P]):
    """Pages by key hash, the one to go first in front."""

    def __init__(self) -> None:
        self._pages: dict[bytes, P] = {}
        self._proven: OrderedDict[bytes, None] = OrderedDict()
        self._probation: OrderedDict[bytes, None] = OrderedDict()  # all of it goes first
        self._num_followers: dict[bytes, int] = {}  # by the page they follow, held or not
        self._reuse = ReuseHistory()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self.live_bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key_hash: bytes) -> bool:
        return key_hash in self._pages

    def find(self, key_hash: bytes) -> P | None:
        return self._pages.get(key_hash)

    def add(self, page: P) -> None:
        """Take a page in, in place of an older one of its key; it keeps that one's turn."""
        old = self._pages.get(page.key_hash)
        if old is not None:
            self._follow(old, -1)
            self._count(old, -1)
        self._pages[page.key_hash] = page
        self._refused.pop(page.key_hash, None)
        if old is None:
            self._place(page)
        self._follow(page, +1)
        self._count(page, +1)

    def discard(self, page: P) -> bool:
        """Forget a page, unless its key has another one by now."""
        if self._pages.get(page.key_hash) is not page:
            return False
        self._follow(page, -1)
        self._count(page, -1)
        del self._pages[page.key_hash]
        self._proven.pop(page.key_hash, None)
        self._probation.pop(page.key_hash, None)
        self._reuse.forget(page.key_hash)
        return True

    def evict(self, spared: Collection[bytes] = ()) -> P | None:
        """Let the page go that stands first, none of these; None: there is no other."""
        page = self.oldest()
        if page is not None and page.key_hash in spared:
            # Those in use stand last, so all of probation is in use.
            page = self._first(self._proven)
        if page is None or page.key_hash in spared:
            return None
        self.lose(page)
        return page

    def lose(self, page: P) -> None:
        """A page is gone, and is missed: what follows it is not to be kept without it."""
        num_held = len(self)
        if self._pages.get(page.key_hash) is page:
            self._reuse.lose(page.key_hash, num_held)
            self.discard(page)

    def refuse(self, key_hash: bytes) -> None:
        """A page is not kept: nor is what follows it, until it is."""
        self._refused[key_hash] = None
        while len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)

    def make_room(
        self,
        key_hashes: Sequence[bytes],
        follows: Sequence[bytes],
        sizes: Sequence[int],
        limit: int,
        goal: int | None = None,
        *,
        may_evict: bool = True,
    ) -> tuple[set[bytes], list[P]]:
        """Evict for pages that come in: what the new ones follow is used now, and does not go.

        Args:
            sizes: what each of them takes.
            limit: what all may take together.
            goal: where any page must go, so many go that no more is taken than this.

        Returns:
            Those of the new ones that fit, heads first, none behind a page that was lost or
            refused; and what was evicted, in this order.
        """
        in_use = self.touch([*key_hashes, *follows], proves=False)
        room = limit - (self.bytes_of(in_use) if may_evict else self.live_bytes)
        fits: set[bytes] = set()
        needed = 0
        for key_hash, parent, size in zip(key_hashes, follows, sizes, strict=True):
            if key_hash in self._pages or key_hash in fits:
                continue
            is_missed = parent in self._refused or self._reuse.is_lost(parent)
            if is_missed and parent not in self._pages and parent not in fits:
                self.refuse(key_hash)
            elif needed + size > room:
                self.refuse(key_hash)
                room = 0
            else:
                needed += size
                fits.add(key_hash)
        evicted: list[P] = []
        if may_evict and self.live_bytes + needed > limit:
            most = limit if goal is None else min(goal, limit)
            while self.live_bytes + needed > most:
                page = self.evict(in_use)
                if page is None:
                    break
                evicted.append(page)
        return fits, evicted

    def in_order(self) -> Iterator[P]:
        """Every page, the one to go first in front."""
        return (self._pages[key_hash] for key_hash in chained(self._probation, self._proven))

    def oldest(self) -> P | None:
        """The page to go first; no page held follows it."""
        return self._first(self._probation) or self._first(self._proven)

    def bytes_of(self, key_hashes: Iterable[bytes]) -> int:
        """What these take."""
        return sum(self._pages[key_hash].num_bytes for key_hash in key_hashes)

    def touch(self, key_hashes: Iterable[bytes], *, proves: bool = True) -> set[bytes]:
        """These were used now, and so were all pages before them; returns those held of both.

        proves: they were read, which ends their probation.
        """
        hashes = list(key_hashes)
        if proves:
            for key_hash in hashes:
                if key_hash in self._pages:
                    self._reuse.note(self._reuse.age(key_hash), len(self))
        return self._renew(reversed(hashes), proves=proves)

    def settle(self) -> None:
        """Restore the rule after pages were added in the order of their last use."""
        self._renew(reversed(list(self._pages)), proves=True)

    def _renew(self, newest_first: Iterable[bytes], *, proves: bool) -> set[bytes]:
        """Move chains to the end so that the newest ends last and parents end behind children."""
        seen: set[bytes] = set()
        order: list[bytes] = []
        for key_hash in newest_first:
            chain: list[bytes] = []
            at = key_hash
            # A wrong parent may close a circle: `seen` ends the walk.
            while at not in seen and at in self._pages:
                seen.add(at)
                chain.append(at)
                at = self._pages[at].parent_hash
            order.extend(reversed(chain))
        for key_hash in reversed(order):
            self._reuse.use(key_hash)
            if proves and key_hash in self._probation:
                del self._probation[key_hash]
                self._proven[key_hash] = None
            line = self._probation if key_hash in self._probation else self._proven
            line.move_to_end(key_hash)
        return seen

    def _place(self, page: P) -> None:
        """A page that was not held: on probation, or behind all others."""
        key_hash = page.key_hash
        is_doubtful = self._came_back_late(key_hash) or page.parent_hash in self._probation
        if is_doubtful and key_hash not in self._num_followers:
            self._probation[key_hash] = None
            self._reuse.use(key_hash)
            return
        self._proven[key_hash] = None
        self._reuse.use(key_hash)
        if is_doubtful:
            self._renew([key_hash], proves=True)

    def _came_back_late(self, key_hash: bytes) -> bool:
        distance = self._reuse.find_lost(key_hash)
        if distance is None:
            return False
        self._reuse.note(distance, len(self))
        # What has waited longer than this one was away is likely dead, and goes first.
        waiting = next(iter(self._proven), None)
        has_waited = self._reuse.age(waiting) if waiting is not None else 0
        return self._reuse.is_looping(len(self)) and distance >= has_waited

    def _first(self, line: OrderedDict[bytes, None]) -> P | None:
        key_hash = next(iter(line), None)
        return None if key_hash is None else self._pages[key_hash]

    def _follow(self, page: P, sign: int) -> None:
        left = self._num_followers.get(page.parent_hash, 0) + sign
        if left:
            self._num_followers[page.parent_hash] = left
        else:
            del self._num_followers[page.parent_hash]

    def _count(self, page: P, sign: int) -> None:
        """A page was taken in (+1) or left (-1)."""
        self.live_bytes += sign * page.num_bytes
