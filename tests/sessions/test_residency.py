# SPDX-License-Identifier: Apache-2.0
"""Residency folds KV events into tokens by tier, as a plain recount would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.lease_policy import TierTokens
from sessions.residency import Residency, TierCost

PAGE = 64


def page(name: int) -> bytes:
    return name.to_bytes(16, "big")


def chain(*names: int) -> bytes:
    return b"".join(map(page, names))


def test_tokens_are_counted_by_tier() -> None:
    residency = Residency(PAGE)
    residency.track("a", chain(1, 2, 3))
    for name in (1, 2):
        residency.apply("stored", "l1", page(name))
    residency.apply("stored", "l2", page(1))
    assert residency.tokens("a") == TierTokens(l1=128, l2=64)
    residency.apply("moved", "l3", page(2))
    assert residency.tokens("a") == TierTokens(l1=64, l2=64, l3=64)
    residency.apply("removed", "l1", page(1))
    assert residency.tokens("a") == TierTokens(l1=0, l2=64, l3=64)


def test_nothing_counts_behind_a_page_that_is_gone() -> None:
    residency = Residency(PAGE)
    residency.track("a", chain(1, 2, 3))
    for name in (1, 3):
        residency.apply("stored", "l1", page(name))
    assert residency.tokens("a") == TierTokens(l1=64)


@pytest.mark.parametrize(
    "later", [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2), (), (1, 2, 9), (7, 8, 9, 10)]
)
def test_a_history_that_grew_shrank_or_changed_is_followed(later: tuple[int, ...]) -> None:
    residency, fresh = Residency(PAGE), Residency(PAGE)
    residency.track("a", chain(1, 2, 3))
    for known in (residency, fresh):
        known.track("a", chain(*later))
        known.track("b", chain(*later, 11))
        for name in (*later, 11):
            known.apply("stored", "l2", page(name))
    assert residency.tokens("a") == fresh.tokens("a") == TierTokens(l2=len(later) * PAGE)
    assert residency.shared_tokens("b") == fresh.shared_tokens("b") == len(later) * PAGE


def test_an_engine_restart_empties_l1_only() -> None:
    residency = Residency(PAGE)
    residency.track("a", chain(1, 2))
    residency.apply("stored", "l1", page(1))
    residency.apply("stored", "l2", page(1))
    residency.apply("stored", "l1", page(2))
    residency.clear_tier("l1")
    assert residency.tokens("a") == TierTokens(l2=64)
    assert residency.num_pages == 1


def test_shared_tokens_are_the_longest_common_head() -> None:
    residency = Residency(PAGE)
    residency.track("a", chain(1, 2, 3, 4))
    residency.track("b", chain(1, 2, 9))
    residency.track("c", chain(7))
    assert residency.shared_tokens("a") == 128
    assert residency.shared_tokens("c") == 0
    residency.forget("b")
    assert residency.shared_tokens("a") == 0


def test_unknown_sessions_have_nothing_and_bad_events_are_refused() -> None:
    residency = Residency(PAGE)
    assert residency.tokens("none") == TierTokens()
    with pytest.raises(ValueError, match="kind"):
        residency.apply("lost", "l1", page(1))
    with pytest.raises(ValueError, match="tier"):
        residency.apply("stored", "l9", page(1))
    with pytest.raises(ValueError, match="16"):
        residency.track("a", b"short")


events = st.tuples(
    st.sampled_from(["stored", "moved", "removed"]),
    st.sampled_from(["l1", "l2", "l3"]),
    st.integers(0, 5),
)


@settings(deadline=None)
@given(st.lists(events, max_size=60), st.lists(st.integers(0, 5), unique=True))
def test_any_event_order_counts_as_a_recount_of_sets(
    log: list[tuple[str, str, int]], names: list[int]
) -> None:
    residency = Residency(PAGE)
    residency.track("a", chain(*names))
    tiers: dict[str, set[int]] = {"l1": set(), "l2": set(), "l3": set()}
    for kind, tier, name in log:
        residency.apply(kind, tier, page(name))
        if kind == "moved":
            for members in tiers.values():
                members.discard(name)
        if kind == "removed":
            tiers[tier].discard(name)
        else:
            tiers[tier].add(name)
    head: list[int] = []
    for name in names:
        if not any(name in members for members in tiers.values()):
            break
        head.append(name)
    wanted = {tier: PAGE * len(members & set(head)) for tier, members in tiers.items()}
    assert residency.tokens("a") == TierTokens(**wanted)
    assert residency.num_pages == len(set().union(*tiers.values()))


def test_cost_adds_up_bytes_times_seconds() -> None:
    cost = TierCost().plus(TierTokens(l1=100), 10, 5_000)
    assert cost == TierCost(sampled_at_ms=5_000)
    cost = cost.plus(TierTokens(l1=100, l3=50), 10, 7_000)
    assert (cost.l1_byte_s, cost.l2_byte_s, cost.l3_byte_s) == (2_000.0, 0.0, 1_000.0)
    assert cost.plus(TierTokens(l1=100), 10, 6_000) == cost
