# SPDX-License-Identifier: Apache-2.0
"""The store is asked for what nobody told of; whether to fetch is a question of time."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, TierMover, ToyModel

PAGE = 4


def make(**options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=PAGE,
        num_pages=30,
        max_slots=2,
        max_context_len=80,
        token_budget=32,
        num_l2_pages=50,
        use_l3=True,
        probe_l3=True,
        l3_wait_ms=100,
        attention_len=1000,
    )
    config = cpp.SchedulerConfig(**{**settings, **options})  # type: ignore[arg-type]
    harness = Harness(config, ToyModel())
    harness.mover = TierMover(config, harness.device, random.Random(1))
    harness.mover.delay = 0.0
    return harness


def stored_before(harness: Harness, tokens: list[int]) -> None:
    """An earlier process put this prefix into the store; `harness` was not told."""
    before = make()
    before.submit(tokens, 1)
    before.run()
    for _ in range(8):
        before.step()
    assert before.mover is not None and harness.mover is not None
    assert len(before.mover.l3) == len(tokens) // PAGE
    harness.mover.l3 = before.mover.l3


def answers(harness: Harness, delay: float) -> None:
    assert harness.mover is not None
    harness.mover.delay = delay


def step(harness: Harness, ms: int = 1) -> cpp.Plan:
    harness.now_ms += ms
    return harness.step()


def test_a_new_prompt_finds_what_an_earlier_process_stored() -> None:
    harness = make()
    prompt = list(range(20))
    stored_before(harness, prompt)
    job = harness.submit([*prompt, 7, 8], 3)
    harness.run()
    assert job.admissions == [(22, 20)]
    assert job.outputs == harness.model.generate(job)
    stats = harness.check()
    assert (stats["probes"], stats["probe_hit_pages"], stats["probes_open"]) == (1, 5, 0)
    assert stats["l3_cached_prompt_tokens"] == 20


def test_a_probe_asks_for_the_pages_behind_the_known_hit_by_their_names() -> None:
    harness = make()
    first = harness.submit(list(range(16)), 1)
    harness.run()
    assert first.ended is not None
    harness.submit(list(range(26)), 1)
    answers(harness, 1.0)
    plan = harness.plan()
    assert (plan.step_id, len(plan.probe_ids)) == (-1, 1)
    assert plan.probe_indptr.tolist() == [0, 2]  # tokens 16..24 of 25 that may be cached
    whole = make(probe_l3=False)
    named = whole.submit(list(range(26)), 1)
    whole.run()
    assert named.ended is not None
    assert plan.probe_hashes.tobytes() == named.ended.page_hashes[16 * 4 : 16 * 6]


@pytest.mark.parametrize("tier", ["l1", "l2", "l3"])
def test_a_prefetch_finds_what_an_earlier_process_stored(tier: str) -> None:
    harness = make()
    prompt = list(range(20))
    stored_before(harness, prompt)
    wanted = np.array([*prompt, 9, 9, 9, 9], np.int32)
    first = harness.scheduler.move(wanted, tier)
    assert (first.tokens_there, first.tokens_pending) == (0, 24), "the store is being asked"
    for _ in range(20):
        step(harness)
    assert harness.check()["move_orders"] == 0
    found = harness.scheduler.query_prefix(wanted)
    assert (found.l1, found.l2, found.l3) == {
        "l1": (20, 0, 0),
        "l2": (0, 20, 0),
        "l3": (0, 0, 20),
    }[tier]
    again = harness.scheduler.move(wanted, tier)
    assert (again.tokens_there, again.tokens_missing) == (20, 4)


def test_a_prefetch_asks_once_and_for_what_nobody_knows() -> None:
    harness = make()
    job = harness.submit(list(range(16)), 1)
    harness.run()
    for _ in range(8):
        step(harness)
    harness.scheduler.move(np.array(job.prompt, np.int32), "l2")
    asked = harness.check()["probes"]
    answers(harness, 1.0)
    longer = np.array([*job.prompt, *range(70, 78)], np.int32)
    for _ in range(5):
        harness.scheduler.move(longer, "l1")
        step(harness)
    assert harness.check()["probes"] == asked + 1
    assert harness.mover is not None
    assert [len(names) for _, names in harness.mover.probes] == [2]
    answers(harness, 0.0)
    for _ in range(5):
        step(harness, ms=60)
    assert harness.check()["move_orders"] == 0
    assert harness.scheduler.query_prefix(longer).l1 == 16


def test_a_prompt_whose_pages_are_known_asks_nothing() -> None:
    harness = make()
    job = harness.submit(list(range(16)), 1)
    harness.run()
    asked = harness.check()["probes"]
    harness.submit([*job.prompt, 5], 1)
    harness.submit([1, 2, 3], 1)  # not a page
    harness.run()
    assert harness.check()["probes"] == asked


def test_best_effort_waits_for_no_answer() -> None:
    harness = make(l3_wait_ms=0)
    prompt = list(range(20))
    stored_before(harness, prompt)
    answers(harness, 1.0)
    job = harness.submit([*prompt, 7], 1)
    step(harness)
    assert job.admissions == [(21, 0)]


def test_a_request_waits_for_an_answer_until_its_time_is_over_and_no_longer() -> None:
    harness = make(l3_wait_ms=100)
    answers(harness, 1.0)
    job = harness.submit(list(range(20)), 1)
    patient = harness.submit(list(range(100, 120)), 1, l3_wait_ms=1000)
    hasty = harness.submit(list(range(200, 220)), 1, l3_wait_ms=0)
    step(harness)
    start = harness.now_ms
    assert hasty.admissions and not job.admissions
    while not job.admissions:
        step(harness)
    assert harness.now_ms == start + 100
    assert not patient.admissions
    harness.now_ms = start + 999
    harness.step()
    assert not patient.admissions
    harness.now_ms = start + 1000
    harness.step()
    assert patient.admissions


def test_others_pass_by_who_waits_for_an_answer() -> None:
    harness = make(max_slots=1)
    answers(harness, 1.0)
    waiting = harness.submit(list(range(20)), 1)
    other = harness.submit([50, 51], 1)
    step(harness)
    assert other.admissions and not waiting.admissions


def test_two_requests_over_one_prefix_ask_once_and_both_wait() -> None:
    harness = make()
    prompt = list(range(20))
    stored_before(harness, prompt)
    jobs = [harness.submit([*prompt, 7, i], 2) for i in range(2)]
    harness.run()
    assert harness.check()["probes"] == 1
    assert [job.admissions[0] for job in jobs] == [(22, 20), (22, 20)]


def test_an_answer_that_comes_after_the_request_is_gone_still_counts() -> None:
    harness = make()
    prompt = list(range(20))
    stored_before(harness, prompt)
    answers(harness, 1.0)
    job = harness.submit([*prompt, 7], 1)
    step(harness)
    harness.abort(job.request_id)
    answers(harness, 0.0)
    step(harness)
    found = harness.scheduler.query_prefix(np.array(prompt, np.int32))
    assert (found.l1, found.l2, found.l3) == (0, 0, 20)


def test_an_l3_hit_is_a_hint_whose_failure_costs_a_computation_only() -> None:
    harness = make()
    prompt = list(range(20))
    stored_before(harness, prompt)
    assert harness.mover is not None
    harness.mover.l3 = dict.fromkeys(harness.mover.l3, np.zeros(PAGE, np.uint64))
    harness.mover.carry_out = lambda move, name: False  # type: ignore[method-assign]
    job = harness.submit([*prompt, 7], 3)
    harness.run()
    assert job.admissions == [(21, 0)]
    assert job.outputs == harness.model.generate(job)


def test_answers_to_no_probe_or_out_of_range_are_refused() -> None:
    harness = make()
    answers(harness, 1.0)
    harness.submit(list(range(20)), 1)
    with pytest.raises(ValueError, match=r"events\[0\].probe_id: 0 is not open"):
        harness.scheduler.advance([cpp.ProbeDone(probe_id=0, num_pages=0)])
    step(harness)
    with pytest.raises(ValueError, match=r"events\[0\].num_pages: 5 is not in \[0, 4\]"):
        harness.scheduler.advance([cpp.ProbeDone(probe_id=0, num_pages=5)])
    done = cpp.ProbeDone(probe_id=0, num_pages=4)
    with pytest.raises(ValueError, match=r"events\[1\].probe_id: 0 is not open"):
        harness.scheduler.advance([done, done])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_l3": True, "use_l3": False}, "probe_l3: true needs use_l3"),
        ({"l3_wait_ms": -1}, "l3_wait_ms: -1 is not in"),
        ({"num_l3_pages": 0}, "num_l3_pages: 0 is not in"),
        ({"max_preemptions": -1}, "max_preemptions: -1 is not in"),
    ],
)
def test_bad_settings_name_their_field(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


# ---- fetch or recompute --------------------------------------------------------------------------


def found_in_store(harness: Harness, length: int, **costs: float) -> Job:
    prompt = list(range(length))
    stored_before(harness, prompt)
    harness.scheduler.set_costs(**costs)
    job = harness.submit([*prompt, 7], 2)
    harness.run()
    assert job.outputs == harness.model.generate(job)
    return job


def test_what_is_computed_sooner_than_fetched_is_computed() -> None:
    slow = make()
    # A page of 4 tokens: 4 * 100 us to compute at most twice, 900 us to fetch and load.
    job = found_in_store(slow, 20, l2_us_per_page=100, l3_us_per_page=800, prefill_us_per_token=100)
    assert job.admissions == [(21, 0)]
    assert slow.check()["declined_pages"] == 5
    fast = make()
    job = found_in_store(fast, 20, l2_us_per_page=100, l3_us_per_page=200, prefill_us_per_token=100)
    assert job.admissions == [(21, 20)]


def test_without_measured_speeds_everything_is_fetched() -> None:
    harness = make()
    job = found_in_store(harness, 20, l2_us_per_page=10**6, l3_us_per_page=10**6)
    assert job.admissions == [(21, 20)]


def brute_force_worth(length: int, page_us: float, token_us: float, attention_len: int) -> int:
    """Pages to fetch so that the rest is computed soonest; the longer of equals."""
    costs = []
    for kept in range(length // PAGE + 1):
        computed = sum(
            token_us * (1 + (page * PAGE + PAGE // 2) / attention_len) * PAGE
            for page in range(kept, length // PAGE)
        )
        costs.append((round(kept * page_us + computed, 6), -kept))
    return -min(costs)[1]


@pytest.mark.parametrize("page_us", [400, 440, 460, 470, 480, 500, 520, 600])
def test_the_cut_is_where_a_search_over_all_cuts_puts_it(page_us: int) -> None:
    harness = make(attention_len=100)
    job = found_in_store(harness, 48, l3_us_per_page=page_us, prefill_us_per_token=100)
    assert job.admissions[0][1] == PAGE * brute_force_worth(48, page_us, 100, 100)


def test_a_fetch_that_hangs_is_waited_for_no_longer_than_computing_takes() -> None:
    harness = make()
    prompt = list(range(20))
    stored_before(harness, prompt)
    harness.scheduler.set_costs(l3_us_per_page=1, prefill_us_per_token=1000)
    job = harness.submit([*prompt, 7], 2)
    step(harness)  # asks, and hears
    answers(harness, 1.0)
    step(harness)  # fetches
    start = harness.now_ms
    while not job.admissions and harness.now_ms < start + 100:
        step(harness)
    assert 20 <= harness.now_ms - start <= 22
    answers(harness, 0.0)
    harness.run()
    assert job.outputs == harness.model.generate(job)


@pytest.mark.parametrize(
    ("name", "value"),
    [("l2_us_per_page", -1.0), ("l3_us_per_page", 2e9), ("prefill_us_per_token", float("nan"))],
)
def test_senseless_speeds_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: "):
        make().scheduler.set_costs(**{name: value})  # type: ignore[arg-type]
