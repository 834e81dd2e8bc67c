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


class MoveQueue:
    """Two lines of moves, served by one thread or more: the first always before the second."""

    def __init__(
        self, first: MoveKind | None, second: MoveKind | None, *, most_second: int
    ) -> None:
        self._lines: dict[MoveKind, deque[Move]] = {
            kind: deque() for kind in (first, second) if kind is not None
        }
        self._bounded = second
        self._most = most_second
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_taken = 0  # moves and calls that were taken and are not done
        self.last_end_s = 0.0  # when the thread was last done with a batch; its own to write

    def put(self, moves: Sequence[Move]) -> list[Move]:
        """Add moves; returns those that gave way: the oldest of a line that is full, or all of
        them once the queue is closed."""
        dropped: list[Move] = []
        with self._changed:
            if self._is_closed:
                return list(moves)
            for move in moves:
                line = self._lines[move.kind]
                line.append(move)
                if move.kind is self._bounded and len(line) > self._most:
                    dropped.append(line.popleft())
            self._changed.notify_all()
        return dropped

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread, before any move."""
        with self._changed:
            self._calls.append(work)
            self._changed.notify_all()

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
                    if line:
                        batch = [line.popleft() for _ in range(min(most[kind], len(line)))]
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
            while any(self._lines.values()) or self._num_taken or self._calls:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return False
            return True

    def close(self) -> list[Move]:
        """Let the thread end after what it has taken; returns the moves that still waited."""
        with self._changed:
            self._is_closed = True
            left = [move for line in self._lines.values() for move in line]
            for line in self._lines.values():
                line.clear()
            self._changed.notify_all()
            return left
