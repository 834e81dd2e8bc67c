# SPDX-License-Identifier: Apache-2.0
"""FlightWatch: no transfer meets a step in flight, nor another transfer, whatever ran when.

A test on a CPU sees a wrong byte only if two threads happen to meet. This looks at what may meet
instead: a step is taken to use its pages from its dispatch until its result is taken, a transfer
from its submission until its ack is taken. Everything it hooks is called on the loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.execution.steps import Step, StepResult
from engine.loop.server import EngineServer
from kvtiers.layered_load import LayeredLoad
from kvtiers.transfer import Ack, Move, MoveKind
from tests.fakes.scripted_runner import ScriptedRunner

Places = set[tuple[str, int]]  # (tier, page)
LOG_LEN = 20_000


@dataclass
class Uses:
    """Pages that a step or a transfer reads and writes."""

    what: str
    reads: Places
    writes: Places
    awaited: frozenset[int] = frozenset()  # of a step: loads whose layers it waits for itself

    def meets(self, other: Uses) -> Places:
        return (
            self.writes & (other.reads | other.writes) | self.reads & other.writes  # fmt: skip
        )


def uses_of_move(move: Move) -> Uses:
    source, target = {
        MoveKind.LOAD_BACK: ("l2", "l1"),
        MoveKind.WRITE_BACK: ("l1", "l2"),
        MoveKind.FETCH: ("", "l2"),
        MoveKind.STORE: ("l2", ""),
    }[move.kind]
    return Uses(
        f"{move.kind.name.lower()} {move.ticket}",
        {(source, move.source)} if source else set(),
        {(target, move.target)} if target else set(),
    )


class FlightWatch:
    """Hooks into a server that does not run yet. `log`: what was dispatched, submitted, acked."""

    def __init__(self, server: EngineServer, runner: ScriptedRunner, max_slots: int) -> None:
        self._runner = runner
        self.log: deque[dict[str, Any]] = deque(maxlen=LOG_LEN)
        self.num_steps = 0
        self.num_steps_ahead = 0  # dispatched behind a long one whose result is not in
        self._loop = server._loop
        self._newest_len = 0
        self._steps: deque[Uses] = deque()
        self._moves: dict[int, tuple[Move, Uses]] = {}
        self._tickets_of: dict[int, tuple[LayeredLoad, frozenset[int]]] = {}
        width = -(-runner.max_context_len // runner.page_size) + 1
        self._table = np.full((max_slots, width), -1, np.int32)
        self._scheduler = server._tiers._scheduler
        executor = server._executor
        self._dispatch, self._take = executor.dispatch, executor.take
        executor.dispatch, executor.take = self.dispatch, self.take  # type: ignore[method-assign]
        plane = self._plane = server._tiers._plane
        if plane is not None:
            transfers = plane.transfers
            self._submit, self._take_acks = transfers.submit, transfers.take_acks
            self._load_layers = transfers.load_layers
            transfers.submit = self.submit  # type: ignore[method-assign]
            transfers.load_layers = self.load_layers  # type: ignore[method-assign]
            transfers.take_acks = self.take_acks  # type: ignore[method-assign]

    def dispatch(self, step: Step) -> None:
        """A step may begin from here on."""
        uses = self._uses_of_step(step)
        for ticket, (move, other) in self._moves.items():
            if ticket in uses.awaited:
                assert ("l1", move.target) not in uses.writes, f"{uses.what} writes where it reads"
            else:
                self._check(uses, other)
        if self._steps and self._newest_len > self._loop.run_ahead.tokens:
            self.num_steps_ahead += 1
        self._newest_len = len(step.forward.input_ids)
        self._steps.append(uses)
        self.num_steps += 1
        self._scheduler.check_integrity()
        self._dispatch(step)

    def take(self) -> StepResult | None:
        """A step is over when its result is taken."""
        result = self._take()
        if result is not None:
            self._steps.popleft()
            self.log.append({"result": result.step_id, "error": result.error})
        return result

    def submit(self, moves: Sequence[Move]) -> None:
        """Transfers may begin from here on."""
        self._note(moves)
        self._submit(moves)

    def load_layers(self, moves: Sequence[Move], load: LayeredLoad) -> None:
        """The same; the step that waits for them is not dispatched yet."""
        self._note(moves)
        self._tickets_of[id(load)] = (load, frozenset(move.ticket for move in moves))
        self._load_layers(moves, load)

    def _note(self, moves: Sequence[Move]) -> None:
        for move in moves:
            uses = uses_of_move(move)
            self.log.append(
                {"move": move.kind.name, "ticket": move.ticket, "from": move.source}
                | {"to": move.target, "hash": move.page_hash.hex()}
            )
            for step in self._steps:
                self._check(uses, step)
            for _, other in self._moves.values():
                self._check(uses, other)
            self._moves[move.ticket] = (move, uses)

    def take_acks(self) -> list[Ack]:
        """Transfers are over when their acks are taken; what came is what its name says."""
        acks = self._take_acks()
        for ack in acks:
            move, _ = self._moves.pop(ack.ticket)
            self.log.append({"ack": ack.ticket, "ok": ack.ok})
            if ack.ok and move.kind is not MoveKind.STORE:
                self._check_bytes(move)
        return acks

    def _check(self, uses: Uses, other: Uses) -> None:
        met = uses.meets(other)
        assert not met, f"{uses.what} and {other.what} are under way at once and meet at {met}"

    def _check_bytes(self, move: Move) -> None:
        assert self._plane is not None
        name = self._plane.names.find(move.page_hash)
        if name is None:
            return
        if move.kind is MoveKind.LOAD_BACK:
            held = self._runner.kv_pool[move.target].numpy().astype("<i4").tobytes()
        else:
            held = self._plane.transfers.pool.body(move.target).tobytes()
        assert held == name.token_ids * self._runner.num_layers, (
            f"{move.kind.name} {move.ticket} brought {np.frombuffer(held, '<i4')} for "
            f"{np.frombuffer(name.token_ids, '<i4')}"
        )

    def _uses_of_step(self, step: Step) -> Uses:
        batch, size = step.forward, self._runner.page_size
        deltas = step.page_deltas
        assert len({(slot, index) for slot, index, _ in deltas.tolist()}) == len(deltas)
        self._table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]
        written = {place // size for place in batch.slot_mapping.tolist()}
        read: set[int] = set()
        for source, target, _ in batch.page_copies.tolist():
            read.add(source)
            written.add(target)
        for slot, seq_len in zip(batch.row_slots.tolist(), batch.seq_lens.tolist(), strict=True):
            read.update(self._table[slot, : -(-seq_len // size)].tolist())
        self.log.append(
            {
                "step": batch.step_id,
                "slots": batch.row_slots.tolist(),
                "indptr": batch.row_indptr.tolist(),
                "seq_lens": batch.seq_lens.tolist(),
                "ids": batch.input_ids.tolist(),
                "mapping": batch.slot_mapping.tolist(),
                "copies": batch.page_copies.tolist(),
                "deltas": deltas.tolist(),
                "samples": batch.sample_rows.tolist(),
            }
        )
        awaited = [self._tickets_of[id(load)][1] for load in batch.loads]
        return Uses(
            f"step {batch.step_id}",
            {("l1", page) for page in read},
            {("l1", page) for page in written},
            frozenset().union(*awaited),
        )
