# SPDX-License-Identifier: Apache-2.0
"""Asks the store whether it still has what it once took, where somebody depends on it.

A store may let pages go at any time and tells nobody. Before a prefix leaves L1 for the store it is
asked for all of it; and where the store refuses a page, for those before it: it takes no page whose
head it let go. Does not know: why a page moves, what becomes of those that are gone.

Thread rule: the store answers on a thread of its own, all else belongs to the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.loop.page_names import ROOT_HASH, PageNames
from kvtiers.store import StoreState
from kvtiers.transfer import TransferEngine

MOST_PAGES = 1 << 14  # of one question: what lies before them is asked when they are stored
ASK_AGAIN_S = 1.0


class StoreCheck:
    """A question; `gone`: the pages that the store does not have, once it `is_done`."""

    def __init__(self) -> None:
        self.is_done = False
        self.gone: Sequence[bytes] = ()
        self.stored: set[bytes] = set()  # while it was under way: it may not know of these


class StoreChecks:
    """Questions under way."""

    def __init__(
        self,
        transfers: TransferEngine,
        names: PageNames,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transfers = transfers
        self._names = names
        self._now_s = now_s
        self._answered: deque[StoreCheck] = deque()  # append and popleft are atomic
        self._under_way: list[StoreCheck] = []
        self._doubted: StoreCheck | None = None
        self._doubt_again_s = -1e9

    def ask(self, page_hash: bytes) -> StoreCheck:
        """Ask for a page and all before it; it is done at once where the store cannot say."""
        check = StoreCheck()
        hashes = self._prefix_of(page_hash)
        failures = self._failures()
        if not hashes or failures is None:
            check.is_done = True
            return check

        def answer(num_found: int) -> None:
            if failures == self._failures():  # else it was not the store that said so
                check.gone = hashes[num_found:]
            self._answered.append(check)

        self._under_way.append(check)
        self._transfers.probe(hashes, answer)
        return check

    def note_stored(self, page_hash: bytes) -> None:
        """The store took a page just now."""
        for check in self._under_way:
            check.stored.add(page_hash)

    def doubt(self, page_hash: bytes) -> None:
        """Ask for it, unless that was done a moment ago: a page behind it was refused."""
        is_asking = self._doubted is not None and not self._doubted.is_done
        if page_hash != ROOT_HASH and not is_asking and self._now_s() >= self._doubt_again_s:
            self._doubt_again_s = self._now_s() + ASK_AGAIN_S
            self._doubted = self.ask(page_hash)

    def take(self) -> list[StoreCheck]:
        """Those answered since the last call; they are done now."""
        checks: list[StoreCheck] = []
        while self._answered:
            check = self._answered.popleft()
            check.gone = [page_hash for page_hash in check.gone if page_hash not in check.stored]
            check.is_done = True
            self._under_way.remove(check)
            checks.append(check)
        return checks

    def _prefix_of(self, page_hash: bytes) -> list[bytes]:
        """Its pages, heads first, as far back as their names are known."""
        hashes: list[bytes] = []
        while page_hash != ROOT_HASH and len(hashes) < MOST_PAGES:
            name = self._names.find(page_hash)
            if name is None:
                break
            hashes.append(page_hash)
            page_hash = name.parent_hash
        return hashes[::-1]

    def _failures(self) -> int | None:
        """How often it failed so far; None: there is none that is well."""
        store = self._transfers.store
        status = store.status() if store is not None else None
        if status is None or status.state is not StoreState.UP:
            return None
        return status.counters.get("failures", 0)
