# SPDX-License-Identifier: Apache-2.0
"""Pages that wait for the store, so many at most: ends of prefixes give way before their heads.

A page without all the pages before it is worth nothing in a store. So where the line is full, the
prefix that has waited longest loses its end; and what follows a page that gave way, or that the
store did not take, is not stored either, until that one is offered again.

Does not know: how a page is stored, L2. One thread at a time (the queue's lock).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtiers.transfer_queues import Move

MOST_MISSING = 1 << 16  # names remembered; one that is forgotten costs an end without its head


class StoreLine:
    """At most `most` moves, oldest first.

    Args:
        parent_of: the name of the page before a move's page; empty where nobody knows it.
    """

    def __init__(self, most: int, parent_of: Callable[[Move], bytes]) -> None:
        self._most = most
        self._parent_of = parent_of
        self._waiting: OrderedDict[int, Move] = OrderedDict()  # by ticket
        self._behind: dict[bytes, list[int]] = {}  # tickets that wait, by the page they follow
        self._ticket_of: dict[bytes, int] = {}  # the newest that waits, by its page
        self._giving = b""  # the page before the last that gave way: a prefix goes as a whole
        self._missing: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, moves: Sequence[Move]) -> list[Move]:
        """Add moves; returns those that gave way."""
        gone: list[Move] = []
        # Heads first, whatever order they were thought of in.
        for move in sorted(moves, key=lambda move: move.name.start if move.name else 0):
            if self._parent_of(move) in self._missing:
                self._miss(move.page_hash)
                gone.append(move)
                continue
            self._missing.pop(move.page_hash, None)
            self._waiting[move.ticket] = move
            self._ticket_of[move.page_hash] = move.ticket
            self._behind.setdefault(self._parent_of(move), []).append(move.ticket)
            if len(self._waiting) > self._most:
                victim = self._next_end()
                self._remove(victim)
                self._giving = self._parent_of(victim)
                self._miss(victim.page_hash)
                gone.append(victim)
        return gone

    def take(self, most: int) -> list[Move]:
        """The next moves, up to so many."""
        taken = list(islice(self._waiting.values(), most))
        for move in taken:
            self._remove(move)
        return taken

    def lose(self, page_hashes: Sequence[bytes]) -> list[Move]:
        """The store did not take these; returns what waited behind them, which gives way."""
        gone: list[Move] = []
        left = list(page_hashes)
        while left:
            page_hash = left.pop()
            self._miss(page_hash)
            for ticket in list(self._behind.get(page_hash, ())):
                move = self._waiting[ticket]
                self._remove(move)
                gone.append(move)
                left.append(move.page_hash)
        return gone

    def clear(self) -> list[Move]:
        """Empty the line; returns what waited."""
        left = list(self._waiting.values())
        self._waiting.clear()
        self._behind.clear()
        self._ticket_of.clear()
        return left

    def _next_end(self) -> Move:
        """The end of the prefix that is giving way, or of the one that has waited longest."""
        ticket = self._ticket_of.get(self._giving, next(iter(self._waiting)))
        for _ in range(len(self._waiting)):  # no page follows itself; one that did would end here
            behind = self._behind.get(self._waiting[ticket].page_hash)
            if not behind:
                break
            ticket = behind[-1]
        return self._waiting[ticket]

    def _remove(self, move: Move) -> None:
        del self._waiting[move.ticket]
        if self._ticket_of.get(move.page_hash) == move.ticket:
            del self._ticket_of[move.page_hash]
        parent = self._parent_of(move)
        self._behind[parent].remove(move.ticket)
        if not self._behind[parent]:
            del self._behind[parent]

    def _miss(self, page_hash: bytes) -> None:
        self._missing[page_hash] = None
        self._missing.move_to_end(page_hash)
        while len(self._missing) > MOST_MISSING:
            self._missing.popitem(last=False)
