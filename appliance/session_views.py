# SPDX-License-Identifier: Apache-2.0
"""What clients may look at in a session: its items, turns, tokens and cache.

Does not know: HTTP, how any of it came about.
"""

from __future__ import annotations

import logging
from typing import Any

from appliance import turn_view
from appliance.cost_meter import CostMeter
from appliance.reasoning_history import reasoning_wire
from appliance.response_events import item_wire
from appliance.services import Services
from engine.errors import EngineUnavailableError
from sessions.errors import ItemNotFound
from sessions.lease_policy import TierTokens
from sessions.leases import leased_tokens
from sessions.residency import TierCost
from sessions.session import Session
from sessions.settings import TIERS
from sessions.token_codec import count, decode_ids
from sessions.turn_log import TURN, PendingTurn, Record, TurnLog

logger = logging.getLogger(__name__)

RECENT_TURNS = 20  # whose cache is summed up


class SessionViews:
    """Read-only; `tenant` None sees every tenant's sessions."""

    def __init__(self, services: Services, meter: CostMeter) -> None:
        self._services = services
        self._meter = meter

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
                raise ItemNotFound(after, param="after")
            start = position + 1
        page = items[start : start + limit]
        return page_wire([item_wire(item) for item in page], start + limit < len(items))

    async def turns(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Return the turns of the history, oldest first, and the one that runs now."""
        session = await self._services.store.get(session_id, tenant=tenant)
        log = await self._services.store.read_log(session)
        data = [turn_view.turn_wire(session_id, r) for r in log.records if r.kind == TURN]
        if session.current_turn is not None:
            turn = await self._services.store.read_turn(session, session.current_turn)
            if isinstance(turn, PendingTurn):
                data.append(turn_view.pending_wire(turn))
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
        turns = [record for record in log.records if record.kind == TURN]
        now_ms = services.clock_ms()
        view: dict[str, Any] = {
            "object": "session.cache",
            "session_id": session_id,
            "tokens_total": session.num_tokens,
            "leased": max(leased_tokens(session.leases, tier, now_ms) for tier in TIERS),
            "shared_tokens": self._meter.shared_tokens(session_id),
            "reasoning": reasoning_wire(session, log),
            "copies": copies_wire(self._meter.copies(session_id)),
            "cost": cost_wire(self._meter.cost_of(session)),
            "last_turn": None,
            "recent_turns": turn_view.recent_turns(turns[-RECENT_TURNS:]),
            "num_turns": len(turns),
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


def cost_wire(cost: TierCost) -> dict[str, float]:
    """Return byte-seconds by tier."""
    return {
        "l1_byte_s": round(cost.l1_byte_s, 1),
        "l2_byte_s": round(cost.l2_byte_s, 1),
        "l3_byte_s": round(cost.l3_byte_s, 1),
    }


def copies_wire(copies: TierTokens | None) -> dict[str, int] | None:
    """Return the tokens that each tier has a copy of; None where nobody has counted."""
    return None if copies is None else {"l1": copies.l1, "l2": copies.l2, "l3": copies.l3}


def page_wire(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page as OpenAI's lists have it."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
