# SPDX-License-Identifier: Apache-2.0
"""Turns that wait for the turn before them, in the order they came (`on_conflict: queue`).

A waiting turn has its id, its events and its place; it is no part of the session yet. It is kept in
this process alone: a client that loses it to a crash sends it again, under its idempotency key.
Does not know: how a turn is begun or run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from appliance import turn_view
from appliance.errors import ApiError, as_api_error, error_object
from appliance.turn_events import TurnEvents
from appliance.turn_preparation import Ask
from appliance.turn_run import TERMINAL_EVENT
from sessions.turn_log import CANCELLED, FAILED, PendingTurn, TurnUsage

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # per session; a client that sends more is not talking to an agent
QUEUED = "queued"


@dataclass(slots=True)
class WaitingTurn:
    """One turn in a session's queue. `pending` is how it would have run when it came.

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
        return turn_view.pending_wire(self.pending, QUEUED)

    def end(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """End it before it began: cancelled, or failed."""
        turn = {
            **self.wire(),
            "status": status,
            "revision": self.pending.base_revision,
            "committed": False,
            "committed_tokens": 0,
            "usage": turn_view.usage_wire(TurnUsage()),
        }
        if error is not None:
            turn["error"] = error_object(error)
        self.events.emit(TERMINAL_EVENT[status], turn_view.terminal_fields(turn))
        self.events.close()
        return turn


@dataclass(slots=True)
class TurnQueue:
    """The queues of all sessions.

    begin: begins a turn now; raises what refuses it. wait_idle: waits until a session has no turn.
    """

    begin: Callable[[WaitingTurn], Awaitable[None]]
    wait_idle: Callable[[str], Awaitable[None]]
    _waiting: dict[str, deque[WaitingTurn]] = field(default_factory=dict)
    _workers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def has(self, session_id: str) -> bool:
        """Whether turns of this session wait."""
        return bool(self._waiting.get(session_id))

    def add(self, turn: WaitingTurn) -> None:
        """Put a turn at the end of its session's queue. Raises: ApiError capacity."""
        session_id = turn.ask.session_id
        queue = self._waiting.setdefault(session_id, deque())
        if len(queue) >= MAX_WAITING:
            raise ApiError("capacity", f"{MAX_WAITING} turns wait in this session already")
        turn.events.emit("turn.created", {"turn": turn.wire()})
        turn.events.emit("turn.queued", {"position": len(queue) + 1})
        queue.append(turn)
        if session_id not in self._workers:
            self._workers[session_id] = asyncio.create_task(self._serve(session_id))

    def find(self, session_id: str, turn_id: str) -> WaitingTurn | None:
        """Return a waiting turn by its id."""
        queue = self._waiting.get(session_id, ())
        return next((turn for turn in queue if turn.turn_id == turn_id), None)

    def find_by_key(self, ask: Ask) -> WaitingTurn | None:
        """Return the waiting turn that this request's idempotency key names."""
        queue = self._waiting.get(ask.session_id, ())
        key = ask.idempotency_key
        return next((turn for turn in queue if key and turn.ask.idempotency_key == key), None)

    def cancel(self, turn: WaitingTurn) -> dict[str, Any]:
        """Take a turn out of its queue and return it as it ended."""
        self._waiting[turn.ask.session_id].remove(turn)
        return turn.end(CANCELLED)

    def cancel_all(self, session_id: str) -> None:
        """Empty a session's queue (it is being closed)."""
        for turn in list(self._waiting.get(session_id, ())):
            if not turn.is_beginning:
                self.cancel(turn)

    async def close(self, error: ApiError) -> None:
        """Fail every waiting turn; none begins any more."""
        for worker in self._workers.values():
            worker.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)
        for queue in self._waiting.values():
            while queue:
                queue.popleft().end(FAILED, error)

    async def _serve(self, session_id: str) -> None:
        """Begin one turn after the other until none waits."""
        queue = self._waiting[session_id]
        try:
            while queue:
                await self.wait_idle(session_id)
                if not queue:
                    return
                turn = queue[0]
                turn.is_beginning = True
                try:
                    await self.begin(turn)
                except Exception as error:
                    api_error = as_api_error(error)
                    if api_error.code == "internal_error":
                        logger.exception("queued turn failed", extra={"turn_id": turn.turn_id})
                    turn.end(FAILED, api_error)
                queue.popleft()
        finally:
            del self._workers[session_id]
            if not queue:
                self._waiting.pop(session_id, None)
