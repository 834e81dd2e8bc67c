# SPDX-License-Identifier: Apache-2.0
"""Load-backs that steps read as they come: which rows wait for which, and what became of them.

A plan names, for each row, the tickets that fill pages it reads. They go to the transfers as one
load by layers; the step waits for its layers, its result for the acks. Does not know: how bytes
move, what a row computes. One thread, the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from _scheduler import Plan
from kvtiers.layered_load import LayeredLoad
from kvtiers.transfer import Move


class StepLoad:
    """One load. `layers` is shared with who brings it and who reads it."""

    def __init__(self, layers: LayeredLoad, num_pages: int) -> None:
        self.layers = layers
        self._num_outstanding = num_pages
        self.is_bad = False  # a page did not come whole: what was computed from it is void

    @property
    def is_over(self) -> bool:
        """Every ticket of it is acked."""
        return self._num_outstanding == 0

    def note_ack(self, ok: bool) -> None:
        """One ticket is."""
        self._num_outstanding -= 1
        self.is_bad = self.is_bad or not ok


class StepLoads:
    """Those of which a ticket is not acked yet."""

    def __init__(
        self, num_layers: int, start: Callable[[Sequence[Move], LayeredLoad], None]
    ) -> None:
        self._num_layers = num_layers
        self._start = start  # TransferEngine.load_layers
        self._of_ticket: dict[int, StepLoad] = {}
        self._bad: list[StepLoad] = []

    def take(self, plan: Plan, moves: Sequence[Move]) -> list[Move]:
        """Start the loads that rows of this plan are the first to wait for; returns the moves that
        nobody reads as they come."""
        for first, end in sorted({(first, end) for first, end in plan.row_loads.tolist()}):
            mine = [move for move in moves if first <= move.ticket < end]
            if not mine:
                continue  # nothing to wait for, or the moves of an earlier plan
            load = StepLoad(LayeredLoad(self._num_layers), len(mine))
            self._of_ticket.update(dict.fromkeys((move.ticket for move in mine), load))
            self._start(mine, load.layers)
        return [move for move in moves if move.ticket not in self._of_ticket]

    def of_rows(self, plan: Plan) -> list[StepLoad | None]:
        """What each row of a plan waits for, after `take`."""
        return [
            self._find(range(first, end)) if first >= 0 else None
            for first, end in plan.row_loads.tolist()
        ]

    def note_ack(self, ticket: int, ok: bool) -> None:
        """A ticket is over."""
        load = self._of_ticket.pop(ticket, None)
        if load is None:
            return
        load.note_ack(ok)
        if load.is_over and load.is_bad:
            self._bad.append(load)

    def take_bad(self) -> list[StepLoad]:
        """Loads that came to a bad end since the last call: rows that read them are void."""
        bad, self._bad = self._bad, []
        return bad

    def _find(self, tickets: range) -> StepLoad:
        load = next((self._of_ticket[t] for t in tickets if t in self._of_ticket), None)
        # A row that did not wait would read what is not there, and nobody would ever know.
        assert load is not None, (
            f"no step was told of tickets {tickets.start} to {tickets.stop - 1}"
        )
        return load
