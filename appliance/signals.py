# SPDX-License-Identifier: Apache-2.0
"""What a client's signal about a session changes in the cache: a decision, and what follows of it.

The decision is the session room's, by cost and by when the session comes back. The engine is told
how likely the history is continued, which weighs it against others, and what is decided is begun:
a demotion, a prefetch, or (where the time of return is known) a demotion and a prefetch in time.
Signals are advice: nothing that a turn answers depends on them. Does not know: HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from appliance.api.wire_sessions import SignalCreate
from appliance.services import Services
from appliance.tier_facts import TierFacts, TierWatch
from engine.api import CacheHit
from engine.errors import EngineError
from sessions.errors import SessionError, SessionExpired, UnknownCallId
from sessions.lease_policy import (
    DEMOTE_L2,
    DEMOTE_L3,
    IGNORED,
    KEEP,
    PREFETCH,
    Activity,
    TierTokens,
    decide_signal,
    hold_left,
)
from sessions.session import EXPIRED, Session

logger = logging.getLogger(__name__)

# How likely the history is continued while it matters; a turn leaves it at 0.5.
EXPECTED_RETURN = {
    "tool.started": 0.9,
    "tool.progress": 0.9,
    "tool.returning": 1.0,
    "user.active": 1.0,
    "idle": 0.25,
}
LONG_GAP_RETURN = 0.5  # a tool whose end is further away than the L1 hold
TIER_OF = {DEMOTE_L2: "l2", DEMOTE_L3: "l3", PREFETCH: "l1"}
EARLY_S = 0.5  # a prefetch by ETA starts this much sooner than it needs to
ENDS_WAIT = ("session.turn_started", "session.closed", "session.expired")


class SignalService:
    """Belongs to one event loop."""

    def __init__(self, services: Services, tiers: TierWatch) -> None:
        self._services = services
        self._tiers = tiers
        self._returns: dict[str, asyncio.TimerHandle] = {}  # prefetches to come, by session
        self._moves: set[asyncio.Task[None]] = set()
        services.hub.listen(self._on_session_event)

    async def take(self, tenant: str | None, session_id: str, body: SignalCreate) -> dict[str, Any]:
        """Decide on a signal, and begin what was decided.

        Raises: SessionNotFound, SessionExpired, UnknownCallId.
        """
        services = self._services
        session = await services.store.get(session_id, tenant=tenant)
        now_ms = services.clock_ms()
        if session.status == EXPIRED or now_ms >= session.expires_at_ms:
            raise SessionExpired(session_id)
        if body.call_id is not None and body.call_id not in session.open_call_ids:
            raise UnknownCallId(body.call_id, param="call_id", open_call_ids=session.open_call_ids)
        decision, reason, hit = IGNORED, "turn_running", CacheHit()
        if session.current_turn is None:
            try:
                decision, reason, hit = await self._decide(session, body, now_ms)
            except EngineError as error:
                logger.info("signal ignored: %s", error, extra={"session_id": session_id})
                reason = "engine_unavailable"
        answer = {
            "object": "session.signal",
            "session_id": session_id,
            "signal": body.type,
            "decision": decision,
            "reason": reason or None,
            "cached_tokens": hit.l1 + hit.l2 + hit.l3,
            "resident": {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3},
        }
        event = {"type": "session.signal", **answer, "call_id": body.call_id}
        event |= {"eta_ms": body.eta_ms, "tool_name": body.tool_name}
        services.hub.put(session_id, event)
        return answer

    async def close(self) -> None:
        """Stop what was begun; what the engine was asked for goes on."""
        for timer in self._returns.values():
            timer.cancel()
        for move in self._moves:
            move.cancel()
        await asyncio.gather(*self._moves, return_exceptions=True)

    async def _decide(
        self, session: Session, body: SignalCreate, now_ms: int
    ) -> tuple[str, str, CacheHit]:
        services = self._services
        token_ids = await services.store.read_tokens(session)
        if not token_ids:
            return IGNORED, "not_resident", CacheHit()
        salt = services.salt_of(session.tenant)
        hold = session.settings.hold
        hit = await services.client.query_prefix(token_ids, salt=salt, timeout_s=2.0)
        facts = await self._tiers.facts()
        chance = expected_return(body.type, body.eta_ms, hold.l1_ms)
        wanted = replace(hold, l1_ms=max(hold.l1_ms, body.eta_ms or 0))
        await services.client.hint_prefix(
            token_ids,
            chance,
            salt=salt,
            hold_ms=hold_left(wanted, now_ms, now_ms),
            timeout_s=2.0,
        )
        if not hit.l1 + hit.l2 + hit.l3:
            return IGNORED, "not_resident", hit
        activity = Activity(
            num_tokens=session.num_tokens,
            resident=TierTokens(l1=hit.l1, l2=hit.l1 + hit.l2, l3=hit.l1 + hit.l2 + hit.l3),
            eta_ms=body.eta_ms,
        )
        decision = decide_signal(
            body.type, activity, hold, facts.rates, now_ms, is_l1_tight=facts.is_l1_tight
        ).decision
        self._act(session, token_ids, decision, body.eta_ms, facts)
        return decision, "slower_than_prefill" if decision == IGNORED else "", hit

    def _act(
        self,
        session: Session,
        token_ids: bytes,
        decision: str,
        eta_ms: int | None,
        facts: TierFacts,
    ) -> None:
        self._forget_return(session.id)
        if decision == KEEP or decision not in TIER_OF:
            return
        self._begin(self._move(session, token_ids, TIER_OF[decision]))
        if decision != PREFETCH and eta_ms is not None:
            rate = facts.rates.load_l2 if decision == DEMOTE_L2 else facts.rates.load_l3
            wait_s = max(0.0, eta_ms / 1000 - session.num_tokens / rate - EARLY_S)
            loop = asyncio.get_running_loop()
            self._returns[session.id] = loop.call_later(wait_s, self._bring_back, session.id)

    def _bring_back(self, session_id: str) -> None:
        self._returns.pop(session_id, None)
        self._begin(self._prefetch(session_id))

    async def _prefetch(self, session_id: str) -> None:
        """The session is about to be back: its KV shall be there."""
        try:
            session = await self._services.store.get(session_id)
            if session.current_turn is None and session.status != EXPIRED:
                token_ids = await self._services.store.read_tokens(session)
                await self._move(session, token_ids, "l1")
        except SessionError as error:
            logger.info("not prefetched: %s", error, extra={"session_id": session_id})

    async def _move(self, session: Session, token_ids: bytes, tier: str) -> None:
        salt = self._services.salt_of(session.tenant)
        try:
            reply = await self._services.client.move_prefix(token_ids, tier, salt=salt)
        except EngineError as error:
            logger.info("not moved to %s: %s", tier, error, extra={"session_id": session.id})
            return
        event = {"type": "session.moved", "session_id": session.id, "tier": tier}
        hit = reply.cache
        resident = {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3}
        self._services.hub.put(session.id, {**event, "resident": resident})

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, Any]) -> None:
        if kind in ENDS_WAIT:
            self._forget_return(session.id)

    def _forget_return(self, session_id: str) -> None:
        timer = self._returns.pop(session_id, None)
        if timer is not None:
            timer.cancel()


def expected_return(signal: str, eta_ms: int | None, hold_ms: int) -> float:
    """How likely a history is continued before its pages should go to others."""
    chance = EXPECTED_RETURN[signal]
    if signal.startswith("tool.") and eta_ms is not None and eta_ms > hold_ms:
        return min(chance, LONG_GAP_RETURN)
    return chance
