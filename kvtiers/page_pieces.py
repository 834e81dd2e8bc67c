# SPDX-License-Identifier: Apache-2.0
"""Runs of layers of many pages, from slots of L2 to pages of L1: where each piece lies, and how
far ahead of the link they are queued.

Does not know: whether a page is any good, who waits for a layer, streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtiers.layered_load import Wait

Body = NDArray[np.uint8]  # [page_bytes], contiguous
Indices = NDArray[np.int64]


class Incoming:
    """Pages to be written, some at a time: (pages of L1, their slots), drawn once.

    Each part is looked at when it is drawn: draw it just before its copies.

    Args:
        bodies: uint8 [num_slots, page_bytes], a row contiguous.
    """

    def __init__(
        self, bodies: NDArray[np.uint8], parts: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        self.bodies = bodies
        self.parts = parts

    def __iter__(self) -> Iterator[tuple[int, Body]]:
        """Page by page."""
        for pages, slots in self.parts:
            for page, slot in zip(pages, slots, strict=True):
                yield page, self.bodies[slot]


class Rows:
    """Where pieces of equal rows lie, as addresses.

    Args:
        base: address of row 0.
        pitch: from one row to the next, bytes.
        row_bytes: what belongs to a row, at most `pitch`.
    """

    def __init__(self, base: int, num_rows: int, pitch: int, row_bytes: int) -> None:
        assert 0 < row_bytes <= pitch
        self.base, self.num_rows, self.pitch, self.row_bytes = base, num_rows, pitch, row_bytes

    def addresses(self, rows: Indices, piece: slice) -> NDArray[np.uint64]:
        """Of bytes [piece.start, piece.stop) of each of these rows.

        Raises:
            IndexError: a row, or a part of the piece, that is not there.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_rows:
            raise IndexError(
                f"rows: {rows.min()} to {rows.max()}, allowed: 0 to {self.num_rows - 1}"
            )
        if not 0 <= piece.start <= piece.stop <= self.row_bytes:
            raise IndexError(f"piece: {piece.start} to {piece.stop} of {self.row_bytes} bytes")
        first = np.uint64(self.base + piece.start)
        return first + rows.astype(np.uint64) * np.uint64(self.pitch)


class Window:
    """Bounds what is queued and not done: a driver's queue that is full may hold up whoever else
    launches.

    Args:
        most_bytes: under way at once, if more than one call's.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._under_way: deque[tuple[int, Wait]] = deque()
        self._num_bytes = 0

    def make_room(self, num_bytes: int) -> None:
        """Wait until so many more may be queued."""
        while self._under_way and self._num_bytes + num_bytes > self._most_bytes:
            done, wait = self._under_way.popleft()
            wait()
            self._num_bytes -= done

    def note(self, num_bytes: int, wait: Wait) -> None:
        """So many were queued; `wait` waits for them."""
        self._under_way.append((num_bytes, wait))
        self._num_bytes += num_bytes
