# SPDX-License-Identifier: Apache-2.0
"""Transfer acks and probe answers of several ranks become the one list every scheduler is told.

A ticket moves a page on each rank. It is over when it is over everywhere, and went well if it went
well everywhere. Each rank's part of a page is in the store or not: a probe has found what all of
them have. Does not know: tensors, processes, what a ticket moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from _scheduler import ProbeDone, TransferAck


class AckQuorum:
    """Owned by rank 0. Bounded by the tickets and probes in flight."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: {num_ranks} is not >= 1")
        self._num_ranks = num_ranks
        self._missing: dict[int, set[int]] = {}  # ticket -> ranks that have not reported
        self._lost: set[int] = set()
        self._probes: dict[int, dict[int, int]] = {}  # probe -> rank -> leading pages it has

    def report(self, rank: int, acks: Sequence[TransferAck]) -> list[TransferAck]:
        """Take one rank's acks; returns those now complete, by ticket.

        Raises: ValueError for an unknown rank, or a ticket that rank reported before; then none
        of the acks was taken.
        """
        self._check_rank(rank)
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

    def report_probes(self, rank: int, probes: Sequence[ProbeDone]) -> list[ProbeDone]:
        """Take one rank's probe answers; returns those now complete, by probe.

        Raises: ValueError as `report` does.
        """
        self._check_rank(rank)
        ids = [probe.probe_id for probe in probes]
        for i, probe_id in enumerate(ids):
            if rank in self._probes.get(probe_id, {}) or probe_id in ids[:i]:
                raise ValueError(f"probes[{i}].probe_id: {probe_id} was reported by rank {rank}")
        complete: list[ProbeDone] = []
        for probe in probes:
            found = self._probes.setdefault(probe.probe_id, {})
            found[rank] = probe.num_pages
            if len(found) == self._num_ranks:
                del self._probes[probe.probe_id]
                fewest = min(found.values())
                complete.append(ProbeDone(probe_id=probe.probe_id, num_pages=fewest))
        return sorted(complete, key=lambda probe: probe.probe_id)

    @property
    def num_pending(self) -> int:
        """Tickets and probes some ranks have reported and others have not."""
        return len(self._missing) + len(self._probes)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank: {rank} is not in [0, {self._num_ranks - 1}]")
