# SPDX-License-Identifier: Apache-2.0
"""What the transfers have done: pages, bytes and time by kind of move, and how fast each is now.

Does not know: who moves, why. Written by the transfer threads, read by any.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.transfer_queues import MoveKind

# A new measurement counts for so much, weighed by nothing: a batch is pages enough.
SMOOTHING = 0.2


@dataclass(slots=True)
class _Totals:
    num_pages: int = 0
    num_lost: int = 0
    num_dropped: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0


class Rates:
    """Totals since the start, and a moving average of the rate of each kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = {kind: _Totals() for kind in MoveKind}
        self._num_layered_pages = 0

    def note(self, kind: MoveKind, oks: Sequence[bool], num_bytes: int, seconds: float) -> None:
        """A batch was carried out."""
        with self._lock:
            totals = self._totals[kind]
            totals.num_pages += sum(oks)
            totals.num_lost += len(oks) - sum(oks)
            totals.num_bytes += num_bytes
            totals.seconds += seconds
            if num_bytes and seconds > 0:
                now = num_bytes / seconds
                before = totals.bytes_per_s or now
                totals.bytes_per_s = before + SMOOTHING * (now - before)

    def note_layered(self, num_pages: int) -> None:
        """So many of the pages that were noted came layer by layer."""
        with self._lock:
            self._num_layered_pages += num_pages

    def note_dropped(self, kind: MoveKind, num_moves: int) -> None:
        """Moves that a full queue let go of."""
        if num_moves:
            with self._lock:
                self._totals[kind].num_dropped += num_moves
                self._totals[kind].num_lost += num_moves

    def bytes_per_s(self, kind: MoveKind) -> float:
        """How fast this kind of move is lately; 0 before the first."""
        with self._lock:
            return self._totals[kind].bytes_per_s

    def as_dict(self) -> dict[str, float]:
        """By the names the engine's statistics carry: `write_back_pages`, `fetch_lost`, ..."""
        with self._lock:
            named = {}
            for kind, totals in self._totals.items():
                name = kind.name.lower()
                named[f"{name}_pages"] = float(totals.num_pages)
                named[f"{name}_lost"] = float(totals.num_lost)
                named[f"{name}_dropped"] = float(totals.num_dropped)
                named[f"{name}_bytes"] = float(totals.num_bytes)
                named[f"{name}_seconds"] = totals.seconds
                named[f"{name}_bytes_per_s"] = totals.bytes_per_s
            named["load_back_layered_pages"] = float(self._num_layered_pages)
            return named
