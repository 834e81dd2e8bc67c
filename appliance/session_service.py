# SPDX-License-Identifier: Apache-2.0
"""SessionService: create, change, list, fork and close sessions.

Does not know: HTTP, how a turn runs (turns), what else can be looked at (session_views).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from appliance import turn_view
from appliance.api.wire_sessions import (
    ForkCreate,
    SessionCreate,
    SessionUpdate,
)
from appliance.cache_report import HEAD_CHANGED, REPORT
from appliance.errors import ApiError
from appliance.prompts import Head
from appliance.races import racing
from appliance.reasoning_history import reasoning_wire
from appliance.services import DEFAULT_TENANT, Services
from appliance.session_history import check_fits, release_kv
from appliance.session_settings import changed_settings, check_context, new_settings
from appliance.session_views import page_wire
from appliance.text_limits import check_can_fit, num_chars, off_loop
from appliance.turns import TurnService
from sessions.errors import SessionNotFound
from sessions.history import fork, replace_history
from sessions.items import parse_items
from sessions.session import QUEUED, Session, new_session
from sessions.store import ListQuery
from sessions.turn_log import PRELUDE, Record
from tools_schema.tool_choice import parse_tool_choice

logger = logging.getLogger(__name__)


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
        toolset = services.toolset(body.tools or [])
        parse_tool_choice(body.tool_choice, toolset)
        settings = new_settings(body, services.config.sessions.expires_after_ms)
        check_context(settings, services.max_context_len)
        owner = tenant or DEFAULT_TENANT
        await services.check_quota(owner, new_sessions=1)
        if body.parent_session_id is not None:
            await self._check_parent(tenant, body.parent_session_id)
        chars = num_chars([body.instructions, body.initial_items])
        limit = services.max_context_len
        max_token_bytes = services.assets.tokenizer.max_token_bytes
        check_can_fit(chars, limit, max_token_bytes, "initial_items")
        items = parse_items(body.initial_items or [], path="initial_items")
        options = services.thinking_options(settings.reasoning.effort)
        head = Head(body.instructions, toolset, options)
        records = await off_loop(chars, lambda: services.first_records(head, items))
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
        """Return a session, and where limits are set, what its tenant has used of them."""
        services = self._services
        session = await services.store.get(session_id, tenant=tenant)
        wire = turn_view.session_wire(session, services.clock_ms())
        waiting = self._turns.queue.first(session_id)
        if waiting is not None and session.current_turn is None:
            wire |= {"status": QUEUED, "current_turn": waiting}
        quota = await services.quota_of(session.tenant)
        if quota.max_sessions or quota.max_tokens:
            usage = await services.store.tenant_usage(session.tenant)
            wire["quota"] = {
                "max_sessions": quota.max_sessions or None,
                "max_tokens": quota.max_tokens or None,
                "sessions": usage.num_sessions,
                "tokens": usage.num_tokens,
            }
        return wire

    async def list(self, query: ListQuery) -> dict[str, Any]:
        """Return one page, newest first."""
        page = await self._services.store.list_sessions(query)
        now_ms = self._services.clock_ms()
        data = [turn_view.session_wire(session, now_ms) for session in page.sessions]
        return page_wire(data, page.has_more)

    async def update(
        self, tenant: str | None, session_id: str, body: SessionUpdate
    ) -> dict[str, Any]:
        """Change mutable fields; `x_invalidated_tokens` says how much KV that costs."""

        async def once() -> dict[str, Any]:
            services = self._services
            old = await services.store.get(session_id, tenant=tenant)
            changes = changed_settings(body, old.settings)
            now_ms = services.clock_ms()
            session = old.update(now_ms, settings=changes, metadata=body.metadata)
            if "context" in changes:
                check_context(session.settings, services.max_context_len)
            head, old_head = services.head_of(session), services.head_of(old)
            if "tools" in changes or "tool_choice" in changes:
                parse_tool_choice(session.settings.tool_choice, head.toolset)
            if self._is_other_head(old_head, head):
                invalidated = old.num_tokens
                stored = await self._replace_head(session, head)
            else:
                invalidated = await self._dropped_reasoning(old, session)
                stored = await services.store.update(session)
            return {**turn_view.session_wire(stored), "x_invalidated_tokens": invalidated}

        return await racing(once)

    async def close(self, tenant: str | None, session_id: str, *, release: bool) -> None:
        """Delete a session with its transcript; `release` gives back its unshared KV at once.

        A session that is not there (or another tenant's) is none to close: nothing happens.
        """
        store = self._services.store
        try:
            session = await store.get(session_id, tenant=tenant)
        except SessionNotFound:
            return
        await self._turns.cancel_waiting(session_id)
        if session.current_turn is not None:
            await self._turns.cancel(tenant, session_id, session.current_turn)
            session = await store.get(session_id, tenant=tenant)
        log = await store.read_log(session)
        for lease in session.leases:  # before the drop: what is leased stays
            await self._services.client.release_lease(lease.id)
        await store.delete(session_id)
        for record in log.records:
            self._services.journals.drop_of(session_id, record.id)
        if release:
            await release_kv(self._services, session, log)
        logger.info("session closed", extra={"session_id": session_id})

    # History ------------------------------------------------------------------------------

    async def fork(self, tenant: str | None, session_id: str, body: ForkCreate) -> dict[str, Any]:
        """Create `n` children that share the history up to a point; no token is copied."""
        services = self._services
        session = await services.store.get(session_id, tenant=tenant)
        await services.check_quota(session.tenant, new_sessions=body.n)
        log = await services.store.read_log(session)
        children = fork(
            session, log, body.at, services.clock_ms(), n=body.n, metadata=body.metadata
        )
        stored = await services.store.create_many(children)
        return {"object": "list", "data": [turn_view.session_wire(child) for child in stored]}

    # Inside -------------------------------------------------------------------------------

    async def _check_parent(self, tenant: str | None, session_id: str) -> None:
        try:
            await self._services.store.get(session_id, tenant=tenant)
        except SessionNotFound as error:
            raise ApiError(error.code, str(error), "parent_session_id") from None

    def _is_other_head(self, old: Head, new: Head) -> bool:
        if (old.instructions, old.toolset) != (new.instructions, new.toolset):
            return True
        renderer = self._services.renderer
        return old.options != new.options and renderer.render_head(old) != renderer.render_head(new)

    async def _dropped_reasoning(self, old: Session, new: Session) -> int:
        """Tokens that are computed again at the user's next turn, if it now drops reasoning."""
        policies = (old.settings.reasoning.history, new.settings.reasoning.history)
        if policies != ("keep", "drop_before_last_user"):
            return 0
        log = await self._services.store.read_log(old)
        return int(reasoning_wire(old, log)["recompute_tokens"])

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
            records = (
                *new_head,
                *(replace(r, params=_rewritten(r), page_hashes=b"") for r in rest),
            )
        moved, own = replace_history(session, log, records, services.clock_ms())
        return await services.store.replace_history(moved, own)


def _rewritten(record: Record) -> dict[str, Any]:
    """The record's params without the claim that its KV can be found again."""
    report = {**(record.params.get(REPORT) or {}), "rewritten": HEAD_CHANGED, "reusable": 0}
    return {**record.params, REPORT: report}
