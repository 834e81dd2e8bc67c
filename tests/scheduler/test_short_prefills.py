# SPDX-License-Identifier: Apache-2.0
"""A prompt of many steps leaves a quarter of each to short ones that come meanwhile, and nobody
else: not to other long ones, not to who has to wait anyway, and never all it has."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, random_tokens
from tests.scheduler.test_planning import make_harness
from tests.scheduler.test_tiers import make as make_tiers
from tests.scheduler.test_tiers import settle

BUDGET = 16
SHORT = BUDGET // 4


def lens_of(plan: cpp.Plan) -> dict[int, int]:
    """Tokens of each request in a step."""
    ids, lens = plan.row_request_ids.tolist(), plan.row_lens.tolist()
    return dict(zip(ids, lens, strict=True))


def prompt(seed: int, length: int) -> list[int]:
    return random_tokens(random.Random(seed), length)


def step(harness: Harness) -> dict[int, int]:
    lens = lens_of(harness.plan())
    harness.commit()
    return lens


def test_a_short_prompt_passes_a_long_one_under_way_and_the_long_one_goes_on() -> None:
    harness = make_harness(token_budget=BUDGET)
    long = harness.submit(prompt(1, 100), max_new=1)
    assert step(harness) == {long.request_id: BUDGET}
    short = harness.submit(prompt(2, SHORT - 1), max_new=1)
    assert step(harness) == {long.request_id: BUDGET - SHORT + 1, short.request_id: SHORT - 1}
    assert short.ended is not None and long.ended is None
    assert step(harness) == {long.request_id: BUDGET}
    harness.run()


def test_several_short_ones_share_the_quarter_in_their_order() -> None:
    harness = make_harness(token_budget=BUDGET)
    long = harness.submit(prompt(1, 100), max_new=1)
    step(harness)
    shorts = [harness.submit(prompt(2 + i, 3), max_new=1) for i in range(3)]
    first, second, third = (job.request_id for job in shorts)
    assert step(harness) == {long.request_id: 12, first: 3, second: 1}
    # What runs already and has little left comes before the long one's share.
    assert step(harness) == {long.request_id: 11, second: 2, third: 3}
    harness.run()


def test_another_long_prompt_gets_nothing_of_it() -> None:
    harness = make_harness(token_budget=BUDGET)
    first = harness.submit(prompt(1, 62), max_new=1)
    step(harness)
    second = harness.submit(prompt(2, SHORT + 1), max_new=1)
    assert step(harness) == {first.request_id: BUDGET}
    short = harness.submit(prompt(3, 2), max_new=1)
    assert step(harness) == {first.request_id: 14, short.request_id: 2}
    assert step(harness) == {first.request_id: BUDGET}  # its last: none is kept any more
    assert step(harness) == {second.request_id: SHORT + 1}
    harness.run()


def test_who_waits_for_somebody_elses_prefill_keeps_nothing_free() -> None:
    harness = make_harness(token_budget=BUDGET)
    shared = prompt(1, 100)
    leader = harness.submit(shared, max_new=1)
    step(harness)
    harness.submit([*shared[:12], 9], max_new=1)  # 12 tokens there: one uncached, and free to run
    follower = harness.submit([*shared[:40], 9, 9], max_new=1)
    lens = step(harness)
    assert lens[leader.request_id] == BUDGET - 1 and follower.request_id not in lens
    assert step(harness) == {leader.request_id: BUDGET}
    harness.run()


def test_what_short_ones_cannot_take_for_lack_of_a_slot_goes_to_the_long_one() -> None:
    harness = make_harness(token_budget=BUDGET, max_slots=2)
    stream = harness.submit([1, 2], max_new=30)
    long = harness.submit(prompt(1, 61), max_new=1)
    step(harness)
    short = harness.submit(prompt(2, 2), max_new=1)
    done = 14
    while done < 61:
        lens = step(harness)
        assert lens == {stream.request_id: 1, long.request_id: min(BUDGET - 1, 61 - done)}
        done += lens[long.request_id]
    assert long.ended is not None
    assert step(harness) == {stream.request_id: 1, short.request_id: 2}
    harness.run()


def test_nor_for_lack_of_memory() -> None:
    harness = make_harness(token_budget=BUDGET, num_pages=17, page_size=4, max_context_len=68)
    long = harness.submit(prompt(1, 64), max_new=1)
    step(harness)
    short = harness.submit(prompt(2, 3), max_new=1)  # every page is the long one's
    for _ in range(3):
        assert step(harness) == {long.request_id: BUDGET}
    assert long.ended is not None and long.outputs == harness.model.generate(long)
    assert step(harness) == {short.request_id: 3}
    harness.run()


def test_under_streams_that_fill_the_budget_neither_starves() -> None:
    harness = make_harness(token_budget=8, max_slots=16, max_context_len=400)
    for i in range(12):
        harness.submit([i], max_new=300)
    long = harness.submit(prompt(1, 40), max_new=1)
    num_shorts = 0
    for number in range(200):
        if long.ended is not None:
            break
        if number % 2 == 0:
            harness.submit([50 + number, 7], max_new=1)
            num_shorts += 1
        harness.step()
    assert long.ended is not None and num_shorts > 10
    ended = [job for job in harness.jobs.values() if len(job.prompt) == 2 and job.ended is not None]
    assert len(ended) >= num_shorts - 2


def test_what_a_lower_tier_holds_counts_as_cached() -> None:
    """A turn whose history went to L2 is a short one, and is not ordered behind cold prompts."""
    harness = make_tiers(num_l2_pages=100, num_pages=40, max_slots=4, max_context_len=110)
    history = prompt(1, 40)
    harness.submit(history, 1)
    harness.run()
    settle(harness)
    for seed in (2, 3):
        harness.submit(prompt(seed, 100), 1)  # takes all that L1 has
        harness.run()
        settle(harness)
    found = harness.scheduler.query_prefix(np.array(history, np.int32))
    assert (found.l1, found.l2) == (0, 40)
    cold = harness.submit(prompt(4, 90), 1)
    step(harness)
    later = harness.submit([*history, 5, 6], 1)
    for _ in range(20):
        if later.ended is not None:
            break
        harness.step()
    assert later.ended is not None and cold.ended is None
    harness.run()


@pytest.mark.parametrize(("later_ms", "passes"), [(40, True), (49, False)])
def test_memory_that_comes_free_is_a_short_ones_if_a_long_one_did_not_come_long_before(
    later_ms: int, passes: bool
) -> None:
    """Sixty uncached tokens are 48 ms of lateness, two 1.6: cold prompts that queue are passed by
    turns, and not for ever."""
    harness = make_harness(token_budget=BUDGET, num_pages=20, max_context_len=80)
    stream = harness.submit(prompt(1, 50), max_new=6)
    while not stream.outputs:
        harness.step()
    harness.submit(prompt(2, 16), max_new=9)  # with the stream all there is
    harness.step()
    long = harness.submit(prompt(3, 60), max_new=1)
    harness.step()
    harness.now_ms += later_ms
    turn = harness.submit([*prompt(1, 50)[:48], 5, 6], max_new=9)
    while not long.admissions and not turn.admissions:
        harness.step()
    assert bool(turn.admissions) is passes
    harness.run()
