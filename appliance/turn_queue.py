# SPDX-License-Identifier: Apache-2.0
"""Turns that wait for the turn before them, in the order they came (`on_conflict: queue`).

A waiting turn has its id, its events and its place, all of them durable: it is in the store before
its client hears of it, and a restarted process, or another one where this one is gone, takes it up.
It is no part of the session yet. Does not know: how a turn is begun or run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from appliance import turn_view
from appliance.errors import ApiError, as_api_error
from appliance.turn_events import TurnEvents
from appliance.turn_preparation import Ask
from appliance.turn_record import DEADLINE, abandoned, cancelled_unbegun
from appliance.turn_run import TERMINAL_EVENT
from sessions.errors import SessionError
from sessions.store import SessionStore
from sessions.turn_log import INCOMPLETE, PendingTurn, Record

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # per session; a client that sends more is not talking to an agent


@dataclass(slots=True)
class WaitingTurn:
    """One turn in a session's queue. `pending` is what the store has of it.

    It stays in the queue while it begins, so that it is always found somewhere.
    """

    ask: Ask
    pending: PendingTurn
    events: TurnEvents
    is_beginning: bool = False

    @property
    def turn_id(self) -> str:
        return self.pending.id

    def wire(self) -> dict[str, Any]:
        return turn_view.pending_wire(self.pending)


@dataclass(slots=True)
class TurnQueue:
    """The queues of all sessions.

    begin: begins a turn now; raises what refuses it. wait_idle: waits until a session has no turn.
    """

    store: SessionStore
    clock_ms: Callable[[], int]
    begin: Callable[[WaitingTurn], Awaitable[None]]
    wait_idle: Callable[[str], Awaitable[None]]
    _waiting: dict[str, deque[WaitingTurn]] = field(default_factory=dict)
    _workers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _timers: set[asyncio.Task[None]] = field(default_factory=set)
    _is_closed: bool = False

    def first(self, session_id: str) -> str | None:
        """Return the id of the turn of this session that has waited longest."""
        queue = self._waiting.get(session_id)
        return queue[0].turn_id if queue else None

    def check_room(self, session_id: str) -> None:
        """Raise ApiError capacity where no further turn may wait in this session."""
        if len(self._waiting.get(session_id, ())) >= MAX_WAITING:
            raise ApiError("capacity", f"{MAX_WAITING} turns wait in this session already")

    def add(self, turn: WaitingTurn) -> None:
        """Put a turn, which the store has, at the end of its session's queue.

        Once this is closed, the turn waits for the next process.
        """
        session_id = turn.pending.session_id
        queue = self._waiting.setdefault(session_id, deque())
        turn.events.emit("turn.created", {"turn": turn.wire()})
        turn.events.emit("turn.queued", {"position": len(queue) + 1})
        if self._is_closed:
            turn.events.detach()
            return
        queue.append(turn)
        self._arm_deadline(turn)
        if session_id not in self._workers:
            self._workers[session_id] = asyncio.create_task(self._serve(session_id))

    def find(self, session_id: str, turn_id: str) -> WaitingTurn | None:
        """Return a waiting turn by its id."""
        queue = self._waiting.get(session_id, ())
        return next((turn for turn in queue if turn.turn_id == turn_id), None)

    def find_turn(self, turn_id: str) -> WaitingTurn | None:
        """Return a waiting turn of any session."""
        turns = (turn for queue in self._waiting.values() for turn in queue)
        return next((turn for turn in turns if turn.turn_id == turn_id), None)

    @property
    def num_waiting(self) -> int:
        """Turns that wait, in all sessions."""
        return sum(map(len, self._waiting.values()))

    async def cancel(self, turn: WaitingTurn) -> None:
        """Take a turn that is not beginning out of its queue. Raises: SessionError."""
        await self._end(turn, cancelled_unbegun(turn.pending, self.clock_ms()))

    async def _end(self, turn: WaitingTurn, record: Record) -> None:
        await self.store.end_queued(turn.pending.session_id, record)
        self._take_out(turn)
        self._tell(turn, record)

    def _arm_deadline(self, turn: WaitingTurn) -> None:
        if turn.pending.deadline_ms is None:
            return
        spent_ms = self.clock_ms() - turn.pending.created_at_ms
        wait_s = max(0.0, (turn.pending.deadline_ms - spent_ms) / 1000)
        timer = asyncio.create_task(self._end_late(turn, wait_s))
        self._timers.add(timer)
        timer.add_done_callback(self._timers.discard)

    async def _end_late(self, turn: WaitingTurn, wait_s: float) -> None:
        """End a turn whose deadline passes while it waits."""
        await asyncio.sleep(wait_s)
        queue = self._waiting.get(turn.pending.session_id, ())
        if turn.is_beginning or turn not in queue:
            return
        unbegun = cancelled_unbegun(turn.pending, self.clock_ms())
        record = replace(unbegun, status=INCOMPLETE, incomplete_reason=DEADLINE)
        try:
            await self._end(turn, record)
        except SessionError as problem:  # it ends at its begin
            logger.warning("deadline of a waiting turn not stored: %s", problem)

    async def cancel_all(self, session_id: str) -> None:
        """Empty a session's queue (it is being closed). Raises: SessionError."""
        for turn in list(self._waiting.get(session_id, ())):
            if not turn.is_beginning:
                await self.cancel(turn)

    async def close(self) -> None:
        """Begin no further turn here; those that wait stay in the store for who comes next."""
        self._is_closed = True
        for worker in (*self._workers.values(), *self._timers):
            worker.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)
        for queue in self._waiting.values():
            while queue:
                queue.popleft().events.detach()

    async def _serve(self, session_id: str) -> None:
        """Begin one turn after the other until none waits."""
        queue = self._waiting[session_id]
        try:
            while queue:
                turn = queue[0]
                try:
                    await self.wait_idle(session_id)
                    if turn not in queue:  # cancelled while it waited
                        continue
                    turn.is_beginning = True
                    await self.begin(turn)
                except Exception as error:
                    await self._fail(turn, as_api_error(error), error)
                self._take_out(turn)
        finally:
            del self._workers[session_id]
            if not queue:
                self._waiting.pop(session_id, None)

    async def _fail(self, turn: WaitingTurn, api_error: ApiError, error: Exception) -> None:
        if api_error.code == "internal_error":
            logger.error("queued turn failed", exc_info=error, extra={"turn_id": turn.turn_id})
        record = abandoned(turn.pending, api_error, self.clock_ms())
        try:
            await self.store.end_queued(turn.pending.session_id, record)
        except SessionError as problem:
            # Its readers are told all the same: what they saw ends it, whoever finds it again.
            logger.error("end of a queued turn not stored: %s", problem)
        self._tell(turn, record)

    def _take_out(self, turn: WaitingTurn) -> None:
        queue = self._waiting.get(turn.pending.session_id)
        if queue is not None and turn in queue:
            queue.remove(turn)

    def _tell(self, turn: WaitingTurn, record: Record) -> None:
        wire = turn_view.turn_wire(turn.pending.session_id, record)
        turn.events.emit(TERMINAL_EVENT[record.status], turn_view.terminal_fields(wire))
        turn.events.close()
