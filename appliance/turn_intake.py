# SPDX-License-Identifier: Apache-2.0
"""TurnIntake: from a request for a turn to one that runs, waits, or is refused.

A turn is stored before the engine hears of it. Does not know: HTTP, how a turn runs, how items
become tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from appliance import turn_view
from appliance.errors import ApiError
from appliance.history_room import HistoryRoom, num_new_of
from appliance.races import MAX_RACES
from appliance.services import Services
from appliance.text_limits import off_loop
from appliance.turn_preparation import Ask, build_run, prepare_turn, waiting_turn
from appliance.turn_queue import TurnQueue, WaitingTurn
from appliance.turn_runner import TurnRunner
from sessions.errors import (
    RevisionConflict,
    SessionError,
    StoreUnavailable,
    TurnInProgress,
    VersionConflict,
)
from sessions.session import Session
from sessions.store import TurnClaim
from sessions.token_codec import count
from sessions.turn_log import PendingTurn, TurnLog

Cancel = Callable[[str | None, str, str], Awaitable[dict[str, Any]]]


class TurnIntake:
    """`cancel` stops a turn of a session and returns it as it ended."""

    def __init__(
        self, services: Services, room: HistoryRoom, runner: TurnRunner, cancel: Cancel
    ) -> None:
        self._services = services
        self._room = room
        self._runner = runner
        self._cancel = cancel
        self._beginning: set[str] = set()
        self.queue = TurnQueue(
            services.store, services.clock_ms, self._begin_waiting, runner.wait_idle
        )

    def is_beginning(self, turn_id: str) -> bool:
        """Whether this turn may be in the store already, and will run or wait here at once."""
        return turn_id in self._beginning

    async def start(self, ask: Ask) -> str:
        """Accept a turn, or find the one that its idempotency key names; return its id.

        Raises: the errors of the session room and of tools_schema; ApiError.
        """
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
            num_new = count(pending.input_token_ids)
        except ApiError as error:
            if not self._room.can_make(session, log, error):
                raise
            num_new = num_new_of(error)
        if pending is not None and not self._room.is_tight(session, log, pending):
            return session, log, pending
        if not self._room.is_quick(session) and waiting is None:
            return session, log, None
        session = await self._room.make(session, num_new)
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
        self._beginning.add(pending.id)
        is_begun = False
        try:
            claiming = asyncio.ensure_future(self._claim(claimed, pending))
            await asyncio.sleep(0)  # the store has it: what follows is done while a disk writes
            events = waiting.events if waiting else journals.create(session.id, pending.id)
            run = build_run(self._services, claimed, log, pending, events)
            claim = await claiming
            is_begun = claim.created
        finally:
            self._beginning.discard(pending.id)
            if not is_begun and waiting is None:
                journals.drop(pending.id)
        if not is_begun:
            return claim.turn_id
        if waiting is None:
            events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        run.session = claim.session
        self._runner.launch(run, ask.received_s)
        await asyncio.sleep(0)  # the engine has it, before an answer to the client is put together
        return claim.turn_id

    async def _claim(self, claimed: Session, pending: PendingTurn) -> TurnClaim:
        """Begin a turn in the store, be it that the store's answer is lost.

        Where the store does not answer at all, it may still have the turn: it is found later as one
        that has no process.
        """
        store = self._services.store
        try:
            return await store.begin_turn(claimed, pending)
        except StoreUnavailable:
            session = await store.get(pending.session_id)
            if session.current_turn != pending.id:
                raise
            return TurnClaim(created=True, turn_id=pending.id, session=session)

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
        await self.queue.cancel_all(session.id)
        if session.current_turn is None:
            return ask
        stopped = await self._cancel(ask.tenant, session.id, session.current_turn)
        if expected is None:
            return ask
        # What the client expects to interrupt it has seen: it stands behind what that leaves.
        moved_on = {"expect_revision": stopped.get("revision", expected)}
        return replace(ask, body=ask.body.model_copy(update=moved_on))

    async def _enqueue(self, session: Session, ask: Ask) -> str:
        services = self._services
        self.queue.check_room(session.id)
        pending = waiting_turn(services, session, ask, services.clock_ms())
        self._beginning.add(pending.id)
        try:
            turn_id = await services.store.queue_turn(pending)
            if turn_id == pending.id:
                events = services.journals.create(session.id, pending.id)
                self.queue.add(WaitingTurn(Ask.of_waiting(pending), pending, events))
        finally:
            self._beginning.discard(pending.id)
        return turn_id

    async def _begin_waiting(self, waiting: WaitingTurn) -> None:
        for _ in range(MAX_RACES):
            try:
                await self._start_once(waiting.ask, waiting)
                return
            except VersionConflict:
                continue
            except TurnInProgress:
                await self._runner.wait_idle(waiting.pending.session_id)
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
