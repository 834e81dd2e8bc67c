# SPDX-License-Identifier: Apache-2.0
"""TurnService: accepts turns, finds them, stops them; the one use case of the appliance.

A turn is stored before the engine hears of it, and committed before its terminal event is sent,
so a crash of either process loses nothing that a client was told. Does not know: HTTP, SSE, how
a turn runs (turn_runner), how items become tokens (prompts).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from appliance import turn_view
from appliance.errors import ApiError
from appliance.history_room import HistoryRoom
from appliance.races import MAX_RACES
from appliance.services import Services
from appliance.text_limits import off_loop
from appliance.turn_events import TurnEvents, decode_frame
from appliance.turn_preparation import Ask, build_run, prepare_turn, waiting_turn
from appliance.turn_queue import TurnQueue, WaitingTurn
from appliance.turn_record import CANCEL
from appliance.turn_run import TERMINAL_EVENT, TurnRun
from appliance.turn_runner import TurnRunner
from sessions.errors import (
    RevisionConflict,
    SessionError,
    StoreUnavailable,
    TurnInProgress,
    TurnNotFound,
    VersionConflict,
)
from sessions.session import Session
from sessions.turn_log import PendingTurn, Record, TurnLog

logger = logging.getLogger(__name__)

CANCEL_WAIT_S = 30.0
BEGIN_POLL_S = 0.01
ELSEWHERE_POLL_S = 0.25


class TurnService:
    """All turns of this API process."""

    def __init__(self, services: Services, room: HistoryRoom) -> None:
        self._services = services
        self._room = room
        self.runner = TurnRunner(services)
        self.queue = TurnQueue(
            services.store, services.clock_ms, self._begin_waiting, self.runner.wait_idle
        )
        self.is_draining = False

    @property
    def num_running(self) -> int:
        return self.runner.num_running

    # Accepting ----------------------------------------------------------------------------

    async def start(self, ask: Ask) -> str:
        """Accept a turn, or find the one that its idempotency key names; return its id.

        Raises: the errors of the session room and of tools_schema; ApiError.
        """
        if self.is_draining:
            raise ApiError("draining", "the appliance is stopping")
        for _ in range(MAX_RACES):
            try:
                return await self._start_once(ask)
            except VersionConflict:
                continue
            except TurnInProgress as busy:
                turn_id = await self._find_by_key(ask)
                if turn_id is not None:
                    return turn_id
                resolved = await self._resolve_conflict(ask, busy)
                if isinstance(resolved, str):
                    return resolved
                ask = resolved
            except SessionError:
                # The race may have been lost to the very same request.
                turn_id = await self._find_by_key(ask)
                if turn_id is None:
                    raise
                return turn_id
        raise ApiError("version_conflict", "the session changes too fast; try again")

    async def _start_once(self, ask: Ask, waiting: WaitingTurn | None = None) -> str:
        """Begin a turn now. One that has waited keeps its id and its events."""
        session = await self._services.store.get(ask.session_id, tenant=ask.tenant)
        # A turn that waited holds its key itself.
        known = await self._find_by_key(ask) if waiting is None else None
        if known is not None:
            return known
        now_ms = self._services.clock_ms()
        session.check_ready(now_ms, expect_revision=ask.body.expect_revision)
        await self._services.check_quota(session.tenant)
        ahead = self.queue.first(session.id)
        if waiting is None and ahead is not None:
            raise TurnInProgress(session.current_turn or ahead)
        session = await self._services.adopt_model(session)
        session, log, pending = await self._prepared(session, ask, waiting, now_ms)
        if pending is None:
            return await self._enqueue(session, ask)
        return await self._begin(session, log, pending, ask, waiting)

    async def _prepared(
        self, session: Session, ask: Ask, waiting: WaitingTurn | None, now_ms: int
    ) -> tuple[Session, TurnLog, PendingTurn | None]:
        """Render a turn behind its session's history, which may have to make room for it first.

        No turn: the room takes long to make, and the turn has to wait for it.
        """
        turn_id = waiting.turn_id if waiting is not None else None
        if waiting is not None:  # its deadline has run since it was accepted
            now_ms = waiting.pending.created_at_ms
        session = await self._room.before_turn(session, ask.body.input)
        log = await self._services.store.read_log(session)
        pending: PendingTurn | None = None
        try:
            pending = await self._prepare(session, log, ask, now_ms, turn_id)
        except ApiError as error:
            if not self._room.can_make(session, log, error):
                raise
        if pending is not None and not self._room.is_tight(session, log, pending):
            return session, log, pending
        if not self._room.is_quick(session) and waiting is None:
            return session, log, None
        session = await self._room.make(session)
        log = await self._services.store.read_log(session)
        return session, log, await self._prepare(session, log, ask, now_ms, turn_id)

    async def _begin(
        self,
        session: Session,
        log: TurnLog,
        pending: PendingTurn,
        ask: Ask,
        waiting: WaitingTurn | None,
    ) -> str:
        now_ms = self._services.clock_ms()
        expect_revision = session.revision if ask.body.expect_revision is not None else None
        claimed = session.begin_turn(pending, now_ms, expect_revision=expect_revision)
        journals = self._services.journals
        events = waiting.events if waiting is not None else journals.create(session.id, pending.id)
        is_begun = False
        try:
            claim = await self._services.store.begin_turn(claimed, pending)
            is_begun = claim.created
        finally:
            if not is_begun and waiting is None:
                journals.drop(pending.id)
        if not is_begun:
            return claim.turn_id
        if waiting is None:
            events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        run = build_run(self._services, claim.session, log, pending, events)
        self.runner.launch(run, ask.received_s)
        return claim.turn_id

    async def _prepare(
        self, session: Session, log: TurnLog, ask: Ask, now_ms: int, turn_id: str | None
    ) -> PendingTurn:
        """Check and render a turn; a long one in a thread, so that nobody else waits for it."""
        services = self._services
        return await off_loop(
            ask.num_chars,
            lambda: prepare_turn(services, session, log, ask, now_ms, turn_id=turn_id),
        )

    # Waiting ------------------------------------------------------------------------------

    async def _resolve_conflict(self, ask: Ask, busy: TurnInProgress) -> str | Ask:
        """Do as the session says while another turn runs: refuse, wait in line, or stop it.

        Returns the id of a turn that waits now, or what to try again with. A request that could
        not run is refused before it stops another or waits.
        """
        services = self._services
        session = await services.store.get(ask.session_id, tenant=ask.tenant)
        policy = session.settings.on_conflict
        if policy == "reject":
            raise busy
        log = await services.store.read_log(session)
        try:
            await self._prepare(session, log, ask, services.clock_ms(), None)
        except ApiError as error:
            if policy == "interrupt" or not self._room.can_make(session, log, error):
                raise
        if policy != "interrupt":
            return await self._enqueue(session, ask)
        expected = ask.body.expect_revision
        if expected is not None and expected != session.revision:
            raise RevisionConflict(expected, session.revision)
        await self.cancel_waiting(session.id)
        if session.current_turn is None:
            return ask
        stopped = await self.cancel(ask.tenant, session.id, session.current_turn)
        if expected is None:
            return ask
        # What the client expects to interrupt it has seen: it stands behind what that leaves.
        moved_on = {"expect_revision": stopped.get("revision", expected)}
        return replace(ask, body=ask.body.model_copy(update=moved_on))

    async def _enqueue(self, session: Session, ask: Ask) -> str:
        services = self._services
        self.queue.check_room(session.id)
        pending = waiting_turn(services, session, ask, services.clock_ms())
        turn_id = await services.store.queue_turn(pending)
        if turn_id == pending.id:
            events = services.journals.create(session.id, pending.id)
            self.queue.add(WaitingTurn(Ask.of_waiting(pending), pending, events))
        return turn_id

    async def _begin_waiting(self, waiting: WaitingTurn) -> None:
        for _ in range(MAX_RACES):
            try:
                await self._start_once(waiting.ask, waiting)
                return
            except VersionConflict:
                continue
            except TurnInProgress:
                await self.runner.wait_idle(waiting.pending.session_id)
        raise ApiError("version_conflict", "the session changes too fast; try again")

    async def _find_by_key(self, ask: Ask) -> str | None:
        if ask.idempotency_key is None:
            return None
        match = await self._services.store.find_key(
            ask.session_id, ask.idempotency_key, ask.body_hash
        )
        if match is None:
            return None
        if not match.same_body:
            raise ApiError(
                "idempotency_key_reused",
                f"Idempotency-Key {ask.idempotency_key!r} was used with another body",
                "Idempotency-Key",
                {"turn_id": match.turn_id},
            )
        return match.turn_id

    # Looking at turns ---------------------------------------------------------------------

    async def get(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Return a turn as the API shows it. Raises TurnNotFound, SessionNotFound."""
        session = await self._services.store.get(session_id, tenant=tenant)
        try:
            turn = await self._services.store.read_turn(session, turn_id)
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
            session = await self._services.store.get(session_id, tenant=tenant)
            turn = await self._services.store.read_turn(session, turn_id)
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
        is_live = self.runner.find(turn_id) is not None or self.queue.find(session_id, turn_id)
        if events is not None and not events.has_terminal and not is_live:
            events = await self._with_terminal(session, events)
        if events is not None:
            return events
        turn = await self._services.store.read_turn(session, turn_id)
        if isinstance(turn, PendingTurn):
            return self._follow(turn)
        link = f"/v1/sessions/{session_id}/turns/{turn_id}"
        raise ApiError(
            "events_expired", f"the events of this turn are gone; the turn is at {link}",
            "starting_after", {"turn": link},
        )  # fmt: skip

    async def _with_terminal(self, session: Session, events: TurnEvents) -> TurnEvents:
        """Add the event that a crash between commit and its sending has swallowed."""
        turn = await self._services.store.read_turn(session, events.turn_id)
        if isinstance(turn, Record):
            events = self._services.journals.reopen(session.id, turn.id)
            self._tell_end(events, turn)
        return events

    def _follow(self, pending: PendingTurn) -> TurnEvents:
        """Events of a turn that another process runs: what the store says of it, as it says it."""
        events = TurnEvents(pending.session_id, pending.id)
        events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        self.runner.chore(self._follow_to_end(events))
        return events

    async def _follow_to_end(self, events: TurnEvents) -> None:
        while not self.is_draining and not events.is_closed:
            await asyncio.sleep(ELSEWHERE_POLL_S)
            try:
                session = await self._services.store.get(events.session_id)
                turn = await self._services.store.read_turn(session, events.turn_id)
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

    # Stopping them ------------------------------------------------------------------------

    async def cancel(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Stop a turn and return it as it ended; a turn that has ended stays as it is.

        Raises: StoreError where it stopped and the store does not take its end for now;
        TurnInProgress where another process runs it.
        """
        session = await self._services.store.get(session_id, tenant=tenant)
        while (waiting := self.queue.find(session_id, turn_id)) is not None:
            if not waiting.is_beginning:
                await self.queue.cancel(waiting)
                break
            await asyncio.sleep(BEGIN_POLL_S)
        run = self.runner.find(turn_id, session_id)
        if run is not None:
            await run.request_stop(CANCEL)
            await self._wait_stopped(run)
        await self.runner.ending.settle(turn_id)
        turn = await self.get(tenant, session_id, turn_id)
        if run is None and turn_id == session.current_turn and turn["status"] == "running":
            raise TurnInProgress(turn_id)
        return turn

    async def _wait_stopped(self, run: TurnRun) -> None:
        """Wait until a turn's end is stored. Raises: SessionError where the store refuses it."""
        ending = self.runner.ending
        deadline_s = asyncio.get_running_loop().time() + CANCEL_WAIT_S
        closed = asyncio.ensure_future(run.events.wait_closed())
        try:
            while not closed.done():
                await asyncio.wait({closed}, timeout=0.1)
                trouble = ending.trouble_of(run.turn_id)
                if trouble is not None and not closed.done():
                    text = f"the turn has stopped, its end is not stored yet: {trouble}"
                    raise type(trouble)(text)
                if asyncio.get_running_loop().time() > deadline_s:
                    logger.warning(
                        "cancel goes on in the background", extra={"turn_id": run.turn_id}
                    )
                    return
        finally:
            closed.cancel()

    async def cancel_waiting(self, session_id: str) -> None:
        """Cancel every turn that waits in a session."""
        await self.queue.cancel_all(session_id)

    def cancel_when_unread(self, session_id: str, turn_id: str) -> None:
        """Cancel this turn, be it waiting or running, as soon as its last reader is gone."""
        events = self._services.journals.find(session_id, turn_id)
        if events is not None:
            events.on_readers_gone = lambda: self.runner.chore(
                self._stop_unread(session_id, turn_id)
            )

    async def _stop_unread(self, session_id: str, turn_id: str) -> None:
        while (waiting := self.queue.find(session_id, turn_id)) is not None:
            if not waiting.is_beginning:
                await self.queue.cancel(waiting)
                return
            await asyncio.sleep(BEGIN_POLL_S)
        run = self.runner.find(turn_id)
        if run is not None:
            await run.request_stop(CANCEL)

    async def drain(self, timeout_s: float) -> None:
        """Let running turns finish; what does not is left for the next API process."""
        self.is_draining = True
        await self.queue.close()
        await self.runner.drain(timeout_s)
