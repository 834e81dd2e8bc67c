# SPDX-License-Identifier: Apache-2.0
"""Leases in L2 and L3, and what becomes of a lease that memory above cannot keep."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, TierMover, ToyModel, random_tokens

PAGE = 4
FOREVER = 10**9


def make(overlap: bool = False, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=PAGE,
        num_pages=20,
        max_slots=2,
        max_context_len=80,
        token_budget=32,
        num_l2_pages=40,
        use_l3=True,
    )
    config = cpp.SchedulerConfig(**{**settings, **options})  # type: ignore[arg-type]
    harness = Harness(config, ToyModel(), overlap=overlap)
    harness.mover = TierMover(config, harness.device, random.Random(1))
    harness.mover.delay = 0.0
    return harness


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def finish(harness: Harness, length: int, base: int, **options: object) -> Job:
    harness.now_ms += 1
    job = harness.submit(list(range(base, base + length)), 1, **options)
    harness.run()
    for _ in range(8):
        harness.step()
    harness.check()
    return job


def lease(
    harness: Harness, job: Job, lease_id: int, tier: str, until_ms: int = FOREVER
) -> tuple[str, int, str]:
    grant = harness.scheduler.lease(
        lease_id=lease_id,
        token_ids=ids(job.prompt + job.outputs),
        until_ms=until_ms,
        tenant=job.tenant,
        tier=tier,
    )
    return grant.state, grant.tokens_granted, grant.reason


def hit(harness: Harness, job: Job) -> tuple[int, int, int]:
    found = harness.scheduler.query_prefix(ids(job.prompt))
    return found.l1, found.l2, found.l3


def events(harness: Harness) -> list[tuple[int, str, int]]:
    return [(e.lease_id, e.kind, e.num_tokens) for e in harness.scheduler.drain_lease_events()]


def test_a_lease_in_l2_outlives_whatever_comes_to_l2_later() -> None:
    harness = make(num_l2_pages=10, use_l3=False)
    kept = finish(harness, 20, 0)
    assert lease(harness, kept, 1, "l2") == ("granted", 20, "")
    for base in range(100, 600, 100):
        finish(harness, 24, base)
    harness.scheduler.move(ids(kept.prompt), "l2")
    assert hit(harness, kept) == (0, 20, 0)
    assert harness.check()["leased_l2_pages"] == 5
    assert events(harness) == []


def test_when_it_ends_its_pages_are_evicted_like_any_other() -> None:
    harness = make(num_l2_pages=10, use_l3=False)
    kept = finish(harness, 20, 0)
    lease(harness, kept, 1, "l2", until_ms=harness.now_ms + 5)
    harness.now_ms += 5
    harness.step()
    assert events(harness) == [(1, "expired", 0)]
    for base in range(100, 600, 100):
        finish(harness, 24, base)
    assert hit(harness, kept) == (0, 0, 0)
    assert harness.check()["leased_l2_pages"] == 0


def test_each_tier_has_a_budget_of_its_own() -> None:
    harness = make(num_pages=40, num_l2_pages=24, num_l3_pages=24)
    first, second, third = (finish(harness, 32, base) for base in (0, 100, 200))
    assert lease(harness, first, 1, "l1")[0] == "granted"
    assert lease(harness, first, 2, "l2") == ("granted", 32, "")  # 8 of 12 pages
    assert lease(harness, second, 3, "l2") == ("clipped", 16, "budget")
    assert lease(harness, third, 4, "l2") == ("queued", 0, "budget")
    assert lease(harness, third, 5, "l3") == ("granted", 32, "")  # of L3's own 12
    harness.scheduler.release(2)
    harness.step()
    assert events(harness) == [(4, "granted", 32)]


def test_tenants_share_a_tier_as_they_share_l1() -> None:
    harness = make(num_l2_pages=40, num_pages=40)
    mine = finish(harness, 48, 0, tenant="mine")
    theirs = finish(harness, 8, 100, tenant="theirs")
    assert lease(harness, mine, 1, "l2")[0] == "granted"  # 12 pages, alone
    lease(harness, theirs, 2, "l2")
    assert lease(harness, mine, 1, "l2") == ("clipped", 40, "tenant_budget")


def test_a_lease_in_l2_sends_down_what_only_l1_has() -> None:
    harness = make(num_l2_pages=10, use_l3=False)
    for base in (100, 200):
        finish(harness, 20, base)
    assert harness.mover is not None
    harness.mover.loss = 1.0
    job = finish(harness, 20, 0)
    assert harness.check()["transfers_lost"] > 0
    harness.mover.loss = 0.0
    assert lease(harness, job, 1, "l2") == ("granted", 20, "")
    for _ in range(4):
        harness.step()
    harness.scheduler.move(ids(job.prompt), "l2")
    assert hit(harness, job) == (0, 20, 0)


def test_a_lease_in_the_store_covers_what_is_stored() -> None:
    harness = make(num_l3_pages=10)
    job = finish(harness, 20, 0)
    assert lease(harness, job, 1, "l3") == ("granted", 20, "")
    for base in range(100, 600, 100):
        finish(harness, 24, base)
    harness.scheduler.move(ids(job.prompt), "l3")
    assert hit(harness, job) == (0, 0, 20)
    harness.scheduler.release(1)
    for base in range(600, 900, 100):
        finish(harness, 24, base)
    assert hit(harness, job) == (0, 0, 0)
    assert harness.check()["cached_l3_pages"] <= 10


def test_under_pressure_a_lease_in_l1_goes_on_in_l2_and_says_so() -> None:
    harness = make(lease_percent=100)
    job = finish(harness, 40, 0)
    assert lease(harness, job, 1, "l1") == ("granted", 40, "")
    big = harness.submit(list(range(100, 170)), 8)
    harness.run()
    assert big.outputs == harness.model.generate(big)
    assert events(harness) == [(1, "demoted", 40)]
    assert sum(hit(harness, job)) == 40
    stats = harness.check()
    assert (stats["leased_pages"], stats["leased_l2_pages"]) == (0, 10)
    harness.scheduler.move(ids(job.prompt), "none")
    assert sum(hit(harness, job)) == 40, "leased pages are not forgotten"


def test_what_l2_has_no_budget_for_is_revoked() -> None:
    harness = make(lease_percent=100, num_l2_pages=10)
    other = finish(harness, 40, 0)
    assert lease(harness, other, 1, "l2")[0] == "granted"
    job = finish(harness, 40, 100)
    assert lease(harness, job, 2, "l1")[0] == "granted"
    harness.submit(list(range(200, 270)), 8)
    harness.run()
    kinds = [(lease_id, kind) for lease_id, kind, _ in events(harness)]
    assert kinds and set(kinds) == {(2, "revoked")}


def test_a_page_lost_below_cuts_the_lease_and_says_so() -> None:
    harness = make(use_l3=False)
    job = finish(harness, 20, 0)
    lease(harness, job, 1, "l2")
    harness.scheduler.move(ids(job.prompt), "l2")
    assert harness.mover is not None
    carry_out, seen = harness.mover.carry_out, [0]

    def lose_the_third(move: list[int], name: bytes) -> bool:
        seen[0] += 1
        return seen[0] != 3 and carry_out(move, name)

    harness.mover.carry_out = lose_the_third  # type: ignore[method-assign]
    again = harness.submit([*job.prompt, 7], 3)
    harness.run()
    assert again.outputs == harness.model.generate(again)
    told = events(harness)
    assert len(told) == 1 and told[0][:2] == (1, "revoked") and told[0][2] < 20
    assert harness.check()["leased_l2_pages"] == told[0][2] // PAGE


def test_a_lease_in_a_tier_there_is_not_is_refused() -> None:
    harness = make(num_l2_pages=0, use_l3=False)
    with pytest.raises(ValueError, match="tier: 'l2' needs num_l2_pages > 0"):
        harness.scheduler.lease(lease_id=1, token_ids=ids([1]), until_ms=9, tier="l2")
    harness = make(use_l3=False)
    with pytest.raises(ValueError, match="tier: 'l3' needs use_l3"):
        harness.scheduler.lease(lease_id=1, token_ids=ids([1]), until_ms=9, tier="l3")


@pytest.mark.parametrize("seed", range(24))
def test_leases_for_twice_every_pool_never_stop_a_turn(seed: int) -> None:
    """Sessions lease all they have in a tier of their choice; each turn must end, and right."""
    rng = random.Random(seed)
    num_pages, num_l2_pages = rng.choice([12, 20]), rng.choice([0, 8, 30])
    use_l3 = num_l2_pages > 0 and rng.random() < 0.6
    tiers = ["l1"] + ["l2"] * (num_l2_pages > 0) + ["l3"] * use_l3
    harness = make(
        rng.random() < 0.5,
        num_pages=num_pages,
        max_context_len=num_pages * PAGE,
        max_slots=rng.choice([1, 2, 4]),
        num_l2_pages=num_l2_pages,
        use_l3=use_l3,
        num_l3_pages=rng.choice([10, 1000]),
        lease_percent=100,
        tenant_lease_percent=rng.choice([25, 100]),
    )
    if not num_l2_pages:
        harness.mover = None
    elif harness.mover is not None:
        harness.mover.delay = rng.choice([0.0, 0.6])
        harness.mover.loss = rng.choice([0.0, 0.1])
    longest = num_pages * PAGE - 8
    sessions = [random_tokens(rng, rng.randrange(8, longest // 2)) for _ in range(8)]
    asked = 0
    for _ in range(12):
        chosen = rng.sample(range(len(sessions)), 4)
        jobs = [(i, harness.submit(sessions[i], rng.randrange(1, 7))) for i in chosen]
        harness.run()
        for i, job in jobs:
            assert job.outputs == harness.model.generate(job)
            sequence = job.prompt + job.outputs
            asked += -(-len(sequence) // PAGE)
            harness.scheduler.lease(
                lease_id=i if rng.random() < 0.7 else i + 100,
                token_ids=ids(sequence),
                until_ms=harness.now_ms + rng.choice([30, FOREVER]),
                tenant=rng.choice("ab"),
                tier=rng.choice(tiers),
            )
            sessions[i] = (sequence + random_tokens(rng, 3))[:longest]
            if rng.random() < 0.2:
                harness.scheduler.move(ids(sequence), rng.choice(["l1", "l2", "none"]))
        harness.check()
    assert asked > 2 * num_pages
