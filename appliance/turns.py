# SPDX-License-Identifier: Apache-2.0
"""TurnService: accepts turns, runs them, has them ended; the one use case of the appliance.

A turn is stored before the engine hears of it, and committed before its terminal event is sent,
so a crash of either process loses nothing that a client was told. Does not know: HTTP, SSE, how
tokens become events (turn_run), how items become tokens (prompts).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from appliance import turn_view
from appliance.errors import ApiError, as_api_error
from appliance.grammars import GrammarQuestion
from appliance.services import Services
from appliance.text_limits import off_loop
from appliance.turn_ending import MAX_RACES, TurnEnding
from appliance.turn_events import TurnEvents, decode_frame
from appliance.turn_preparation import Ask, build_run, prepare_turn
from appliance.turn_queue import TurnQueue, WaitingTurn
from appliance.turn_record import CANCEL, DEADLINE
from appliance.turn_run import TERMINAL_EVENT, TurnRun
from sessions.errors import (
    RevisionConflict,
    SessionError,
    SessionNotFound,
    TurnInProgress,
    TurnNotFound,
    VersionConflict,
)
from sessions.session import Session
from sessions.turn_log import PendingTurn, Record, TurnLog
from tools_schema.errors import ToolSchemaError

logger = logging.getLogger(__name__)

CANCEL_WAIT_S = 30.0
BEGIN_POLL_S = 0.01


@dataclass(slots=True)
class _Active:
    run: TurnRun
    task: asyncio.Task[None] | None = None


class TurnService:
    """All turns of this API process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._metrics = services.metrics
        self._ending = TurnEnding(services.store, services.metrics, services.clock_ms)
        self._active: dict[str, _Active] = {}
        self._queue = TurnQueue(self._begin_waiting, self._wait_idle)
        self._chores: set[asyncio.Task[None]] = set()
        self.is_draining = False
        services.client.on_restart(lambda hello: self._on_engine_restart())

    @property
    def num_running(self) -> int:
        return len(self._active)

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
        if waiting is None and self._queue.has(session.id):
            raise TurnInProgress(session.current_turn or "")
        session = await self._services.adopt_model(session)
        log = await self._services.store.read_log(session)
        turn_id = waiting.turn_id if waiting is not None else None
        pending = await self._prepare(session, log, ask, now_ms, turn_id)
        claimed = session.begin_turn(pending, now_ms, expect_revision=ask.body.expect_revision)
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
        self._launch(run, ask.received_s)
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
        now_ms = services.clock_ms()
        pending = await self._prepare(session, log, ask, now_ms, None)
        if policy == "queue":
            events = services.journals.create(session.id, pending.id)
            self._queue.add(WaitingTurn(ask, pending, events))
            return pending.id
        expected = ask.body.expect_revision
        if expected is not None and expected != session.revision:
            raise RevisionConflict(expected, session.revision)
        if session.current_turn is None:
            return ask
        stopped = await self.cancel(ask.tenant, session.id, session.current_turn)
        if expected is None:
            return ask
        # What the client expects to interrupt it has seen: it stands behind what that leaves.
        moved_on = {"expect_revision": stopped.get("revision", expected)}
        return replace(ask, body=ask.body.model_copy(update=moved_on))

    async def _begin_waiting(self, waiting: WaitingTurn) -> None:
        for _ in range(MAX_RACES):
            try:
                await self._start_once(waiting.ask, waiting)
                return
            except VersionConflict:
                continue
            except TurnInProgress:
                await self._wait_idle(waiting.ask.session_id)
        raise ApiError("version_conflict", "the session changes too fast; try again")

    async def _wait_idle(self, session_id: str) -> None:
        """Wait until this process runs no turn of the session."""
        for active in list(self._active.values()):
            if active.run.pending.session_id == session_id and active.task is not None:
                await asyncio.wait({active.task})

    async def _find_by_key(self, ask: Ask) -> str | None:
        if ask.idempotency_key is None:
            return None
        waiting = self._queue.find_by_key(ask)
        if waiting is not None:
            turn_id, same_body = waiting.turn_id, waiting.ask.body_hash == ask.body_hash
        else:
            match = await self._services.store.find_key(
                ask.session_id, ask.idempotency_key, ask.body_hash
            )
            if match is None:
                return None
            turn_id, same_body = match.turn_id, match.same_body
        if not same_body:
            raise ApiError(
                "idempotency_key_reused",
                f"Idempotency-Key {ask.idempotency_key!r} was used with another body",
                "Idempotency-Key",
                {"turn_id": turn_id},
            )
        return turn_id

    # Running ------------------------------------------------------------------------------

    def _launch(self, run: TurnRun, received_s: float) -> None:
        run.started_s = received_s
        active = _Active(run)
        self._active[run.turn_id] = active
        active.task = asyncio.create_task(self._drive(run), name=f"turn {run.turn_id}")

    async def _drive(self, run: TurnRun) -> None:
        deadline = self._arm_deadline(run)
        self._metrics.turns_running.inc()
        try:
            num_ahead = sum(not a.run.first_token_s for a in self._active.values()) - 1
            run.events.emit("turn.queued", {"position": num_ahead})
            toolset = run.response.toolset
            question = GrammarQuestion(
                toolset,
                run.params.choice(toolset),
                run.params.parsed_response_format(),
                self._services.reasoning_of(run.pending.input_token_ids),
            )
            plan = await run.unless_stopped(self._services.grammars.compiled(question))
            if plan is None:
                await self._ending.finish(run)
                return
            if plan.fallbacks:
                self._metrics.grammar_fallbacks.inc()
            if not run.stop_cause and run.error is None:
                run.submitted_s = time.monotonic()
                self._metrics.turn_submit_seconds.observe(run.submitted_s - run.started_s)
                await run.run(plan)
            await self._ending.finish(run)
        except Exception:
            logger.exception("turn broke off", extra={"turn_id": run.turn_id})
            await self._ending.break_off(run, ApiError("internal_error", "the turn broke off"))
        finally:
            if deadline is not None:
                deadline.cancel()
            self._metrics.turns_running.dec()
            self._active.pop(run.turn_id, None)

    def _arm_deadline(self, run: TurnRun) -> asyncio.TimerHandle | None:
        if run.pending.deadline_ms is None:
            return None
        spent_ms = self._services.clock_ms() - run.pending.created_at_ms
        wait_s = max(0.0, (run.pending.deadline_ms - spent_ms) / 1000)
        return asyncio.get_running_loop().call_later(
            wait_s, lambda: self._chore(run.request_stop(DEADLINE))
        )

    def _on_engine_restart(self) -> None:
        self._metrics.engine_restarts.inc()
        for active in self._active.values():
            active.run.on_engine_restart()
            if active.run.stop_cause:  # the new engine has not heard that it shall stop
                self._chore(active.run.request_stop(active.run.stop_cause))

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # Looking at turns, and stopping them --------------------------------------------------

    async def get(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Return a turn as the API shows it. Raises TurnNotFound, SessionNotFound."""
        session = await self._services.store.get(session_id, tenant=tenant)
        waiting = self._queue.find(session_id, turn_id)
        if waiting is not None:
            return waiting.wire()
        try:
            turn = await self._services.store.read_turn(session, turn_id)
        except TurnNotFound:
            events = self._services.journals.find(session_id, turn_id)
            if events is None or not events.has_terminal:
                raise
            # It ended while it waited for its begin: no store has heard of it.
            return dict(decode_frame(events.frames[-1])["turn"])
        if isinstance(turn, PendingTurn):
            return turn_view.pending_wire(turn)
        return turn_view.turn_wire(session_id, turn)

    async def wait(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Wait for a turn's end, as one of its readers, and return it."""
        events = self._services.journals.find(session_id, turn_id)
        if events is not None:
            await events.read_to_end()
        return await self.get(tenant, session_id, turn_id)

    async def events(self, tenant: str | None, session_id: str, turn_id: str) -> TurnEvents:
        """Return a turn's events. Raises ApiError events_expired where they are gone."""
        session = await self._services.store.get(session_id, tenant=tenant)
        events = self._services.journals.find(session_id, turn_id)
        is_live = turn_id in self._active or self._queue.find(session_id, turn_id) is not None
        if events is not None and not events.has_terminal and not is_live:
            events = await self._with_terminal(session, events)
        if events is not None:
            return events
        await self._services.store.read_turn(session, turn_id)
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
            fields = turn_view.terminal_fields(turn_view.turn_wire(session.id, turn))
            events.emit(TERMINAL_EVENT[turn.status], fields)
            events.close()
        return events

    async def cancel(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Stop a turn and return it as it ended; a turn that has ended stays as it is."""
        await self._services.store.get(session_id, tenant=tenant)
        while (waiting := self._queue.find(session_id, turn_id)) is not None:
            if not waiting.is_beginning:
                return self._queue.cancel(waiting)
            await asyncio.sleep(BEGIN_POLL_S)
        active = self._active.get(turn_id)
        if active is not None and active.run.pending.session_id == session_id:
            await active.run.request_stop(CANCEL)
            try:
                await asyncio.wait_for(active.run.events.wait_closed(), CANCEL_WAIT_S)
            except TimeoutError:
                logger.warning("cancel goes on in the background", extra={"turn_id": turn_id})
        await self._ending.settle(turn_id)
        return await self.get(tenant, session_id, turn_id)

    def cancel_waiting(self, session_id: str) -> None:
        """Cancel every turn that waits in a session."""
        self._queue.cancel_all(session_id)

    def cancel_when_unread(self, session_id: str, turn_id: str) -> None:
        """Cancel this turn, be it waiting or running, as soon as its last reader is gone."""
        events = self._services.journals.find(session_id, turn_id)
        if events is not None:
            events.on_readers_gone = lambda: self._chore(self._stop_unread(session_id, turn_id))

    async def _stop_unread(self, session_id: str, turn_id: str) -> None:
        while (waiting := self._queue.find(session_id, turn_id)) is not None:
            if not waiting.is_beginning:
                self._queue.cancel(waiting)
                return
            await asyncio.sleep(BEGIN_POLL_S)
        active = self._active.get(turn_id)
        if active is not None:
            await active.run.request_stop(CANCEL)

    # Restarts -----------------------------------------------------------------------------

    async def recover(self) -> int:
        """Take up the turns that an earlier life of this API process left; returns how many.

        Those of others that share the store are theirs; a turn without an owner is anybody's.
        """
        store = self._services.store
        mine = await store.pending_turns(owner=self._services.owner)
        pending_turns = (*await store.pending_turns(owner=""), *mine)
        for pending in pending_turns:
            if pending.id in self._active:
                continue
            try:
                await self._take_up(pending)
            except SessionNotFound:
                continue
            except (SessionError, ToolSchemaError) as error:
                # One turn that cannot go on must not keep the others, or the process, down.
                logger.error("turn not taken up: %s", error, extra={"turn_id": pending.id})
                await self._ending.abandon(pending, as_api_error(error))
        return len(pending_turns)

    async def _take_up(self, pending: PendingTurn) -> None:
        session = await self._services.store.get(pending.session_id)
        log = await self._services.store.read_log(session)
        events = self._services.journals.reopen(pending.session_id, pending.id)
        run = build_run(self._services, session, log, pending, events)
        run.is_resumed = True
        if session.model_fingerprint not in ("", self._services.assets.fingerprint):
            run.error = ApiError("api_restarted", "the model changed while this turn ran")
        events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        logger.info("turn taken up again", extra={"turn_id": pending.id})
        self._launch(run, time.monotonic())

    async def drain(self, timeout_s: float) -> None:
        """Let running turns finish; those that do not are left for the next API process."""
        self.is_draining = True
        await self._queue.close(ApiError("draining", "the appliance is stopping"))
        tasks = [active.task for active in self._active.values() if active.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ending.close()
