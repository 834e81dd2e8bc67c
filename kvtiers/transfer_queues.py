# SPDX-License-Identifier: Apache-2.0
"""What the transfer threads take from: moves that wait, the urgent ones first, and how long.

Does not know: how a move is carried out.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtiers.host_pool import PageName


class MoveKind(enum.IntEnum):
    """As the control plane numbers them."""

    LOAD_BACK = 0  # L2 -> L1
    WRITE_BACK = 1  # L1 -> L2
    FETCH = 2  # L3 -> L2
    STORE = 3  # L2 -> L3


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One page on its way, to be acked once under its ticket. Pages are -1 in L3."""

    ticket: int
    kind: MoveKind
    source: int
    target: int
    page_hash: bytes
    name: PageName | None = None  # for what enters L2; without it a restart forgets the page


class Line(Protocol):
    """Moves of one kind that wait."""

    def __len__(self) -> int: ...
    def put(self, moves: Sequence[Move]) -> list[Move]: ...
    def take(self, most: int) -> list[Move]: ...
    def clear(self) -> list[Move]: ...


class OldestFirst:
    """A line in order of arrival; where it is full the oldest gives way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._moves: deque[Move] = deque()

    def __len__(self) -> int:
        return len(self._moves)

    def put(self, moves: Sequence[Move]) -> list[Move]:
        """Add moves; returns those that gave way."""
        self._moves.extend(moves)
        return self.take(len(self._moves) - self._most)

    def take(self, most: int) -> list[Move]:
        """The next moves, up to so many."""
        return [self._moves.popleft() for _ in range(min(most, len(self._moves)))]

    def clear(self) -> list[Move]:
        """Empty the line; returns what waited."""
        return self.take(len(self._moves))


class MoveQueue:
    """Lines of moves by kind, served by one thread: each line before those after it."""

    def __init__(self, lines: Mapping[MoveKind, Line]) -> None:
        self._lines = lines
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_taken = 0  # moves and calls that were taken and are not done
        self.last_end_s = 0.0  # when the thread was last done with a batch; its own to write

    def put(self, moves: Sequence[Move]) -> list[Move]:
        """Add moves of one kind; returns those that gave way, or all once the queue is closed."""
        with self._changed:
            if self._is_closed or not moves:
                return list(moves)
            dropped = self._lines[moves[0].kind].put(moves)
            self._changed.notify_all()
        return dropped

    def give_way(self, choose: Callable[[], list[Move]]) -> list[Move]:
        """Moves that `choose` takes out of a line, with the queue locked."""
        with self._changed:
            return choose()

    def call(self, work: Callable[[], None]) -> bool:
        """Run `work` on the thread, before any move; False: it will not, the queue is closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._calls.append(work)
            self._changed.notify_all()
            return True

    def take(
        self, most: Mapping[MoveKind, int], *, waits: bool = True
    ) -> list[Move] | Callable[[], None] | None:
        """The next work: moves of one kind, up to `most` of it; None: the end.

        Args:
            waits: for work; else there may be none, an empty list.
        """
        with self._changed:
            while True:
                if self._calls:
                    self._num_taken += 1
                    return self._calls.popleft()
                for kind, line in self._lines.items():
                    if len(line):
                        batch = line.take(most[kind])
                        self._num_taken += len(batch)
                        return batch
                if self._is_closed:
                    return None
                if not waits:
                    return []
                self._changed.wait()

    def done(self, num_taken: int) -> None:
        """Moves that were taken are acked, or a call is over."""
        with self._changed:
            self._num_taken -= num_taken
            self._changed.notify_all()

    def __len__(self) -> int:
        """Moves that wait or are being carried out."""
        with self._changed:
            return sum(map(len, self._lines.values())) + self._num_taken

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait until nothing waits or is under way; False: not by that time (monotonic)."""
        with self._changed:
            while any(map(len, self._lines.values())) or self._num_taken or self._calls:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return False
            return True

    def close(self) -> list[Move]:
        """Let the thread end after what it has taken; returns the moves that still waited."""
        with self._changed:
            self._is_closed = True
            left = [move for line in self._lines.values() for move in line.clear()]
            self._changed.notify_all()
            return left
