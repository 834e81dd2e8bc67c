# SPDX-License-Identifier: Apache-2.0
"""A prompt that has the engine to itself gets larger steps; whoever runs or waits beside it, in
whatever state, makes them the usual ones again."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, lone_tokens
from tests.scheduler.test_overlapped_loads import lower
from tests.scheduler.test_overlapped_loads import make as make_loading
from tests.scheduler.test_planning import make_harness
from tests.scheduler.test_short_prefills import lens_of, prompt, step
from tests.scheduler.test_tiers import make as make_tiers
from tests.scheduler.test_tiers import settle

BUDGET, LONE = 16, 40


def make(**options: object) -> Harness:
    return make_harness(**{"token_budget": BUDGET, "lone_token_budget": LONE, **options})  # type: ignore[arg-type]


def test_a_lone_prompt_has_larger_steps_from_its_first_one_on() -> None:
    harness = make()
    job = harness.submit(prompt(1, 100), max_new=3)
    sizes = [sum(step(harness).values()) for _ in range(5)]
    assert sizes == [LONE, LONE, 100 - 2 * LONE, 1, 1]
    assert job.outputs == harness.model.generate(job)


@pytest.mark.parametrize("lone", [0, 1, BUDGET - 1, BUDGET])
def test_no_more_than_the_budget_is_the_budget(lone: int) -> None:
    harness = make(lone_token_budget=lone)
    harness.submit(prompt(1, 2 * BUDGET), max_new=1)
    assert [len(harness.step().input_ids) for _ in range(2)] == [BUDGET, BUDGET]


def test_who_comes_shrinks_the_next_step_and_who_ends_widens_it() -> None:
    harness = make()
    long = harness.submit(prompt(1, 250), max_new=1)
    assert step(harness) == {long.request_id: LONE}
    stream = harness.submit([1, 2], max_new=2)
    assert step(harness) == {long.request_id: BUDGET - 2, stream.request_id: 2}
    assert step(harness) == {long.request_id: BUDGET - 1, stream.request_id: 1}
    assert step(harness) == {long.request_id: LONE}
    harness.run()
    assert long.outputs == harness.model.generate(long)


def test_a_step_planned_ahead_is_larger_only_as_long_as_nobody_has_come() -> None:
    harness = make()
    long = harness.submit(prompt(1, 250), max_new=1)
    assert [lens_of(harness.plan()) for _ in range(2)] == [{long.request_id: LONE}] * 2
    harness.commit()
    harness.submit([1, 2], max_new=1)
    assert sum(lens_of(harness.plan()).values()) == BUDGET
    harness.commit()
    harness.commit()
    harness.run()


def a_stream(harness: Harness) -> None:
    harness.submit([1, 2], max_new=50)
    harness.step()


def a_stream_that_waits_for_its_drafts(harness: Harness) -> None:
    stream = harness.submit([1, 2], max_new=50, num_draft_tokens=2)
    while not stream.outputs:
        harness.step()
    harness.plan()  # no row of the stream is planned behind this one


def a_long_prompt(harness: Harness) -> None:
    harness.submit(prompt(2, 90), max_new=1)


def one_that_has_no_slot(harness: Harness) -> None:
    a_stream(harness)  # with the prompt it takes both slots
    harness.submit(prompt(3, 50), max_new=1)


def a_remote_prompt(harness: Harness) -> None:
    harness.submit(prompt(4, 20), max_new=1, remote_prefill=True)
    assert harness.plan().step_id == -1


@pytest.mark.parametrize(
    "other",
    [
        a_stream,
        a_stream_that_waits_for_its_drafts,
        a_long_prompt,
        one_that_has_no_slot,
        a_remote_prompt,
    ],
)
def test_beside_anybody_a_step_is_the_usual_one(other: object) -> None:
    harness = make(max_slots=2, overlap=True)
    other(harness)  # type: ignore[operator]
    job = harness.submit(prompt(1, 100), max_new=1)
    sizes = [len(harness.step().input_ids) for _ in range(3)]
    assert job.ended is None and 0 < max(sizes) <= BUDGET


@pytest.mark.parametrize("shared", [8, 48])
def test_who_waits_for_the_prompt_itself_is_somebody(shared: int) -> None:
    harness = make()
    long = harness.submit(prompt(1, 200), max_new=1)
    assert step(harness) == {long.request_id: LONE}
    harness.submit([*prompt(1, 200)[: LONE + shared], 9, 9], max_new=1)
    assert sum(step(harness).values()) == BUDGET
    harness.run()


def test_who_waits_for_pages_of_a_lower_tier_is_somebody() -> None:
    """It is admitted when they are there, which may be before the next step is over."""
    harness = make_tiers(num_pages=80, max_context_len=200, lone_token_budget=LONE)
    lower(harness, prompt(2, 20))
    assert harness.mover is not None
    harness.mover.delay = 1.0  # nothing arrives
    harness.submit([*prompt(2, 20), 7], 1)
    assert harness.step().step_id == -1
    long = harness.submit(prompt(1, 150), 1)
    assert step(harness) == {long.request_id: BUDGET}
    harness.mover.delay = 0.0
    harness.run()
    settle(harness)


def test_a_request_that_runs_while_it_loads_is_somebody_and_may_be_the_lone_one() -> None:
    for is_lone in (True, False):
        harness = make_loading(num_pages=80, max_context_len=200, lone_token_budget=LONE)
        lower(harness, prompt(2, 20))
        assert harness.mover is not None
        harness.mover.delay = 1.0
        loading = harness.submit([*prompt(2, 20), *prompt(3, 100)], 1)
        if not is_lone:
            harness.submit(prompt(1, 150), 1)
        plan = harness.plan()
        assert plan.row_loads[0, 0] >= 0 and plan.row_request_ids[0] == loading.request_id
        assert len(plan.input_ids) == (LONE if is_lone else BUDGET)
        harness.mover.delay = 0.0
        harness.commit()
        harness.run()
        assert loading.outputs == harness.model.generate(loading)


def test_one_that_gave_way_waits_again_and_is_somebody() -> None:
    harness = make(num_pages=30, max_context_len=120)
    first = harness.submit(prompt(1, 60), max_new=40)
    step(harness)
    second = harness.submit(prompt(2, 50), max_new=40)
    while not second.admissions:
        harness.step()
    urgent = harness.submit(prompt(3, 100), max_new=1, priority=-1)
    while not urgent.admissions:
        harness.step()
    assert len(first.admissions) + len(second.admissions) == 2
    for _ in range(3):
        assert sum(lens_of(harness.step()).values()) <= BUDGET
    harness.run()


def test_far_behind_a_step_holds_less_so_that_it_takes_no_longer() -> None:
    """A token costs 1 + start / attention_len of the first one: 2.5 at one and a half of that."""
    harness = make(max_context_len=800, attention_len=100, lone_token_budget=60)
    job = harness.submit(prompt(1, 790), max_new=1)
    sizes: list[tuple[int, int]] = []
    while job.ended is None:
        plan = harness.step()
        sizes.append((int(plan.row_starts[0]), len(plan.input_ids)))
    assert sizes[3:8] == [(180, 53), (233, 45), (278, 39), (317, 35), (352, 33)]
    assert all(num == min(60, 150 * 100 // (100 + start)) for start, num in sizes[:-1])
    assert sizes[-2][1] > BUDGET


@pytest.mark.parametrize("seed", range(30))
def test_every_step_is_as_large_as_who_is_there_allows(seed: int) -> None:
    """Against a model that knows only who has come and who has ended."""
    rng = random.Random(seed)
    config = cpp.SchedulerConfig(
        page_size=4,
        num_pages=2000,
        max_slots=rng.choice([1, 2, 4]),
        max_context_len=400,
        token_budget=rng.choice([8, 16]),
        lone_token_budget=rng.choice([12, 40, 64]),
        attention_len=rng.choice([50, 32768]),
    )
    harness = Harness(config)
    num_wide = num_usual = 0
    for _ in range(150):
        if rng.random() < 0.08:
            fresh = prompt(rng.randrange(10**6), rng.randrange(2, 300))
            harness.submit(fresh, rng.randrange(1, 6))
        there = set(harness.live)
        plan = harness.plan()
        if plan.step_id < 0:
            continue
        if len(there) == 1:
            (job,) = (harness.jobs[each] for each in there)
            start = int(plan.row_starts[0])
            rest = len(job.prompt) - start
            expected = 1 if rest <= 0 else min(rest, lone_tokens(config, start))
            assert plan.row_lens.tolist() == [expected]
            num_wide += expected > config.token_budget
        else:
            assert len(plan.input_ids) <= config.token_budget
            num_usual += 1
        harness.commit()
    harness.run()
    assert num_wide + num_usual > 0
    for job in harness.jobs.values():
        assert job.outputs == harness.model.generate(job)


def test_a_larger_step_finds_its_pages_where_every_other_page_is_cached() -> None:
    harness = make(num_pages=30, max_context_len=110)
    for seed in range(3):
        job: Job = harness.submit(prompt(seed, 100), max_new=1)
        assert sum(step(harness).values()) == LONE
        harness.run()
        assert job.outputs == harness.model.generate(job)
    stats = harness.check()
    assert stats["evicted_pages"] > 0 and stats["retractions"] == 0


def test_the_setting_is_the_schedulers_own() -> None:
    config = cpp.SchedulerConfig(
        num_pages=10, max_slots=1, max_context_len=100, lone_token_budget=np.int32(1 << 20)
    )
    assert config.lone_token_budget == 1 << 20
