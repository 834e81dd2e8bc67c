# SPDX-License-Identifier: Apache-2.0
"""Which pages are in Mooncake, and which of them go: tails before heads, before Mooncake evicts.

Does not know: connections, what pages mean. Mooncake's master drops the objects used longest ago,
a tenth at a time, so of a prefix it drops the head first. So Moorage keeps the store below the
point where that begins, and removes pages itself, in the order of `kvtiers.page_order`.

What is there is known of this engine's own puts. Others put too: engines on the same master, an
engine before this one. Where the master can be asked (its HTTP address is known), all that it lists
and that is not known is taken in before anything goes: the head of each object says which page it
follows and when it was put (`kvtiers.objects.Stamp`). Objects of other software are left alone.
Where it cannot, an engine orders its own pages alone, within what its machine lends.

Locks: `writing` is held by whoever puts. The order has a lock of its own, held for microseconds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvtiers.mooncake_endpoints import MooncakeEndpoints, MooncakeUsage, list_keys, read_usage
from kvtiers.mooncake_heads import BATCH, REMOVED, MooncakePage, PageCalls, find_pages
from kvtiers.objects import key_hash
from kvtiers.page_order import NO_PARENT, PageOrder

logger = logging.getLogger(__name__)

# Of memory. The allocator of Mooncake rounds sizes up by an eighth at most, so it may be full at
# 8/9 of what it counts; the rest is for what several engines put between two looks.
MEMORY_SHARE = 0.8
# Of the disk tier. A page that is removed leaves its file, until that is among the oldest of a full
# tier and its owner deletes it: the rest is for those. Of a session in use for longer than it takes
# to write the whole tier anew the head is deleted all the same, and the next sweep drops its tail.
DISK_SHARE = 0.7
GOAL_SHARE = 0.95  # of the limit: how far down one round of evictions goes
LOOK_AGAIN_S = 1.0
ASK_AGAIN_S = 10.0  # a master that did not say how full it is
SWEEP_AGAIN_S = 1.0
SWEEP_S = 2.0


class MooncakePages:
    """The pages of one store, within its limit."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.writing = threading.Lock()
        self.num_evicted = 0
        self.num_orphaned = 0
        self.num_put = 0
        """Puts of new pages so far: what is asked now cannot know of later ones."""
        self._now_s = now_s
        self._indexing = threading.Lock()
        self._order: PageOrder[MooncakePage] = PageOrder()
        self._endpoints = MooncakeEndpoints(owner="")
        self._usage: MooncakeUsage | None = None
        self._last_usage = MooncakeUsage()  # of this connection; a silent master holds no less
        self._other_bytes = 0
        self._other_objects = 0
        self._put_since = 0
        self._look_again_s = -1e9
        self._is_said = False  # that the master does not say how full it is
        self._is_list_said = False  # nor what is there
        self._is_doubtful = False
        self._sweep_again_s = -1e9
        self._strangers: set[str] = set()
        self._put_own = 0
        self._put_by_then: int | None = None  # of all engines, when all that was there was known

    def connect(self, endpoints: MooncakeEndpoints) -> None:
        """There is a new connection: nothing is known of what is there."""
        self.forget_all()
        self._endpoints = endpoints
        self._look_again_s = self._sweep_again_s = -1e9
        self._is_doubtful = False
        self._look_now()

    # What is there

    @property
    def used_bytes(self) -> int:
        return self._order.live_bytes + self._other_bytes

    @property
    def num_objects(self) -> int:
        return len(self._order) + self._other_objects

    @property
    def limit_bytes(self) -> int:
        """What all pages may take, of all engines where the master says what it has."""
        usage, told = self._last_usage, self._endpoints
        if told.has_disk:
            return int(DISK_SHARE * (usage.disk_capacity or told.disk_bytes))
        return int(MEMORY_SHARE * (usage.memory_capacity or told.capacity_bytes))

    def forget_all(self) -> None:
        with self._indexing:
            self._order = PageOrder()
            self._usage = None
            self._last_usage = MooncakeUsage()
            self._other_bytes = self._other_objects = self._put_since = 0
            self._strangers = set()
            self._put_by_then = None

    def note_removed(self, keys: Iterable[str], *, is_all: bool) -> None:
        """These were removed. Where others should have been too, a tail may lack its head now."""
        with self._indexing:
            for page in self._find(keys):
                self._order.discard(page)
            self._is_doubtful = self._is_doubtful or not is_all

    def note_missing(self, keys: Iterable[str], num_put: int) -> None:
        """These were not there when so many had been put. Where they should have been, somebody
        else lets pages go."""
        with self._indexing:
            for page in self._find(keys):
                if page.put_number <= num_put:
                    self._order.lose(page)
                    self._is_doubtful = True

    def note_refused(self, keys: Iterable[str]) -> None:
        """These were not put after all."""
        with self._indexing:
            for key in keys:
                self._order.refuse(key_hash(key))

    def note_full(self) -> None:
        """A put found no room below the limit: the master evicts now."""
        self._is_doubtful = self._is_doubtful or not self._endpoints.has_disk

    def touch(self, keys: Sequence[str]) -> None:
        """These are about to be read."""
        now_ms = _now_ms()
        with self._indexing:
            held = self._find(keys)
            self._order.touch([page.key_hash for page in held])
            for page in held:
                page.used_ms = now_ms

    # Under `writing`

    def add(self, keys: Sequence[str], follows: Sequence[bytes], sizes: Sequence[int]) -> None:
        """These were put."""
        now_ms = _now_ms()
        with self._indexing:
            hashes = [key_hash(key) for key in keys]
            for key, hashed, parent, size in zip(keys, hashes, follows, sizes, strict=True):
                if hashed not in self._order:
                    self._put_since += size
                    self._put_own += 1
                    self.num_put += 1
                    page = MooncakePage(key, hashed, parent, size, now_ms, self.num_put)
                    self._order.add(page)
            self._order.touch(hashes, proves=False)

    def make_room(
        self,
        calls: PageCalls,
        keys: Sequence[str],
        follows: Sequence[bytes],
        sizes: Sequence[int],
    ) -> set[str]:
        """Let pages go for these; which of them may be put, heads first."""
        hashes = [key_hash(key) for key in keys]
        new = {
            hashed: size
            for hashed, size in zip(hashes, sizes, strict=True)
            if hashed not in self._order
        }
        needed = sum(new.values())
        self._look_if_tight(needed)
        is_whole = True
        is_doubtful = self._is_doubtful and self._now_s() >= self._sweep_again_s
        if is_doubtful or self._is_over(needed):
            self._look_now()
            if is_doubtful or self._holds_unknown():
                is_whole = self._sweep(calls)
                self._look_now()
        fits = self._evict(calls, hashes, follows, sizes, may_evict=is_whole)
        return {
            key
            for key, hashed in zip(keys, hashes, strict=True)
            if hashed in fits or hashed not in new
        }

    # Inner parts

    def _is_over(self, needed: int) -> bool:
        return needed > 0 and self.used_bytes + needed > self.limit_bytes > 0

    def _holds_unknown(self) -> bool:
        """Others have put or removed something since it was known what is there."""
        usage, known = self._usage, len(self._order) + len(self._strangers)
        if usage is None:
            return False
        num_own = None if self._put_by_then is None else self._put_by_then + self._put_own
        return usage.num_put != num_own or usage.num_objects != known

    def _look_if_tight(self, needed: int) -> None:
        """Others put as well: the nearer the limit, the more often it is looked how near it is."""
        headroom = self.limit_bytes - self.used_bytes
        is_tight = self._usage is not None and 4 * (self._put_since + needed) > headroom
        if is_tight or self._now_s() >= self._look_again_s:
            self._look_now()

    def _look_now(self) -> None:
        told, is_silent = self._endpoints, self._usage is None
        if not told.metrics or (is_silent and self._now_s() < self._look_again_s):
            return
        try:
            usage = read_usage(told.metrics)
        except OSError as error:
            self._look_again_s = self._now_s() + ASK_AGAIN_S
            if not self._is_said:
                logger.warning("mooncake: this engine orders its own pages alone: %s", error)
            self._is_said = True
            with self._indexing:
                self._usage = None
                self._other_bytes = self._other_objects = 0
            return
        self._look_again_s = self._now_s() + LOOK_AGAIN_S
        self._is_said = False
        used = usage.disk_bytes if told.has_disk else usage.memory_bytes
        with self._indexing:
            self._usage = self._last_usage = usage
            self._put_since = 0
            self._other_bytes = max(0, used - self._order.live_bytes)
            self._other_objects = max(0, usage.num_objects - len(self._order))

    def _evict(
        self,
        calls: PageCalls,
        hashes: Sequence[bytes],
        follows: Sequence[bytes],
        sizes: Sequence[int],
        *,
        may_evict: bool,
    ) -> set[bytes]:
        most = self.limit_bytes or sys.maxsize
        limit = most - self._other_bytes
        goal = limit - int((1 - GOAL_SHARE) * most)
        with self._indexing:
            # Where others have taken all, nothing of ours makes room by going.
            fits, evicted = self._order.make_room(
                hashes, follows, sizes, limit, goal, may_evict=may_evict and limit > 0
            )
        num_removed = self._remove(calls, evicted)
        self.num_evicted += num_removed
        return fits if num_removed == len(evicted) else set()

    def _remove(self, calls: PageCalls, pages: Sequence[MooncakePage]) -> int:
        """Remove pages that have left the order; how many. Those that stay are taken in again."""
        for start in range(0, len(pages), BATCH):
            some = pages[start : start + BATCH]
            codes = calls.remove([page.key for page in some])
            kept = [page for page, code in zip(some, codes, strict=False) if code not in REMOVED]
            kept += some[len(codes) :]
            if kept:
                kept += pages[start + BATCH :]
                with self._indexing:
                    self._take_in(kept)
                self._is_doubtful = True
                return len(pages) - len(kept)
        return len(pages)

    def _sweep(self, calls: PageCalls) -> bool:
        """Learn what is there, and drop what follows a page that is not; whether all is known.

        A page is dropped only where a second list, begun when the first was there, does not have
        the page before it either: while a list is made, pages are put.
        """
        until_s = self._now_s() + SWEEP_S
        put_by_now = self._usage.num_put if self._usage is not None else None
        orphans: list[MooncakePage] = []
        for _ in range(2):
            listed = self._list(calls)
            if listed is None:
                return False
            with self._indexing:
                self._strangers &= listed
                held = list(self._order.in_order())
                for page in held:
                    if page.key not in listed:
                        self._order.lose(page)
            unread = self._adopt(calls, listed, until_s)
            if unread is None:
                return False
            orphans = [] if unread else self._find_orphans()
            if not orphans:
                break
        self._is_doubtful = False
        self._put_by_then, self._put_own = put_by_now, 0
        self._sweep_again_s = self._now_s() + SWEEP_AGAIN_S
        with self._indexing:
            for page in orphans:
                self._order.lose(page)
        self.num_orphaned += self._remove(calls, orphans)
        return True

    def _list(self, calls: PageCalls) -> set[str] | None:
        """The keys that are there: of all objects, or of those known alone; None: no answer."""
        listed: set[str] = set()
        if self._usage is not None:
            try:
                listed = list_keys(self._endpoints.metrics)
            except OSError as error:
                if not self._is_list_said:
                    logger.warning("mooncake: no page makes room, as nobody lists them: %s", error)
                self._is_list_said = True
                return None
            self._is_list_said = False
            return listed
        with self._indexing:
            keys = [page.key for page in self._order.in_order()]
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            answers = calls.exist(some)
            if len(answers) < len(some):
                return None
            listed.update(key for key, answer in zip(some, answers, strict=True) if answer != 0)
        return listed

    def _adopt(self, calls: PageCalls, listed: set[str], until_s: float) -> int | None:
        """Take in what is listed and not known; how many cannot be read now. None: no time."""
        with self._indexing:
            known = {page.key for page in self._order.in_order()}
        unknown = sorted(listed - known - self._strangers)
        found = find_pages(calls, unknown, lambda: self._now_s() <= until_s)
        self._strangers |= found.strangers
        with self._indexing:
            self._take_in(found.pages)
        return found.num_unread if found.is_whole else None

    def _find_orphans(self) -> list[MooncakePage]:
        """What follows a page that is not there, however far behind, the one to go first first."""
        with self._indexing:
            held = list(self._order.in_order())
            order = self._order
            # Those before a page stand behind it: from the end on, each is met before its tail.
            lost: set[bytes] = set()
            for page in reversed(held):
                parent = page.parent_hash
                if parent != NO_PARENT and (parent in lost or parent not in order):
                    lost.add(page.key_hash)
            return [page for page in held if page.key_hash in lost]

    # With the order locked

    def _take_in(self, pages: Sequence[MooncakePage]) -> None:
        """Take in pages that were used at some time before, each at its place."""
        if not pages:
            return
        for page in sorted(pages, key=_used_ms):
            self._order.add(page)
        by_use = sorted(self._order.in_order(), key=_used_ms)
        self._order.touch([page.key_hash for page in by_use], proves=False)

    def _find(self, keys: Iterable[str]) -> list[MooncakePage]:
        """Those of them that are held."""
        pages = (self._order.find(key_hash(key)) for key in keys)
        return [page for page in pages if page is not None]


def _used_ms(page: MooncakePage) -> int:
    return page.used_ms


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
