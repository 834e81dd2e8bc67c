# SPDX-License-Identifier: Apache-2.0
"""SessionHistory: take a session's history back, out as JSON lines, and in again.

Does not know: HTTP, turns that run (a running turn is in the way of all that moves a history).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from appliance import turn_view
from appliance.api.wire_sessions import Rollback
from appliance.cache_report import REPORT, report_problem
from appliance.races import racing
from appliance.services import DEFAULT_TENANT, Services
from appliance.session_settings import check_imported, fitting
from appliance.text_limits import ContextExceeded
from engine.errors import EngineError
from sessions.errors import ImportFormatError
from sessions.export import export_lines, import_lines
from sessions.history import rollback
from sessions.session import Session
from sessions.store import ListQuery
from sessions.turn_log import Record, TurnLog

logger = logging.getLogger(__name__)

FORGET_S = 5.0


class SessionHistory:
    """All that moves a whole history."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def rollback(self, tenant: str | None, session_id: str, body: Rollback) -> dict[str, Any]:
        """Go back to just behind a turn, an item or a revision; the rest is released.

        Raises: TurnNotFound, ItemNotFound, ForkPointError, TurnInProgress, RevisionConflict.
        """

        async def once() -> dict[str, Any]:
            services = self._services
            now_ms = services.clock_ms()
            session = await services.store.get(session_id, tenant=tenant)
            session.check_ready(now_ms, expect_revision=body.expect_revision)
            log = await services.store.read_log(session)
            moved, own = rollback(session, log, body.to, now_ms)
            stored = await services.store.replace_history(moved, own)
            await release_kv(services, session, log, keep_tokens=stored.num_tokens)
            logger.info("session rolled back", extra={"session_id": session_id})
            dropped = session.num_tokens - stored.num_tokens
            return {**turn_view.session_wire(stored), "x_released_tokens": dropped}

        return await racing(once)

    async def export(self, tenant: str | None, session_id: str) -> Iterator[bytes]:
        """Return the session as lines; a running turn is not part of them."""
        session = await self._services.store.get(session_id, tenant=tenant)
        return export_lines(session, await self._services.store.read_log(session))

    async def import_(self, tenant: str | None, raw: bytes) -> dict[str, Any]:
        """Make a new session of the caller's from exported lines.

        Raises: ImportFormatError, InvalidSchemaError, QuotaExceeded; ApiError.
        """
        services = self._services
        owner = tenant or DEFAULT_TENANT
        await services.check_quota(owner, new_sessions=1)
        session, records = import_lines(
            raw.split(b"\n"),
            tenant=owner,
            now_ms=services.clock_ms(),
            vocab_size=services.assets.vocab_size,
        )
        check_reports(records)
        settings = fitting(session.settings, services.max_context_len)
        session = replace(session, model=services.check_model(session.model), settings=settings)
        check_imported(settings)
        services.thinking_options(session.settings.reasoning.effort)
        services.toolset(session.settings.tools)
        check_fits(session, services.context_limit(session), "body")
        stored = await services.store.create(session, records)
        logger.info("session imported", extra={"session_id": stored.id})
        return turn_view.session_wire(stored)


async def release_kv(
    services: Services, session: Session, log: TurnLog, *, keep_tokens: int = 0
) -> None:
    """Give back the KV of a history from `keep_tokens` on, if no relative stands on it.

    Children may share any of it; an ancestor shares what its own log does not hold.
    """
    page = await services.store.list_sessions(ListQuery(parent_session_id=session.id, limit=1))
    if page.sessions:
        return
    if session.parent_session_id is not None:
        num_shared = sum(span.num_records for span in session.lineage)
        shared = sum(record.num_tokens for record in log.records[:num_shared])
        keep_tokens = max(keep_tokens, shared)
    salt = services.salt_of(session.tenant)
    if keep_tokens < log.num_tokens:
        await services.client.drop_prefix(log.token_ids, keep_tokens, salt=salt)
    if not keep_tokens and log.token_ids and services.client.is_ready:
        try:
            await services.client.move_prefix(log.token_ids, "none", salt=salt, timeout_s=FORGET_S)
        except EngineError as error:  # it decays instead
            logger.info("lower tiers not told: %s", error, extra={"session_id": session.id})


def check_reports(records: Sequence[Record]) -> None:
    """Raise ImportFormatError for what a turn cannot have reported of itself."""
    for number, record in enumerate(records, start=2):
        problem = report_problem(record)
        if problem is not None:
            raise ImportFormatError(f"line {number}: params.{REPORT}: {problem}", param="body")


def check_fits(session: Session, limit: int, path: str, *, num_new: int = 0) -> None:
    """Raise ApiError unless the history leaves room for at least one token of output."""
    if session.num_tokens >= limit:
        raise ContextExceeded(
            f"{path}: the history would hold {session.num_tokens} tokens; the context holds "
            f"{limit}, output included",
            path,
            num_new,
        )
