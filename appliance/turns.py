# SPDX-License-Identifier: Apache-2.0
"""TurnService: accepts turns, runs them, ends them; the one use case of the appliance.

A turn is stored before the engine hears of it, and committed before its terminal event is sent,
so a crash of either process loses nothing that a client was told. Does not know: HTTP, SSE, how
tokens become events (turn_run), how items become tokens (prompts).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from appliance import turn_view
from appliance.api.wire import TurnCreate
from appliance.cache_report import expected_reuse
from appliance.errors import ApiError
from appliance.grammars import GrammarQuestion
from appliance.services import Services
from appliance.turn_events import TurnEvents
from appliance.turn_params import TurnParams, turn_params
from appliance.turn_run import CANCEL, DEADLINE, TERMINAL_EVENT, TurnRun
from sessions.errors import SessionError, StoreUnavailable, VersionConflict
from sessions.ids import new_id
from sessions.items import parse_items
from sessions.session import Session
from sessions.token_codec import count
from sessions.turn_log import FAILED, PendingTurn, Record, TurnLog
from tools_schema.errors import ToolSchemaError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RACES = 8  # lost races against other writers of a session before giving up
STORE_RETRIES_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
CANCEL_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for a turn. `body_hash` says whether two bodies are the same."""

    tenant: str | None
    session_id: str
    body: TurnCreate
    idempotency_key: str | None = None
    body_hash: str = ""
    received_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Active:
    run: TurnRun
    task: asyncio.Task[None] | None = None


class TurnService:
    """All turns of this API process."""

    def __init__(self, services: Services) -> None:
        self._core = services
        self._metrics = services.metrics
        self._active: dict[str, _Active] = {}
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
            except SessionError:
                # The race may have been lost to the very same request.
                turn_id = await self._find_by_key(ask)
                if turn_id is None:
                    raise
                return turn_id
        raise ApiError("version_conflict", "the session changes too fast; try again")

    async def _start_once(self, ask: Ask) -> str:
        session = await self._core.store.get(ask.session_id, tenant=ask.tenant)
        known = await self._find_by_key(ask)
        if known is not None:
            return known
        now_ms = self._core.clock_ms()
        session.check_ready(now_ms, expect_revision=ask.body.expect_revision)
        session = await self._core.adopt_model(session)
        log = await self._core.store.read_log(session)
        pending = self._prepare(session, log, ask, now_ms)
        claimed = session.begin_turn(pending, now_ms, expect_revision=ask.body.expect_revision)
        claim = await self._core.store.begin_turn(claimed, pending)
        if claim.created:
            events = self._core.journals.create(session.id, pending.id)
            events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
            self._launch(self._build_run(claim.session, log, pending, events), ask.received_s)
        return claim.turn_id

    async def _find_by_key(self, ask: Ask) -> str | None:
        if ask.idempotency_key is None:
            return None
        match = await self._core.store.find_key(ask.session_id, ask.idempotency_key, ask.body_hash)
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

    def _prepare(self, session: Session, log: TurnLog, ask: Ask, now_ms: int) -> PendingTurn:
        """Check and render a turn; nothing is written and the engine hears nothing."""
        core, body = self._core, ask.body
        items = session.prepare_input(
            parse_items(body.input), auto_close_calls=body.auto_close_calls
        )
        head = core.head_of(session)
        rendered = core.renderer.render_turn(core.end_of(session, log, items), items, head)
        prompt_len = session.num_tokens + count(rendered.token_ids)
        if not prompt_len:
            raise ApiError("invalid_value", "input: there is nothing to answer", "input")
        limit = core.context_limit(session)
        if prompt_len >= limit:
            raise ApiError(
                "context_length_exceeded",
                f"input: {count(rendered.token_ids)} new tokens behind {session.num_tokens} make "
                f"{prompt_len}; the context holds {limit}, output included",
                "input",
            )
        params = turn_params(body, session.settings.tool_choice, limit - prompt_len)
        question = GrammarQuestion(
            head.toolset, params.choice(head.toolset), params.parsed_response_format()
        )
        core.grammars.plan(question)
        return PendingTurn(
            id=new_id("turn"),
            session_id=session.id,
            base_revision=session.revision,
            input_items=items,
            input_token_ids=rendered.token_ids,
            item_token_ends=rendered.item_token_ends,
            params=params.to_stored(),
            idempotency_key=ask.idempotency_key,
            body_hash=ask.body_hash,
            created_at_ms=now_ms,
            deadline_ms=body.deadline_ms,
        )

    def _build_run(
        self, session: Session, log: TurnLog, pending: PendingTurn, events: TurnEvents
    ) -> TurnRun:
        core = self._core
        params = TurnParams.from_stored(pending.params)
        toolset = core.head_of(session).toolset
        return TurnRun(
            pending=pending,
            params=params,
            events=events,
            answer=core.answer_reader(pending.id, toolset, params.choice(toolset), params.stop),
            response=core.response_events(pending.id, toolset),
            client=core.client,
            records=log.records,
            history=log.token_ids,
            expected=expected_reuse(log),
            tenant=session.tenant,
            salt=core.salt_of(session.tenant),
            priority=session.settings.priority,
            model_fingerprint=core.assets.fingerprint,
        )

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
                toolset, run.params.choice(toolset), run.params.parsed_response_format()
            )
            plan = await run.unless_stopped(self._core.grammars.compiled(question))
            if plan is None:
                await self._finish(run)
                return
            if plan.fallbacks:
                self._metrics.grammar_fallbacks.inc()
            if not run.stop_cause and run.error is None:
                run.submitted_s = time.monotonic()
                self._metrics.turn_submit_seconds.observe(run.submitted_s - run.started_s)
                await run.run(plan)
            await self._finish(run)
        except Exception:
            logger.exception("turn broke off", extra={"turn_id": run.turn_id})
            await self._fail(run, ApiError("internal_error", "the turn broke off"))
        finally:
            if deadline is not None:
                deadline.cancel()
            self._metrics.turns_running.dec()
            self._active.pop(run.turn_id, None)

    def _arm_deadline(self, run: TurnRun) -> asyncio.TimerHandle | None:
        if run.pending.deadline_ms is None:
            return None
        spent_ms = self._core.clock_ms() - run.pending.created_at_ms
        wait_s = max(0.0, (run.pending.deadline_ms - spent_ms) / 1000)
        return asyncio.get_running_loop().call_later(
            wait_s, lambda: self._chore(run.request_stop(DEADLINE))
        )

    def _on_engine_restart(self) -> None:
        self._metrics.engine_instances.inc()
        for active in self._active.values():
            active.run.on_engine_restart()
            if active.run.stop_cause:  # the new engine has not heard that it shall stop
                self._chore(active.run.request_stop(active.run.stop_cause))

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # Ending -------------------------------------------------------------------------------

    async def _finish(self, run: TurnRun) -> None:
        record = run.conclude(run.pending.base_revision + 1, self._core.clock_ms())
        try:
            await self._with_retries(lambda: self._store_end(run, record))
        except SessionError as error:
            logger.error("turn not stored: %s", error, extra={"turn_id": run.turn_id})
            await self._fail(run, ApiError(error.code, f"the turn was not stored: {error}"))
            return
        turn = turn_view.turn_wire(run.pending.session_id, record)
        run.events.emit(TERMINAL_EVENT[record.status], turn_view.terminal_fields(turn))
        run.events.close()
        self._count(run, record)

    async def _store_end(self, run: TurnRun, record: Record) -> None:
        store = self._core.store
        for _ in range(MAX_RACES):
            session = await store.get(run.pending.session_id)
            if session.current_turn != record.id:
                return  # an earlier try got through
            now_ms = self._core.clock_ms()
            try:
                if record.committed:
                    await store.commit_turn(session.commit_turn(record, now_ms), record)
                else:
                    await store.end_turn(session.end_turn(record, now_ms), record)
                return
            except VersionConflict:
                continue
        raise StoreUnavailable("the session changes too fast to end its turn")

    async def _with_retries(self, work: Callable[[], Awaitable[None]]) -> None:
        for wait_s in STORE_RETRIES_S:
            try:
                return await work()
            except StoreUnavailable as error:
                logger.warning("store: %s; next try in %.2f s", error, wait_s)
                await asyncio.sleep(wait_s)
        await work()

    async def _fail(self, run: TurnRun, error: ApiError) -> None:
        """End the stream of a turn that could not be ended properly."""
        run.error = run.error or error
        record = run.failed_record(self._core.clock_ms())
        try:
            await self._store_end(run, record)
        except SessionError:
            logger.warning("turn left pending in the store", extra={"turn_id": run.turn_id})
        turn = turn_view.turn_wire(run.pending.session_id, record)
        run.events.emit(TERMINAL_EVENT[FAILED], turn_view.terminal_fields(turn))
        run.events.close()

    def _count(self, run: TurnRun, record: Record) -> None:
        metrics, now_s = self._metrics, time.monotonic()
        reason = record.stop_reason or record.incomplete_reason or ""
        if record.error is not None:
            reason = str(record.error["code"])
        metrics.turns.labels(record.status, reason).inc()
        metrics.turn_seconds.observe(now_s - run.started_s)
        metrics.output_tokens.inc(record.usage.output_tokens)
        if run.first_token_s:
            metrics.turn_first_token_seconds.observe(run.first_token_s - run.started_s)
        num_invalid = len(run.response.invalid_calls)
        metrics.tool_calls.labels("yes").inc(run.response.num_calls - num_invalid)
        metrics.tool_calls.labels("no").inc(num_invalid)
        if run.cache is not None:
            metrics.count_cache(run.cache, run.miss)

    # Looking at turns, and stopping them --------------------------------------------------

    async def get(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Return a turn as the API shows it. Raises TurnNotFound, SessionNotFound."""
        session = await self._core.store.get(session_id, tenant=tenant)
        turn = await self._core.store.read_turn(session, turn_id)
        if isinstance(turn, PendingTurn):
            return turn_view.pending_wire(turn)
        return turn_view.turn_wire(session_id, turn)

    async def wait(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Wait for a turn's end and return it."""
        events = self._core.journals.find(session_id, turn_id)
        if events is not None:
            await events.wait_closed()
        return await self.get(tenant, session_id, turn_id)

    async def events(self, tenant: str | None, session_id: str, turn_id: str) -> TurnEvents:
        """Return a turn's events. Raises ApiError events_expired where they are gone."""
        session = await self._core.store.get(session_id, tenant=tenant)
        events = self._core.journals.find(session_id, turn_id)
        if events is not None and not events.has_terminal and turn_id not in self._active:
            events = await self._with_terminal(session, events)
        if events is not None:
            return events
        await self._core.store.read_turn(session, turn_id)
        link = f"/v1/sessions/{session_id}/turns/{turn_id}"
        raise ApiError(
            "events_expired", f"the events of this turn are gone; the turn is at {link}",
            "starting_after", {"turn": link},
        )  # fmt: skip

    async def _with_terminal(self, session: Session, events: TurnEvents) -> TurnEvents:
        """Add the event that a crash between commit and its sending has swallowed."""
        turn = await self._core.store.read_turn(session, events.turn_id)
        if isinstance(turn, Record):
            events = self._core.journals.reopen(session.id, turn.id)
            fields = turn_view.terminal_fields(turn_view.turn_wire(session.id, turn))
            events.emit(TERMINAL_EVENT[turn.status], fields)
            events.close()
        return events

    async def cancel(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Stop a turn and return it as it ended; a turn that has ended stays as it is."""
        await self._core.store.get(session_id, tenant=tenant)
        active = self._active.get(turn_id)
        if active is not None and active.run.pending.session_id == session_id:
            await active.run.request_stop(CANCEL)
            try:
                await asyncio.wait_for(active.run.events.wait_closed(), CANCEL_WAIT_S)
            except TimeoutError:
                logger.warning("cancel goes on in the background", extra={"turn_id": turn_id})
        return await self.get(tenant, session_id, turn_id)

    def cancel_when_unread(self, turn_id: str) -> None:
        """Cancel this turn as soon as its last reader is gone."""
        active = self._active.get(turn_id)
        if active is not None:
            run = active.run
            run.events.on_readers_gone = lambda: self._chore(run.request_stop(CANCEL))

    # Restarts -----------------------------------------------------------------------------

    async def recover(self) -> int:
        """Take up the turns that an earlier API process left; returns how many."""
        pending_turns = await self._core.store.pending_turns()
        for pending in pending_turns:
            if pending.id in self._active:
                continue
            try:
                await self._take_up(pending)
            except (SessionError, ToolSchemaError) as error:
                # One turn that cannot go on must not keep the others, or the process, down.
                logger.error("turn not taken up: %s", error, extra={"turn_id": pending.id})
        return len(pending_turns)

    async def _take_up(self, pending: PendingTurn) -> None:
        session = await self._core.store.get(pending.session_id)
        log = await self._core.store.read_log(session)
        events = self._core.journals.reopen(pending.session_id, pending.id)
        run = self._build_run(session, log, pending, events)
        run.is_resumed = True
        if session.model_fingerprint not in ("", self._core.assets.fingerprint):
            run.error = ApiError("api_restarted", "the model changed while this turn ran")
        events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        logger.info("turn taken up again", extra={"turn_id": pending.id})
        self._launch(run, time.monotonic())

    async def drain(self, timeout_s: float) -> None:
        """Let running turns finish; those that do not are left for the next API process."""
        self.is_draining = True
        tasks = [active.task for active in self._active.values() if active.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
