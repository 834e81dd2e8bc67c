# SPDX-License-Identifier: Apache-2.0
"""Who gives way when pages or places run out: by class, then by value; and that nobody starves."""

from __future__ import annotations

import random

import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, TierMover, ToyModel, random_tokens


def make(overlap: bool = False, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=4, num_pages=30, max_slots=4, max_context_len=120, token_budget=64
    )
    return Harness(
        cpp.SchedulerConfig(**{**settings, **options}),  # type: ignore[arg-type]
        ToyModel(),
        overlap=overlap,
    )


def first_to_give_way(harness: Harness) -> Job:
    """Run until somebody is retracted."""
    while harness.live:
        plan = harness.step()
        if plan.retracted:
            return harness.jobs[plan.retracted[0]]
    raise AssertionError("nobody gave way")


def test_a_worse_class_gives_way_first_whatever_it_is_worth() -> None:
    harness = make(ageing_ms=1)  # running order is that of arrival
    rng = random.Random(1)
    harness.submit(random_tokens(rng, 20), 60)
    dear = harness.submit(random_tokens(rng, 30), 60, priority=1, expected_return=1.0)
    harness.now_ms += 5
    harness.submit(random_tokens(rng, 9), 60, expected_return=0.0)
    assert first_to_give_way(harness) is dear


def test_within_a_class_the_one_least_likely_to_be_continued_gives_way() -> None:
    harness = make()
    rng = random.Random(2)
    harness.submit(random_tokens(rng, 20), 60)
    fleeting = harness.submit(random_tokens(rng, 20), 60, expected_return=0.1)
    harness.submit(random_tokens(rng, 20), 60, expected_return=0.9)
    assert first_to_give_way(harness) is fleeting


def test_the_longest_is_not_the_victim_when_it_is_the_dearest_to_recompute() -> None:
    harness = make(attention_len=16)
    rng = random.Random(3)
    harness.submit(random_tokens(rng, 4), 80)
    short = harness.submit(random_tokens(rng, 8), 80)
    longest = harness.submit(random_tokens(rng, 60), 40)
    victim = first_to_give_way(harness)
    assert victim is short and len(longest.prompt) > len(short.prompt)


def test_the_last_in_running_order_stays_if_another_is_worth_less() -> None:
    harness = make()
    rng = random.Random(4)
    harness.submit(random_tokens(rng, 20), 60)
    middle = harness.submit(random_tokens(rng, 20), 60, expected_return=0.0)
    harness.now_ms += 1
    harness.submit(random_tokens(rng, 20), 60)
    assert first_to_give_way(harness) is middle


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_is_the_victim_for_ever(overlap: bool) -> None:
    harness = make(overlap, num_pages=16, max_context_len=64)
    rng = random.Random(5)
    jobs = [
        harness.submit(random_tokens(rng, 9), 50, expected_return=share)
        for share in (0.5, 0.0, 0.5, 0.5)
    ]
    harness.run()
    assert all(job.outputs == harness.model.generate(job) for job in jobs)
    assert harness.num_retracted > 2
    assert sum(len(job.admissions) > 1 for job in jobs) > 1, "the load is shared"


def test_a_victim_goes_on_from_its_pages_in_l2() -> None:
    harness = make(num_l2_pages=60, max_slots=2, num_pages=20, max_context_len=80)
    harness.mover = TierMover(harness.config, harness.device, random.Random(1))
    harness.mover.delay = 0.0
    rng = random.Random(6)
    first = harness.submit(random_tokens(rng, 24), 50)
    second = harness.submit(random_tokens(rng, 24), 50)
    assert first_to_give_way(harness) is second
    while first.ended is None:
        harness.step()
    harness.run()
    length, cached = second.admissions[1]
    assert cached == (length - 1) // 4 * 4, "all its full pages were kept"
    assert harness.check()["l2_cached_prompt_tokens"] > 0
    assert second.outputs == harness.model.generate(second)


# ---- a better class takes a place ----------------------------------------------------------------


def test_an_urgent_request_takes_the_place_of_one_of_a_worse_class() -> None:
    harness = make(max_slots=1)
    background = harness.submit([1, 2, 3], 60, priority=1)
    for _ in range(5):
        harness.step()
    urgent = harness.submit([7, 8, 9], 4, priority=0)
    for _ in range(8):
        harness.step()
    assert urgent.ended is not None and background.ended is None
    harness.run()
    assert background.outputs == harness.model.generate(background)
    assert harness.check()["preemptions"] == 1


def test_an_equal_class_waits_its_turn() -> None:
    harness = make(max_slots=1)
    harness.submit([1, 2, 3], 20)
    harness.step()
    harness.submit([7, 8, 9], 4)
    harness.run()
    assert harness.check()["preemptions"] == 0


def test_who_waited_long_enough_is_not_displaced() -> None:
    harness = make(max_slots=1, ageing_ms=1000)
    old = harness.submit([1, 2, 3], 20, priority=1)
    harness.step()
    harness.now_ms += 1001  # worth one class
    harness.submit([7, 8, 9], 4, priority=0)
    harness.run()
    assert len(old.admissions) == 1


def test_an_urgent_request_takes_as_many_pages_as_it_needs_and_no_more() -> None:
    harness = make(num_pages=30, max_slots=8)
    rng = random.Random(7)
    crowd = [harness.submit(random_tokens(rng, 20), 30, priority=1) for _ in range(3)]
    while any(not job.outputs for job in crowd):
        harness.step()
    urgent = harness.submit(random_tokens(rng, 40), 4, priority=0)
    for _ in range(4):
        harness.step()
    assert urgent.admissions and 1 <= harness.check()["preemptions"] <= 2
    harness.run()
    assert all(job.outputs == harness.model.generate(job) for job in [*crowd, urgent])


def test_a_request_is_displaced_no_more_than_so_often() -> None:
    harness = make(max_slots=1, max_preemptions=2)
    background = harness.submit([1, 2, 3], 40, priority=1)
    for i in range(12):
        harness.step()
        harness.submit([i, 50, 51], 2, priority=0)
        for _ in range(3):
            harness.step()
    harness.run()
    assert len(background.admissions) == 3
    assert harness.check()["preemptions"] == 2


def test_preemption_can_be_turned_off() -> None:
    harness = make(max_slots=1, max_preemptions=0)
    background = harness.submit([1, 2, 3], 20, priority=1)
    harness.step()
    urgent = harness.submit([7, 8, 9], 4, priority=0)
    harness.run()
    assert len(background.admissions) == 1
    assert harness.admitted_at[urgent.request_id] > 10


def test_tenants_keep_their_shares_though_one_of_them_is_always_urgent() -> None:
    harness = make(max_slots=1, num_pages=200, token_budget=64)
    rng = random.Random(9)
    loud = [
        harness.submit(random_tokens(rng, 30), 2, tenant="loud", priority=-1) for _ in range(40)
    ]
    calm = [harness.submit(random_tokens(rng, 30), 2, tenant="calm", priority=1) for _ in range(20)]
    while any(job.ended is None for job in calm):
        harness.now_ms += 1
        harness.step()
    share = sum(job.ended is not None for job in loud) / len(calm)
    assert 0.7 < share < 1.5, "each tenant gets half of the tokens, whatever its class"
    harness.run()


@pytest.mark.parametrize("seed", range(30))
def test_random_classes_and_returns_never_stop_anybody(seed: int) -> None:
    rng = random.Random(seed)
    config = cpp.SchedulerConfig(
        page_size=2,
        num_pages=rng.choice([10, 20]),
        max_slots=rng.choice([1, 2, 4]),
        max_context_len=36,
        token_budget=rng.choice([3, 16]),
        lone_token_budget=seed % 3 * 12,
        ageing_ms=rng.choice([1, 50, 10_000]),
        max_preemptions=rng.choice([1, 3]),
        num_l2_pages=rng.choice([0, 12]),
    )
    harness = Harness(config, ToyModel(3), overlap=rng.random() < 0.5)
    if config.num_l2_pages:
        harness.mover = TierMover(config, harness.device, rng)
    most = min(36, config.num_pages * 2) - 12
    for _ in range(250):
        harness.now_ms += 1
        if rng.random() < 0.3 and len(harness.live) < 10:
            harness.submit(
                random_tokens(rng, rng.randrange(1, 12), 3),
                rng.randrange(1, most),
                priority=rng.randrange(-1, 3),
                expected_return=rng.random(),
                tenant=rng.choice("ab"),
            )
        harness.step()
        harness.check()
    harness.run()
    assert all(job.outputs == harness.model.generate(job) for job in harness.jobs.values())
