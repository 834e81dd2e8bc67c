# SPDX-License-Identifier: Apache-2.0
"""What a client's signal about a session changes in the cache: a decision, and a hint to match.

The decision is the session room's; L1 is the only tier, so it is `keep` or `ignored`. The engine is
told how likely the history is to be continued soon, which weighs it against others when pages
run short. Signals are advice: nothing that a turn answers depends on them. Does not know: HTTP.
"""

from __future__ import annotations

import logging
from typing import Any

from appliance.api.wire_sessions import SignalCreate
from appliance.services import Services
from engine.errors import EngineError
from sessions.errors import SessionExpired, UnknownCallId
from sessions.lease_policy import IGNORED, Activity, TierRates, TierTokens, decide_signal
from sessions.session import EXPIRED

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
L1_ONLY = TierRates(prefill=1.0)


async def take_signal(
    services: Services, tenant: str | None, session_id: str, body: SignalCreate
) -> dict[str, Any]:
    """Decide on a signal and hint the engine.

    Raises: SessionNotFound, SessionExpired, UnknownCallId.
    """
    session = await services.store.get(session_id, tenant=tenant)
    now_ms = services.clock_ms()
    if session.status == EXPIRED or now_ms >= session.expires_at_ms:
        raise SessionExpired(session_id)
    if body.call_id is not None and body.call_id not in session.open_call_ids:
        raise UnknownCallId(body.call_id, param="call_id", open_call_ids=session.open_call_ids)
    decision, reason, num_cached = IGNORED, "turn_running", 0
    if session.current_turn is None:
        token_ids = await services.store.read_tokens(session)
        chance = expected_return(body.type, body.eta_ms, session.settings.hold.l1_ms)
        try:
            num_cached = await _hint(services, token_ids, chance, session.tenant)
        except EngineError as error:
            logger.info("signal ignored: %s", error, extra={"session_id": session_id})
            reason = "engine_unavailable"
        else:
            activity = Activity(
                num_tokens=session.num_tokens,
                resident=TierTokens(l1=num_cached),
                eta_ms=body.eta_ms,
            )
            hold = session.settings.hold
            decision = decide_signal(
                body.type, activity, hold, L1_ONLY, now_ms, is_l1_tight=False
            ).decision
            reason = ""
            if not num_cached:  # there is nothing to keep
                decision, reason = IGNORED, "not_resident"
    answer = {
        "object": "session.signal",
        "session_id": session_id,
        "signal": body.type,
        "decision": decision,
        "reason": reason or None,
        "cached_tokens": num_cached,
    }
    event = {"type": "session.signal", **answer, "call_id": body.call_id, "eta_ms": body.eta_ms}
    services.hub.put(session_id, {**event, "tool_name": body.tool_name})
    return answer


def expected_return(signal: str, eta_ms: int | None, hold_ms: int) -> float:
    """How likely a history is continued before its pages should go to others."""
    chance = EXPECTED_RETURN[signal]
    if signal.startswith("tool.") and eta_ms is not None and eta_ms > hold_ms:
        return min(chance, LONG_GAP_RETURN)
    return chance


async def _hint(services: Services, token_ids: bytes, chance: float, tenant: str) -> int:
    if not token_ids:
        return 0
    return await services.client.hint_prefix(
        token_ids, chance, salt=services.salt_of(tenant), timeout_s=2.0
    )
