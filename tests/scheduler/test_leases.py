# SPDX-License-Identifier: Apache-2.0
"""Leases and hints: what stays when memory runs short, and that neither can stop anybody."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, random_tokens

PAGE = 4


def make_harness(overlap: bool = False, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=PAGE, num_pages=40, max_slots=4, max_context_len=160, token_budget=32
    )
    return Harness(cpp.SchedulerConfig(**{**settings, **options}), overlap=overlap)


def finish(harness: Harness, length: int, seed: int, **options: object) -> Job:
    harness.now_ms += 1
    job = harness.submit(random_tokens(random.Random(seed), length), 1, **options)
    harness.run()
    return job


def lease(harness: Harness, job: Job, lease_id: int, until_ms: int = 10**6) -> cpp.LeaseGrant:
    return harness.scheduler.lease(
        lease_id=lease_id,
        token_ids=np.array(job.prompt + job.outputs, np.int32),
        until_ms=until_ms,
        tenant=job.tenant,
        salt=job.salt,
    )


def hit(harness: Harness, job: Job) -> int:
    return harness.scheduler.query_prefix(np.array(job.prompt, np.int32), job.salt).l1


def events(harness: Harness) -> list[tuple[int, str, int]]:
    return [(e.lease_id, e.kind, e.num_tokens) for e in harness.scheduler.drain_lease_events()]


def test_a_leased_prefix_outlives_more_recent_ones() -> None:
    harness = make_harness()
    kept = finish(harness, 18, seed=1)
    grant = lease(harness, kept, 7)
    assert (grant.state, grant.tokens_requested, grant.tokens_granted) == ("granted", 19, 18)
    for seed in range(2, 12):
        other = finish(harness, 40, seed=seed)
    assert hit(harness, kept) == 18
    assert hit(harness, other) == 40
    assert harness.check()["leased_pages"] == 5
    assert events(harness) == []


def test_a_lease_ends_at_its_deadline() -> None:
    harness = make_harness()
    kept = finish(harness, 18, seed=1)
    lease(harness, kept, 7, until_ms=harness.now_ms + 5)
    harness.now_ms += 4
    harness.plan()
    assert events(harness) == [] and harness.check()["leases"] == 1
    harness.now_ms += 1
    harness.plan()
    assert events(harness) == [(7, "expired", 0)]
    stats = harness.check()
    assert stats["leases"] == stats["leased_pages"] == 0
    assert lease(harness, kept, 8, until_ms=harness.now_ms).reason == "expired"


def test_a_lease_of_the_same_id_replaces_the_first() -> None:
    harness = make_harness()
    kept = finish(harness, 18, seed=1)
    lease(harness, kept, 7, until_ms=harness.now_ms + 5)
    lease(harness, kept, 7, until_ms=harness.now_ms + 50)
    harness.now_ms += 20
    harness.plan()
    assert harness.check()["leases"] == 1
    assert harness.scheduler.release(7)
    assert not harness.scheduler.release(7)
    assert harness.check()["leased_pages"] == 0


def test_over_budget_a_lease_is_clipped_from_its_end_then_queued() -> None:
    harness = make_harness()  # 40 pages, so 20 of them may be leased
    first, second, third = (finish(harness, 48, seed=seed) for seed in (1, 2, 3))
    assert lease(harness, first, 1).state == "granted"  # 12 pages
    clipped = lease(harness, second, 2)
    assert (clipped.state, clipped.tokens_granted, clipped.reason) == ("clipped", 32, "budget")
    queued = lease(harness, third, 3)
    assert (queued.state, queued.tokens_granted, queued.reason) == ("queued", 0, "budget")
    harness.plan()
    assert events(harness) == []
    harness.scheduler.release(1)
    harness.plan()
    assert events(harness) == [(3, "granted", 48)]
    assert harness.check()["leased_pages"] == 20


def test_pages_that_two_leases_share_are_counted_once() -> None:
    harness = make_harness()
    stem = finish(harness, 48, seed=1)
    fork = harness.submit(stem.prompt[:40] + random_tokens(random.Random(5), 20), 1)
    harness.run()
    lease(harness, stem, 1)
    assert lease(harness, fork, 2).state == "granted"
    assert harness.check()["leased_pages"] == 12 + 5
    harness.scheduler.release(1)
    assert harness.check()["leased_pages"] == 15


def test_several_tenants_each_have_a_share_of_the_budget() -> None:
    harness = make_harness(num_pages=80)
    mine = finish(harness, 96, seed=1, tenant="mine")  # 24 pages: more than a quarter of 80
    theirs = finish(harness, 8, seed=2, tenant="theirs")
    assert lease(harness, mine, 1).state == "granted"  # alone, it has all of the budget
    lease(harness, theirs, 2)
    again = lease(harness, mine, 1)
    assert (again.state, again.tokens_granted, again.reason) == ("clipped", 80, "tenant_budget")


def test_a_prefix_that_is_not_cached_is_not_leased() -> None:
    harness = make_harness()
    job = finish(harness, 16, seed=1)
    cold = Job(99, random_tokens(random.Random(9), 12), 1)
    grant = lease(harness, cold, 1)
    assert (grant.state, grant.reason) == ("denied", "not_resident")
    longer = Job(98, job.prompt + [1, 2, 3, 4, 5], 1)
    grant = lease(harness, longer, 2)
    assert (grant.state, grant.tokens_granted, grant.reason) == ("clipped", 16, "not_resident")


def test_the_next_turn_leaves_the_leased_end_in_place() -> None:
    harness = make_harness()
    job = finish(harness, 18, seed=1)
    lease(harness, job, 7)
    turn = harness.submit(job.prompt + job.outputs + [3, 4, 5], 6)
    plan = harness.plan()
    assert plan.row_starts.tolist() == [18]
    assert len(plan.page_copies) == 1, "the leased page is copied, not taken"
    harness.commit()
    harness.run()
    assert turn.outputs == harness.model.generate(turn)
    assert hit(harness, job) == 18
    assert harness.check()["leased_pages"] == 5


def test_a_request_that_needs_the_whole_pool_breaks_leases_and_says_so() -> None:
    harness = make_harness(lease_percent=100)
    kept = [finish(harness, 40, seed=seed) for seed in (1, 2)]
    for lease_id, job in enumerate(kept):
        assert lease(harness, job, lease_id).state == "granted"
    big = harness.submit(random_tokens(random.Random(3), 150), 8)
    harness.run()
    assert big.outputs == harness.model.generate(big)
    kinds = {(lease_id, kind) for lease_id, kind, _ in events(harness)}
    assert kinds <= {(0, "revoked"), (1, "revoked")} and kinds
    harness.check()


def test_admission_waits_for_others_rather_than_break_a_lease() -> None:
    harness = make_harness(lease_percent=100)
    kept = finish(harness, 60, seed=1)  # 15 pages
    lease(harness, kept, 1)
    running = harness.submit(random_tokens(random.Random(2), 60), 20)
    harness.step()
    harness.step()
    waiting = harness.submit(random_tokens(random.Random(3), 40), 1)
    harness.step()
    assert waiting.admissions == []
    harness.run()
    assert waiting.admissions and running.ended is not None
    assert hit(harness, kept) == 60
    assert events(harness) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_with_leases_for_twice_the_pool_every_turn_still_completes(overlap: bool) -> None:
    harness = make_harness(overlap, lease_percent=100)
    rng = random.Random(11)
    sessions: list[list[int]] = [random_tokens(rng, 24) for _ in range(12)]
    for turn in range(4):
        jobs = [harness.submit(sequence, 6) for sequence in sessions]
        harness.run()
        for index, job in enumerate(jobs):
            assert job.outputs == harness.model.generate(job), f"turn {turn}"
            lease(harness, job, index)
            sessions[index] = job.prompt + job.outputs + random_tokens(rng, 3)
        harness.check()
    assert any(kind == "revoked" for _, kind, _ in events(harness))


def test_what_is_likely_to_come_back_is_kept_longer() -> None:
    harness = make_harness()
    closed = finish(harness, 60, seed=1)
    tool_gap = finish(harness, 60, seed=2)
    harness.scheduler.hint_prefix(np.array(tool_gap.prompt, np.int32), 1.0)
    assert harness.scheduler.hint_prefix(np.array(closed.prompt, np.int32), 0.0) == 60
    finish(harness, 60, seed=3)
    assert hit(harness, closed) == 40  # just the pages that were needed
    assert hit(harness, tool_gap) == 60


def test_a_request_says_itself_how_likely_it_comes_back() -> None:
    harness = make_harness()
    rng = random.Random(0)
    jobs = []
    for request_id, expected_return in enumerate([0.9, 0.1]):
        tokens = np.array(random_tokens(rng, 60), np.int32)
        spec = cpp.RequestSpec(
            request_id=1000 + request_id,
            token_ids=tokens,
            max_new_tokens=1,
            expected_return=expected_return,
        )
        harness.scheduler.submit([spec])
        job = Job(1000 + request_id, tokens.tolist(), 1)
        harness.jobs[job.request_id] = job
        harness.live.add(job.request_id)
        harness.now_ms += 1
        harness.run()
        jobs.append(job)
    finish(harness, 60, seed=3)
    assert hit(harness, jobs[0]) == 60
    assert hit(harness, jobs[1]) < 60


def test_deep_pages_cost_more_to_recompute_and_stay_longer() -> None:
    def survivor(policy: str) -> tuple[int, int]:
        harness = make_harness(eviction=policy, attention_len=16)
        deep = finish(harness, 100, seed=1)
        shallow = finish(harness, 20, seed=2)
        for seed in (3, 4, 5):
            finish(harness, 20, seed=seed)
        return hit(harness, deep), hit(harness, shallow)

    assert survivor("value") == (100, 0)
    assert survivor("lru") == (80, 20)


def test_unused_deep_pages_age_away_all_the_same() -> None:
    harness = make_harness(attention_len=16)
    deep = finish(harness, 100, seed=1)
    for seed in range(2, 60):
        finish(harness, 20, seed=seed)
    assert hit(harness, deep) < 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease_percent": 101}, "lease_percent: 101 is not in"),
        ({"tenant_lease_percent": 200}, "tenant_lease_percent: 200 is not in"),
        ({"eviction": "fifo"}, "eviction: 'fifo' is not in"),
        ({"attention_len": 0}, "attention_len: 0 is not in"),
    ],
)
def test_a_bad_budget_or_policy_names_its_field(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_harness(**options)


def test_bad_leases_and_hints_name_their_field() -> None:
    harness = make_harness()
    tokens = np.array([1, 2], np.int32)
    with pytest.raises(ValueError, match="lease_id: -1"):
        harness.scheduler.lease(lease_id=-1, token_ids=tokens, until_ms=9)
    with pytest.raises(ValueError, match="token_ids: is empty"):
        harness.scheduler.lease(lease_id=1, token_ids=tokens[:0], until_ms=9)
    with pytest.raises(ValueError, match="tier: 'l9'"):
        harness.scheduler.lease(lease_id=1, token_ids=tokens, until_ms=9, tier="l9")
    with pytest.raises(ValueError, match="expected_return: 1.5"):
        harness.scheduler.hint_prefix(tokens, 1.5)
