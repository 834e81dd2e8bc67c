# SPDX-License-Identifier: Apache-2.0
"""Transfer acks of several ranks become the one list that every rank's scheduler is told.

A ticket moves a page on each rank. It is over when it is over everywhere, and went well if it went
well everywhere. Does not know: tensors, processes, what a ticket moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from _scheduler import TransferAck


class AckQuorum:
    """Owned by rank 0. Bounded by the tickets in flight."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: {num_ranks} is not >= 1")
        self._num_ranks = num_ranks
        self._missing: dict[int, set[int]] = {}  # ticket -> ranks that have not reported
        self._lost: set[int] = set()

    def report(self, rank: int, acks: Sequence[TransferAck]) -> list[TransferAck]:
        """Take one rank's acks; returns those now complete, by ticket.

        Raises: ValueError for an unknown rank, or a ticket that rank reported before; then none
        of the acks was taken.
        """
        if not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank: {rank} is not in [0, {self._num_ranks - 1}]")
        tickets = [ack.ticket for ack in acks]
        for i, ticket in enumerate(tickets):
            if rank not in self._missing.get(ticket, {rank}) or ticket in tickets[:i]:
                raise ValueError(f"acks[{i}].ticket: {ticket} was reported by rank {rank} before")
        complete: list[TransferAck] = []
        for ack in acks:
            missing = self._missing.setdefault(ack.ticket, set(range(self._num_ranks)))
            missing.discard(rank)
            if not ack.ok:
                self._lost.add(ack.ticket)
            if not missing:
                del self._missing[ack.ticket]
                ok = ack.ticket not in self._lost
                self._lost.discard(ack.ticket)
                complete.append(TransferAck(ticket=ack.ticket, ok=ok))
        return sorted(complete, key=lambda ack: ack.ticket)

    @property
    def num_pending(self) -> int:
        """Tickets some ranks have reported and others have not."""
        return len(self._missing)
