# SPDX-License-Identifier: Apache-2.0
"""While memory is short, streams have some steps to each one with a long prompt: they end sooner,
and the next turn finds room. Long prompts go on nevertheless, in every step where no stream runs.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, random_tokens
from tests.scheduler.test_short_prefills import lens_of, prompt, step

PAGE = 16
BUDGET = 32
NUM_PAGES = 40
STREAM_STEPS = 3  # Scheduler::kStreamSteps
# A stream within its first page holds that page and is promised one more; a long prompt holds or is
# promised its pages and one more. So `NUM_PAGES - 2 - (pages + 1)` are spare, and a quarter is 10.
LONGEST_THAT_LEAVES_A_QUARTER = NUM_PAGES - 3 - NUM_PAGES // 4


def make(overlap: bool = False, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=PAGE, num_pages=NUM_PAGES, max_slots=8, max_context_len=600, token_budget=BUDGET
    )
    return Harness(
        cpp.SchedulerConfig(**{**settings, **options}),  # type: ignore[arg-type]
        overlap=overlap,
    )


def stream_and_long(harness: Harness, num_pages: int) -> tuple[Job, Job]:
    stream = harness.submit([1, 2], max_new=100)
    harness.step()
    return stream, harness.submit(prompt(1, num_pages * PAGE), max_new=1)


@pytest.mark.parametrize(
    ("options", "num_pages", "is_short"),
    [
        ({}, LONGEST_THAT_LEAVES_A_QUARTER, False),
        ({}, LONGEST_THAT_LEAVES_A_QUARTER + 1, True),
        ({"spare_percent": 0}, NUM_PAGES - 5, False),
        ({"spare_percent": 100}, 3, True),
    ],
)
def test_with_less_than_a_share_spare_a_long_prompt_runs_in_every_fourth_step(
    options: dict[str, object], num_pages: int, is_short: bool
) -> None:
    harness = make(**options)
    stream, long = stream_and_long(harness, num_pages)
    both = {long.request_id: BUDGET - 1, stream.request_id: 1}
    for _ in range(2 if num_pages > 8 else 1):
        assert step(harness) == both
        for _ in range(STREAM_STEPS if is_short else 0):
            assert step(harness) == {stream.request_id: 1}
    harness.run()


def test_a_short_prompt_has_such_a_step_for_itself() -> None:
    harness = make()
    stream, long = stream_and_long(harness, 30)
    step(harness)
    short = harness.submit([5] * (BUDGET // 4), max_new=1)
    assert step(harness) == {short.request_id: BUDGET // 4, stream.request_id: 1}
    harness.run()
    assert long.ended is not None


def test_nor_does_another_long_prompt_begin_in_it() -> None:
    harness = make()
    stream, first = stream_and_long(harness, LONGEST_THAT_LEAVES_A_QUARTER + 1)
    assert step(harness) == {first.request_id: BUDGET - 1, stream.request_id: 1}
    second = harness.submit([7] * 40, max_new=1)
    for _ in range(STREAM_STEPS):
        assert step(harness) == {stream.request_id: 1}
    harness.run()
    assert first.ended is not None and second.ended is not None


def test_the_last_piece_of_a_long_prompt_is_a_short_one() -> None:
    harness = make()
    stream = harness.submit([1, 2], max_new=100)
    harness.step()
    long = harness.submit(prompt(1, 15 * (BUDGET - 1) + 5), max_new=1)
    done = 0
    while done < 15 * (BUDGET - 1):
        done += step(harness).get(long.request_id, 0)
    assert step(harness) == {long.request_id: 5, stream.request_id: 1}
    harness.run()
    assert stream.outputs == harness.model.generate(stream)


def test_long_prompts_alone_run_in_every_step() -> None:
    """Nobody else could use it: whatever is spare, no step is left out, and none is part empty."""
    harness = make(spare_percent=100)
    first = harness.submit(prompt(1, 15 * PAGE), max_new=1)
    second = harness.submit(prompt(2, 15 * PAGE), max_new=1)
    total = 0
    while total < 30 * PAGE:
        lens = step(harness)
        assert sum(lens.values()) == min(BUDGET, 30 * PAGE - total)
        total += sum(lens.values())
    assert first.ended is not None and second.ended is not None


def test_a_stream_that_waits_for_its_drafts_keeps_no_step() -> None:
    """Planned behind a step whose results are not in, it has no row there: the long prompt has."""
    harness = make(overlap=True)
    stream = harness.submit([1, 2], max_new=100, num_draft_tokens=2)
    while not stream.outputs:
        harness.step()
    long = harness.submit(prompt(1, 30 * PAGE), max_new=1)
    total = num_steps_of_streams = 0
    while total < len(long.prompt):
        lens = lens_of(harness.step())
        assert long.request_id in lens or stream.request_id in lens
        total += lens.get(long.request_id, 0)
        num_steps_of_streams += long.request_id not in lens
    assert num_steps_of_streams > 0
    harness.run()


def test_what_could_be_evicted_is_spare_and_what_is_leased_is_not() -> None:
    for leased in (False, True):
        harness = make()
        kept = prompt(3, 4 * PAGE)
        harness.submit(kept, max_new=1)
        harness.run()
        if leased:
            grant = harness.scheduler.lease(
                lease_id=1, token_ids=np.array(kept, np.int32), until_ms=10**6
            )
            assert grant.tokens_granted == 4 * PAGE
        stream, long = stream_and_long(harness, LONGEST_THAT_LEAVES_A_QUARTER - 2)
        assert long.request_id in step(harness)
        assert (long.request_id in step(harness)) is not leased
        harness.run()
        assert stream.ended is not None


@pytest.mark.parametrize("spare_percent", [25, 100])
def test_cold_prompts_end_however_many_turns_with_a_history_come(spare_percent: int) -> None:
    """Turns fill L1 for ever, each of them there before the one before has ended. A cold prompt is
    let in when its lateness is over, and has a step in four from then on."""
    harness = make(spare_percent=spare_percent, max_slots=32, max_context_len=400)
    rng = random.Random(4)
    history = random_tokens(rng, 10 * PAGE)
    cold: list[tuple[int, Job]] = []
    worst = 0
    for number in itertools.count():
        harness.now_ms += 1
        if number % 4 == 0:
            harness.submit([*history, number % 50, rng.randrange(50)], max_new=40)
        if number % 150 == 10 and len(cold) < 6:
            cold.append((number, harness.submit(random_tokens(rng, 12 * PAGE), max_new=4)))
        harness.step()
        for asked, job in cold:
            if job.ended is None:
                worst = max(worst, number - asked)
        if len(cold) == 6 and all(job.ended is not None for _, job in cold):
            break
        assert number < 3_000, "a cold prompt starves"
    # 154 ms of lateness, the turns that came before that, and a step in four for six chunks.
    assert 154 < worst < 154 + 100 + 4 * 7
    harness.run()
