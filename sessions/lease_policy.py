# SPDX-License-Identifier: Apache-2.0
"""Who may keep KV memory, where and until when: pure decisions on numbers that are passed in.

Does not know: pages, tiers' internals, clocks. A hold is a wish that costs nothing to break; a
lease is a promise and comes out of a budget. Times are Unix milliseconds, sizes are tokens.

A signal is decided by cost. Keeping T tokens in L1 through a gap is right while the gap is short
or nobody waits for the room; otherwise they go to the fastest tier whose hold time outlasts the
gap, if bringing them back costs less than computing them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sessions.errors import SettingError
from sessions.settings import TIERS, HoldTimes

KEEP: Final = "keep"
DEMOTE_L2: Final = "demote_l2"
DEMOTE_L3: Final = "demote_l3"
PREFETCH: Final = "prefetch"
IGNORED: Final = "ignored"

MAX_HOLD_MS: Final = 10_000 * 86_400_000  # longer than anything lives

GAP_SIGNALS: Final = ("tool.started", "tool.progress", "idle")
RETURN_SIGNALS: Final = ("tool.returning", "user.active")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTokens:
    """Tokens of one session in each tier; a token may be in several."""

    l1: int = 0
    l2: int = 0
    l3: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRates:
    """What it costs to have tokens in L1 again, in tokens per second; 0: the tier is not there."""

    prefill: float
    load_l2: float = 0.0
    load_l3: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What is known of a session when a signal comes. `eta_ms`: until its next turn, if known."""

    num_tokens: int
    resident: TierTokens
    eta_ms: int | None = None
    is_running: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseDirective:
    """What the engine is asked to do with a session's prefix."""

    decision: str
    tier: str  # where the prefix should be
    until_ms: int  # how long it is wanted there


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBudget:
    """The room for leases in one tier. Fractions are of the pool."""

    pool_tokens: int
    leased_tokens: int = 0
    tenant_leased_tokens: int = 0
    num_tenants: int = 1
    page_size: int = 64
    fraction: float = 0.5
    tenant_fraction: float = 0.25

    @property
    def available_tokens(self) -> int:
        """Whole pages that may still be leased by this tenant."""
        free = int(self.pool_tokens * self.fraction) - self.leased_tokens
        if self.num_tenants > 1:
            share = int(self.pool_tokens * self.tenant_fraction) - self.tenant_leased_tokens
            free = min(free, share)
        return max(0, free // self.page_size * self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    state: str  # granted | clipped | queued | denied
    tokens_requested: int
    tokens_granted: int
    reason: str | None = None


def grant_lease(tier: str, tokens_requested: int, budget: LeaseBudget) -> LeaseGrant:
    """Answer a lease request: the head of the prefix is kept, what exceeds the budget is not.

    Raises `SettingError` for an unknown tier or a negative length.
    """
    if tier not in TIERS:
        raise SettingError(f"tier: expected one of {', '.join(TIERS)}, got {tier!r}", param="tier")
    if tokens_requested < 0:
        raise SettingError(f"upto: expected 0 tokens or more, got {tokens_requested}", param="upto")
    if tokens_requested == 0:
        return _grant("denied", tokens_requested, 0, "nothing_to_lease")
    if budget.pool_tokens == 0:
        return _grant("denied", tokens_requested, 0, "tier_not_configured")
    available = budget.available_tokens
    if available == 0:
        return _grant("queued", tokens_requested, 0, "budget_exhausted")
    if available < tokens_requested:
        return _grant("clipped", tokens_requested, available, "budget_exceeded")
    return _grant("granted", tokens_requested, tokens_requested, None)


def _grant(state: str, requested: int, granted: int, reason: str | None) -> LeaseGrant:
    return LeaseGrant(
        state=state, tokens_requested=requested, tokens_granted=granted, reason=reason
    )


def hold_left(hold: HoldTimes, last_used_ms: int, now_ms: int) -> tuple[int, int, int]:
    """How much longer an idle session's prefix is wanted in L1, L2 and L3, in milliseconds."""
    times = (hold.l1_ms, hold.l2_ms, hold.l3_ms)
    left_ms = (last_used_ms + hold_ms - now_ms for hold_ms in times)
    l1, l2, l3 = (min(max(0, ms), MAX_HOLD_MS) for ms in left_ms)
    return l1, l2, l3


def decide_signal(
    signal: str,
    activity: Activity,
    hold: HoldTimes,
    rates: TierRates,
    now_ms: int,
    *,
    is_l1_tight: bool,
) -> LeaseDirective:
    """What a client's signal changes. `is_l1_tight`: others wait for room in L1.

    Raises `SettingError` for an unknown signal or a negative `eta_ms`.
    """
    _check_signal(signal, activity.eta_ms)
    until_ms = now_ms + max(hold.l1_ms, activity.eta_ms or 0)
    if activity.is_running:
        return LeaseDirective(decision=IGNORED, tier="l1", until_ms=until_ms)
    if signal in RETURN_SIGNALS:
        return _decide_return(activity, rates, until_ms)
    gap_ms = hold.l1_ms if activity.eta_ms is None else activity.eta_ms
    if signal == "idle" and activity.eta_ms is None:
        gap_ms = hold.l1_ms + 1  # nobody knows when: longer than the L1 hold
    if gap_ms <= hold.l1_ms or not is_l1_tight or not activity.resident.l1:
        return LeaseDirective(decision=KEEP, tier="l1", until_ms=until_ms)
    return _decide_demotion(activity, hold, rates, gap_ms, now_ms)


def _decide_return(activity: Activity, rates: TierRates, until_ms: int) -> LeaseDirective:
    missing = activity.num_tokens - activity.resident.l1
    below = max(activity.resident.l2, activity.resident.l3) - activity.resident.l1
    if missing <= 0 or below <= 0:
        return LeaseDirective(decision=KEEP, tier="l1", until_ms=until_ms)
    rate = rates.load_l2 if activity.resident.l2 > activity.resident.l1 else rates.load_l3
    decision = PREFETCH if rate > rates.prefill else IGNORED
    return LeaseDirective(decision=decision, tier="l1", until_ms=until_ms)


def _decide_demotion(
    activity: Activity, hold: HoldTimes, rates: TierRates, gap_ms: int, now_ms: int
) -> LeaseDirective:
    if gap_ms <= hold.l2_ms and rates.load_l2 > rates.prefill:
        return LeaseDirective(decision=DEMOTE_L2, tier="l2", until_ms=now_ms + hold.l2_ms)
    if rates.load_l3 > rates.prefill:
        return LeaseDirective(decision=DEMOTE_L3, tier="l3", until_ms=now_ms + hold.l3_ms)
    return LeaseDirective(decision=KEEP, tier="l1", until_ms=now_ms + hold.l1_ms)


def _check_signal(signal: str, eta_ms: int | None) -> None:
    known = GAP_SIGNALS + RETURN_SIGNALS
    if signal not in known:
        raise SettingError(
            f"type: expected one of {', '.join(known)}, got {signal!r}", param="type"
        )
    if eta_ms is not None and eta_ms < 0:
        raise SettingError(f"eta_ms: expected 0 or more, got {eta_ms}", param="eta_ms")
