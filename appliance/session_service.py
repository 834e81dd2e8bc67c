# SPDX-License-Identifier: Apache-2.0
"""SessionService: create, change, fork, append to, look at and close sessions.

Does not know: HTTP, how a turn runs (turns).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from appliance import turn_view
from appliance.api.wire import (
    CacheBody,
    ContextBody,
    ForkCreate,
    ItemsAppend,
    SessionCreate,
    SessionUpdate,
)
from appliance.cache_report import HEAD_CHANGED, REPORT
from appliance.errors import ApiError
from appliance.prompts import Head
from appliance.response_events import item_wire
from appliance.services import DEFAULT_TENANT, Services
from appliance.turns import TurnService
from engine.errors import EngineUnavailableError
from sessions.durations import parse_duration
from sessions.errors import ItemNotFound, QuotaExceeded, SessionNotFound, VersionConflict
from sessions.history import fork, replace_history
from sessions.items import parse_items
from sessions.session import Session, items_record, new_session
from sessions.settings import ContextPolicy, HoldTimes, ReasoningPolicy, SessionSettings
from sessions.store import ListQuery
from sessions.token_codec import count, decode_ids
from sessions.turn_log import PRELUDE, TURN, PendingTurn, Record, TurnLog

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_RACES = 8


class SessionService:
    """All that clients do to sessions besides running turns."""

    def __init__(self, services: Services, turns: TurnService) -> None:
        self._services = services
        self._turns = turns

    # Life ---------------------------------------------------------------------------------

    async def create(self, tenant: str | None, body: SessionCreate) -> dict[str, Any]:
        """Create a session; its head and initial items are rendered now, once and for all."""
        services = self._services
        services.check_model(body.model)
        refuse_unsupported(body)
        toolset = services.toolset(body.tools or [])
        settings = self._settings(body)
        owner = tenant or DEFAULT_TENANT
        await self._check_quota(owner)
        if body.parent_session_id is not None:
            await services.store.get(body.parent_session_id, tenant=tenant)
        items = parse_items(body.initial_items or [], path="initial_items")
        records = services.first_records(Head(body.instructions, toolset), items)
        session = new_session(
            model=services.model_name,
            now_ms=services.clock_ms(),
            tenant=owner,
            model_fingerprint=services.assets.fingerprint,
            settings=settings,
            metadata=body.metadata,
            parent_session_id=body.parent_session_id,
            records=records,
        )
        check_fits(session, services.context_limit(session), "initial_items")
        stored = await services.store.create(session, records)
        logger.info("session created", extra={"session_id": stored.id})
        return turn_view.session_wire(stored)

    async def get(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        session = await self._services.store.get(session_id, tenant=tenant)
        return turn_view.session_wire(session)

    async def list(self, query: ListQuery) -> dict[str, Any]:
        """Return one page, newest first."""
        page = await self._services.store.list_sessions(query)
        data = [turn_view.session_wire(session) for session in page.sessions]
        return page_wire(data, page.has_more)

    async def update(
        self, tenant: str | None, session_id: str, body: SessionUpdate
    ) -> dict[str, Any]:
        """Change mutable fields; `x_invalidated_tokens` says what a new head costs."""
        refuse_unsupported(body)
        changes = self._changes(body)

        async def once() -> dict[str, Any]:
            services = self._services
            old = await services.store.get(session_id, tenant=tenant)
            now_ms = services.clock_ms()
            session = old.update(now_ms, settings=changes, metadata=body.metadata)
            head, old_head = services.head_of(session), services.head_of(old)
            invalidated = 0
            if (head.instructions, head.toolset) != (old_head.instructions, old_head.toolset):
                invalidated = old.num_tokens
                stored = await self._replace_head(session, head)
            else:
                stored = await services.store.update(session)
            return {**turn_view.session_wire(stored), "x_invalidated_tokens": invalidated}

        return await self._racing(once)

    async def close(self, tenant: str | None, session_id: str, *, release: bool) -> None:
        """Delete a session with its transcript; `release` gives back its unshared KV at once.

        A session that is not there (or another tenant's) is none to close: nothing happens.
        """
        store = self._services.store
        try:
            session = await store.get(session_id, tenant=tenant)
        except SessionNotFound:
            return
        if session.current_turn is not None:
            await self._turns.cancel(tenant, session_id, session.current_turn)
            session = await store.get(session_id, tenant=tenant)
        log = await store.read_log(session)
        await store.delete(session_id)
        for record in log.records:
            self._services.journals.drop(record.id)
        if release and log.token_ids:
            salt = self._services.salt_of(session.tenant)
            await self._services.client.drop_prefix(log.token_ids, salt=salt)
        logger.info("session closed", extra={"session_id": session_id})

    # History ------------------------------------------------------------------------------

    async def fork(self, tenant: str | None, session_id: str, body: ForkCreate) -> dict[str, Any]:
        """Create `n` children that share the history up to a point; no token is copied."""
        services = self._services
        session = await services.store.get(session_id, tenant=tenant)
        log = await services.store.read_log(session)
        children = fork(
            session, log, body.at, services.clock_ms(), n=body.n, metadata=body.metadata
        )
        stored = await services.store.create_many(children)
        return {"object": "list", "data": [turn_view.session_wire(child) for child in stored]}

    async def append(
        self, tenant: str | None, session_id: str, body: ItemsAppend
    ) -> dict[str, Any]:
        """Append items without generating."""
        refuse_unsupported(body)

        async def once() -> dict[str, Any]:
            services = self._services
            session = await services.store.get(session_id, tenant=tenant)
            session.check_ready(services.clock_ms(), expect_revision=body.expect_revision)
            session = await services.adopt_model(session)
            log = await services.store.read_log(session)
            record = self._items_record(session, log, body)
            appended = session.append_items(record, services.clock_ms())
            check_fits(appended, services.context_limit(session), "items")
            stored = await services.store.append_record(appended, record)
            return {
                "object": "list",
                "data": [item_wire(item) for item in record.input_items],
                "revision": stored.revision,
                "num_tokens": stored.num_tokens,
                "added_tokens": record.num_tokens,
                "open_calls": list(stored.open_call_ids),
            }

        return await self._racing(once)

    async def items(
        self,
        tenant: str | None,
        session_id: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> dict[str, Any]:
        """Return a page of the transcript. Raises ItemNotFound for an unknown `after`."""
        log = await self._log(tenant, session_id)
        items = list(reversed(log.items)) if newest_first else list(log.items)
        start = 0
        if after is not None:
            position = next((i for i, item in enumerate(items) if item.id == after), None)
            if position is None:
                raise ItemNotFound(after)
            start = position + 1
        page = items[start : start + limit]
        return page_wire([item_wire(item) for item in page], start + limit < len(items))

    async def turns(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Return the turns of the history, oldest first, and the one that runs now."""
        session = await self._services.store.get(session_id, tenant=tenant)
        log = await self._services.store.read_log(session)
        data = [turn_view.turn_wire(session_id, r) for r in log.records if r.kind == TURN]
        if session.current_turn is not None:
            data.append(await self._turns.get(tenant, session_id, session.current_turn))
        return page_wire(data, False)

    async def tokens(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Return the exact token ids of the history."""
        session = await self._services.store.get(session_id, tenant=tenant)
        token_ids = await self._services.store.read_tokens(session)
        return {
            "object": "tokens",
            "session_id": session_id,
            "revision": session.revision,
            "num_tokens": count(token_ids),
            "token_ids": decode_ids(token_ids),
        }

    async def cache(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Return where the session's KV is now, and what its last turn reused."""
        services = self._services
        session = await services.store.get(session_id, tenant=tenant)
        log = await services.store.read_log(session)
        view: dict[str, Any] = {
            "object": "session.cache",
            "session_id": session_id,
            "tokens_total": session.num_tokens,
            "leased": 0,
            "last_turn": None,
            "miss": None,
        }
        salt = services.salt_of(session.tenant)
        try:
            hit = await services.client.query_prefix(log.token_ids, salt=salt, timeout_s=2.0)
            view["resident"] = {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3}
        except EngineUnavailableError:
            logger.info("residency unknown: no engine", extra={"session_id": session_id})
        last = await self._last_turn(session, log)
        if last is not None:
            view["last_turn"] = turn_view.last_turn_cache(last)
            view["miss"] = view["last_turn"]["miss"]
        return view

    # Inside -------------------------------------------------------------------------------

    async def _log(self, tenant: str | None, session_id: str) -> TurnLog:
        session = await self._services.store.get(session_id, tenant=tenant)
        return await self._services.store.read_log(session)

    async def _last_turn(self, session: Session, log: TurnLog) -> Record | None:
        if session.last_turn is None:
            return None
        record = log.find(session.last_turn)
        if record is not None:
            return record
        turn = await self._services.store.read_turn(session, session.last_turn)
        return None if isinstance(turn, PendingTurn) else turn

    def _items_record(self, session: Session, log: TurnLog, body: ItemsAppend) -> Record:
        services = self._services
        items = session.prepare_input(
            parse_items(body.items, path="items"),
            auto_close_calls=body.auto_close_calls,
            allow_open_calls=True,
            path="items",
        )
        if not items:
            raise ApiError("invalid_value", "items: there is nothing to append", "items")
        rendered = services.renderer.render_turn(
            services.end_of(session, log, items),
            items,
            services.head_of(session),
            add_generation_prompt=False,
        )
        return items_record(
            items,
            revision=session.revision + 1,
            token_ids=rendered.token_ids,
            item_token_ends=rendered.item_token_ends,
            model_fingerprint=services.assets.fingerprint,
        )

    async def _replace_head(self, session: Session, head: Head) -> Session:
        """Put another head before the same items; their tokens stay, their KV does not."""
        services = self._services
        log = await services.store.read_log(session)
        has_prelude = bool(log.records) and log.records[0].kind == PRELUDE
        rest = log.records[1:] if has_prelude else log.records
        new_head = services.first_records(head, ())
        if rest and not (has_prelude and new_head):
            # The old or the new head is rendered inside the first message: all is rendered anew.
            records = services.first_records(head, log.items, rewritten=HEAD_CHANGED)
        else:
            records = (*new_head, *(replace(r, params=_rewritten(r)) for r in rest))
        moved, own = replace_history(session, log, records, services.clock_ms())
        return await services.store.replace_history(moved, own)

    async def _check_quota(self, tenant: str) -> None:
        most = self._services.config.sessions.max_sessions_per_tenant
        if not most:
            return
        usage = await self._services.store.tenant_usage(tenant)
        if usage.num_sessions >= most:
            raise QuotaExceeded(f"the tenant has {usage.num_sessions} sessions, at most {most}")

    def _settings(self, body: SessionCreate) -> SessionSettings:
        changes = self._changes(body)
        reasoning = body.reasoning
        return SessionSettings(
            **changes,
            reasoning=ReasoningPolicy(
                effort=reasoning.effort if reasoning else None,
                history=reasoning.history if reasoning else "keep",
            ),
            strict_model=body.strict_model,
            template_policy="append",
        )

    def _changes(self, body: SessionCreate | SessionUpdate) -> dict[str, Any]:
        """Return the settings this body sets, as the session room names them."""
        changes: dict[str, Any] = {}
        for name in ("instructions", "tool_choice", "on_conflict", "on_disconnect", "priority"):
            if getattr(body, name) is not None:
                changes[name] = getattr(body, name)
        if body.tools is not None:
            self._services.toolset(body.tools)  # refuses what is no tool
            changes["tools"] = tuple(body.tools)
        if body.cache is not None:
            changes.update(_cache_changes(body.cache))
        if body.context is not None:
            changes["context"] = _context_policy(body.context)
        if body.expires_after is not None:
            changes["expires_after_ms"] = parse_duration(body.expires_after, path="expires_after")
        elif isinstance(body, SessionCreate):
            changes["expires_after_ms"] = self._services.config.sessions.expires_after_ms
        return changes

    async def _racing(self, work: Callable[[], Awaitable[T]]) -> T:
        for _ in range(MAX_RACES):
            try:
                return await work()
            except VersionConflict:
                continue
        return await work()


def refuse_unsupported(body: SessionCreate | SessionUpdate | ItemsAppend) -> None:
    """Raise ApiError for a value of the contract that this server cannot honour yet."""
    refused: list[tuple[str, Any, Any]] = []
    if isinstance(body, ItemsAppend):
        refused += [
            ("prefill", body.prefill, ("none",)),
            ("partial", body.partial, (False,)),
            ("final", body.final, (False,)),
            ("call_id", body.call_id, (None,)),
        ]
    else:
        refused.append(("on_conflict", body.on_conflict, (None, "reject")))
        if body.cache is not None:
            refused.append(("cache.lease", body.cache.lease, (None,)))
        if body.context is not None:
            refused.append(("context.on_overflow", body.context.on_overflow, ("error",)))
    if isinstance(body, SessionCreate) and body.reasoning is not None:
        refused.append(("reasoning.effort", body.reasoning.effort, (None,)))
        refused.append(("reasoning.history", body.reasoning.history, ("keep",)))
    for path, value, allowed in refused:
        if value not in allowed:
            raise ApiError(
                "unsupported_parameter",
                f"{path}: {value!r} is not supported yet (supported: {allowed[-1]!r})",
                path,
            )


def check_fits(session: Session, limit: int, path: str) -> None:
    """Raise ApiError unless the history leaves room for at least one token of output."""
    if session.num_tokens >= limit:
        raise ApiError(
            "context_length_exceeded",
            f"{path}: the history would hold {session.num_tokens} tokens; the context holds "
            f"{limit}, output included",
            path,
        )


def page_wire(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page as OpenAI's lists have it."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _rewritten(record: Record) -> dict[str, Any]:
    """The record's params without the claim that its KV can be found again."""
    report = {**(record.params.get(REPORT) or {}), "rewritten": HEAD_CHANGED, "reusable": 0}
    return {**record.params, REPORT: report}


def _cache_changes(cache: CacheBody) -> dict[str, Any]:
    return {} if cache.hold is None else {"hold": HoldTimes.parse(cache.hold)}


def _context_policy(context: ContextBody) -> ContextPolicy:
    return ContextPolicy(
        max_tokens=context.max_tokens,
        on_overflow=context.on_overflow,
        compact_at=context.compact_at,
        compact_to=context.compact_to,
    )
