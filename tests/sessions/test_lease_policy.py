# SPDX-License-Identifier: Apache-2.0
"""Lease grants stay in the budget; signals are decided by gap, pressure and cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.errors import SettingError
from sessions.lease_policy import (
    MAX_HOLD_MS,
    Activity,
    LeaseBudget,
    TierRates,
    TierTokens,
    decide_signal,
    grant_lease,
    hold_left,
)
from sessions.settings import HoldTimes

NOW_MS = 1_000_000_000
HOLD = HoldTimes(l1_ms=30_000, l2_ms=3_600_000, l3_ms=86_400_000)
RATES = TierRates(prefill=2_000.0, load_l2=500_000.0, load_l3=60_000.0)
IN_L1 = TierTokens(l1=10_000)


def decide(
    signal: str,
    *,
    eta_ms: int | None = None,
    resident: TierTokens = IN_L1,
    rates: TierRates = RATES,
    is_l1_tight: bool = True,
    is_running: bool = False,
) -> str:
    activity = Activity(num_tokens=10_000, resident=resident, eta_ms=eta_ms, is_running=is_running)
    return decide_signal(signal, activity, HOLD, rates, NOW_MS, is_l1_tight=is_l1_tight).decision


# -- leases


@pytest.mark.parametrize(
    ("requested", "budget", "state", "granted"),
    [
        (1_000, LeaseBudget(pool_tokens=64_000), "granted", 1_000),
        (32_000, LeaseBudget(pool_tokens=64_000), "granted", 32_000),
        (32_001, LeaseBudget(pool_tokens=64_000), "clipped", 32_000),
        (5_000, LeaseBudget(pool_tokens=64_000, leased_tokens=28_000), "clipped", 3_968),
        (1, LeaseBudget(pool_tokens=64_000, leased_tokens=31_950), "queued", 0),
        (1, LeaseBudget(pool_tokens=64_000, leased_tokens=40_000), "queued", 0),
        (20_000, LeaseBudget(pool_tokens=64_000, num_tenants=2), "clipped", 16_000),
        (
            20_000,
            LeaseBudget(pool_tokens=64_000, num_tenants=2, tenant_leased_tokens=15_000),
            "clipped",
            960,
        ),
        (1, LeaseBudget(pool_tokens=0), "denied", 0),
        (0, LeaseBudget(pool_tokens=64_000), "denied", 0),
    ],
)
def test_leases_are_granted_clipped_queued_or_denied(
    requested: int, budget: LeaseBudget, state: str, granted: int
) -> None:
    grant = grant_lease("l1", requested, budget)
    assert (grant.state, grant.tokens_granted) == (state, granted)
    assert (grant.reason is None) == (state == "granted")


@settings(deadline=None)
@given(
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2)), max_size=30),
)
def test_leases_never_exceed_the_budget(
    pool: int, page_seed: int, requests: list[tuple[int, int]]
) -> None:
    page_size = 1 + page_seed % 128
    leased = {0: 0, 1: 0, 2: 0}
    for requested, tenant in requests:
        budget = LeaseBudget(
            pool_tokens=pool,
            leased_tokens=sum(leased.values()),
            tenant_leased_tokens=leased[tenant],
            num_tenants=3,
            page_size=page_size,
        )
        grant = grant_lease("l1", requested, budget)
        assert 0 <= grant.tokens_granted <= requested
        leased[tenant] += grant.tokens_granted
    assert sum(leased.values()) <= pool * 0.5
    assert all(tokens <= pool * 0.25 for tokens in leased.values())


def test_lease_requests_out_of_range_are_refused() -> None:
    with pytest.raises(SettingError, match="tier"):
        grant_lease("l4", 1, LeaseBudget(pool_tokens=10))
    with pytest.raises(SettingError, match="upto"):
        grant_lease("l1", -1, LeaseBudget(pool_tokens=10))


# -- holds


@pytest.mark.parametrize(
    ("idle_ms", "left"),
    [
        (0, (30_000, 3_600_000, 86_400_000)),
        (29_999, (1, 3_570_001, 86_370_001)),
        (30_000, (0, 3_570_000, 86_370_000)),
        (3_600_000, (0, 0, 82_800_000)),
        (86_400_000, (0, 0, 0)),
        (-5, (30_005, 3_600_005, 86_400_005)),  # a clock that was set back
        (-(10**18), (MAX_HOLD_MS, MAX_HOLD_MS, MAX_HOLD_MS)),
    ],
)
def test_hold_times_run_from_the_last_use(idle_ms: int, left: tuple[int, int, int]) -> None:
    assert hold_left(HOLD, NOW_MS, NOW_MS + idle_ms) == left


# -- signals


@pytest.mark.parametrize("signal", ["tool.started", "tool.progress", "idle"])
def test_a_short_gap_keeps_l1_even_under_pressure(signal: str) -> None:
    assert decide(signal, eta_ms=5_000) == "keep"


@pytest.mark.parametrize("signal", ["tool.started", "tool.progress", "idle"])
def test_a_long_gap_keeps_l1_where_nobody_waits(signal: str) -> None:
    assert decide(signal, eta_ms=600_000, is_l1_tight=False) == "keep"


def test_a_long_gap_under_pressure_goes_to_the_tier_that_outlasts_it() -> None:
    assert decide("tool.started", eta_ms=600_000) == "demote_l2"
    assert decide("tool.started", eta_ms=2 * 3_600_000) == "demote_l3"
    assert decide("idle") == "demote_l2"


def test_a_tool_without_an_eta_keeps_for_the_hold_time() -> None:
    assert decide("tool.started") == "keep"


def test_a_tier_slower_than_prefill_is_not_used() -> None:
    slow_l2 = TierRates(prefill=2_000.0, load_l2=1_000.0, load_l3=60_000.0)
    assert decide("tool.started", eta_ms=600_000, rates=slow_l2) == "demote_l3"
    only_l1 = TierRates(prefill=2_000.0)
    assert decide("tool.started", eta_ms=600_000, rates=only_l1) == "keep"
    gone = TierTokens(l3=10_000)
    slow_l3 = TierRates(prefill=2_000.0, load_l3=1_000.0)
    assert decide("tool.returning", resident=gone, rates=slow_l3) == "ignored"


@pytest.mark.parametrize("signal", ["tool.returning", "user.active"])
def test_a_return_fetches_what_is_below_and_keeps_what_is_there(signal: str) -> None:
    assert decide(signal, resident=TierTokens(l1=10_000, l2=10_000)) == "keep"
    assert decide(signal, resident=TierTokens(l2=10_000)) == "prefetch"
    assert decide(signal, resident=TierTokens(l1=4_000, l3=10_000)) == "prefetch"
    assert decide(signal, resident=TierTokens()) == "keep"


def test_signals_while_a_turn_runs_change_nothing() -> None:
    assert decide("idle", is_running=True) == "ignored"


def test_bad_signals_are_refused() -> None:
    with pytest.raises(SettingError) as caught:
        decide("tool.done")
    assert caught.value.param == "type"
    with pytest.raises(SettingError) as caught:
        decide("idle", eta_ms=-1)
    assert caught.value.param == "eta_ms"
