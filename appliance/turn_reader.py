# SPDX-License-Identifier: Apache-2.0
"""TurnReader: turns as clients look at them: their state, their events, their end.

A turn that another process runs is followed through the store. Does not know: HTTP, how a turn
runs or is stopped.
"""

from __future__ import annotations

import asyncio
from typing import Any

from appliance import turn_view
from appliance.errors import ApiError
from appliance.races import racing
from appliance.services import Services
from appliance.turn_events import TurnEvents, decode_frame
from appliance.turn_queue import TurnQueue
from appliance.turn_run import TERMINAL_EVENT
from appliance.turn_runner import TurnRunner
from sessions.errors import SessionError, StoreUnavailable, TurnNotFound, VersionConflict
from sessions.session import Session
from sessions.turn_log import PendingTurn, Record

ELSEWHERE_POLL_S = 0.25


class TurnReader:
    """Belongs to one event loop."""

    def __init__(self, services: Services, runner: TurnRunner, queue: TurnQueue) -> None:
        self._services = services
        self._runner = runner
        self._queue = queue
        self.is_draining = False

    async def get(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Return a turn as the API shows it. Raises TurnNotFound, SessionNotFound."""
        try:
            turn = await self._read(tenant, session_id, turn_id)
        except TurnNotFound:
            events = self._services.journals.find(session_id, turn_id)
            if events is None or not events.has_terminal:
                raise
            # The history has moved on without it (rollback, compaction); its readers know it.
            return dict(decode_frame(events.frames[-1])["turn"])
        if isinstance(turn, PendingTurn):
            return turn_view.pending_wire(turn)
        return turn_view.turn_wire(session_id, turn)

    async def wait(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Wait for a turn's end, as one of its readers, and return it.

        Raises: ApiError draining where this process stops before the turn does.
        """
        events = self._services.journals.find(session_id, turn_id)
        if events is None:
            turn = await self._read(tenant, session_id, turn_id)
            events = self._follow(turn) if isinstance(turn, PendingTurn) else None
        if events is not None:
            await events.read_to_end()
            if events.is_detached:
                raise ApiError(
                    "draining",
                    "the appliance is stopping; the turn goes on, ask for it again",
                    extra={"turn_id": turn_id},
                )
        return await self.get(tenant, session_id, turn_id)

    async def events(self, tenant: str | None, session_id: str, turn_id: str) -> TurnEvents:
        """Return a turn's events. Raises ApiError events_expired where they are gone."""
        session = await self._services.store.get(session_id, tenant=tenant)
        events = self._services.journals.find(session_id, turn_id)
        is_live = self._runner.find(turn_id) is not None or self._queue.find(session_id, turn_id)
        if events is not None and not events.has_terminal and not is_live:
            events = await self._with_terminal(session, events)
        if events is not None:
            return events
        turn = await self._read(tenant, session_id, turn_id)
        if isinstance(turn, PendingTurn):
            return self._follow(turn)
        link = f"/v1/sessions/{session_id}/turns/{turn_id}"
        raise ApiError(
            "events_expired", f"the events of this turn are gone; the turn is at {link}",
            "starting_after", {"turn": link},
        )  # fmt: skip

    async def _read(
        self, tenant: str | None, session_id: str, turn_id: str
    ) -> PendingTurn | Record:
        """Read a turn that may be ending just now: between two reads it may leave one place for
        another. Raises: TurnNotFound, SessionNotFound, StoreError.
        """
        store = self._services.store

        async def once() -> PendingTurn | Record:
            session = await store.get(session_id, tenant=tenant)
            try:
                return await store.read_turn(session, turn_id)
            except TurnNotFound:
                now = await store.get(session_id, tenant=tenant)
                if now.version == session.version:
                    raise
                raise VersionConflict(session_id, session.version, now.version) from None

        return await racing(once)

    async def _with_terminal(self, session: Session, events: TurnEvents) -> TurnEvents:
        """Add the event that a crash between commit and its sending has swallowed."""
        turn = await self._read(None, session.id, events.turn_id)
        if isinstance(turn, Record):
            events = self._services.journals.reopen(session.id, turn.id)
            self._tell_end(events, turn)
        return events

    def _follow(self, pending: PendingTurn) -> TurnEvents:
        """Events of a turn that another process runs: what the store says of it, as it says it."""
        events = TurnEvents(pending.session_id, pending.id)
        events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        self._runner.chore(self._follow_to_end(events))
        return events

    async def _follow_to_end(self, events: TurnEvents) -> None:
        while not self.is_draining and not events.is_closed:
            await asyncio.sleep(ELSEWHERE_POLL_S)
            try:
                turn = await self._read(None, events.session_id, events.turn_id)
            except StoreUnavailable:
                continue
            except SessionError:  # it went with its session, or with a rollback
                break
            if isinstance(turn, Record):
                self._tell_end(events, turn)
                return
        events.detach()

    def _tell_end(self, events: TurnEvents, record: Record) -> None:
        wire = turn_view.turn_wire(events.session_id, record)
        events.emit(TERMINAL_EVENT[record.status], turn_view.terminal_fields(wire))
        events.close()
