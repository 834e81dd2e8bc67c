# SPDX-License-Identifier: Apache-2.0
"""Who runs in a step, with how many tokens, and who gives way when memory runs out."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, random_tokens


def make_harness(overlap: bool = False, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=4, num_pages=200, max_slots=8, max_context_len=400, token_budget=16
    )
    return Harness(cpp.SchedulerConfig(**{**settings, **options}), overlap=overlap)


def test_an_idle_scheduler_plans_nothing() -> None:
    harness = make_harness()
    plan = harness.scheduler.next_plan(0)
    assert plan.step_id == -1
    assert len(plan.row_request_ids) == len(plan.input_ids) == len(plan.page_deltas) == 0


def test_prefill_rows_stand_before_decode_rows_and_share_the_budget() -> None:
    harness = make_harness()
    streams = [harness.submit([7, i], max_new=30) for i in range(3)]
    harness.step()
    long = harness.submit(random_tokens(random.Random(0), 100), max_new=2)
    plan = harness.plan()
    assert plan.row_request_ids.tolist() == [long.request_id, *(s.request_id for s in streams)]
    assert plan.row_lens.tolist() == [13, 1, 1, 1]
    assert plan.row_samples.tolist() == [0, 1, 1, 1]
    assert len(plan.input_ids) == 16
    harness.commit()
    harness.run()


def test_a_long_prefill_never_stops_a_running_stream() -> None:
    harness = make_harness()
    stream = harness.submit([1, 2], max_new=50)
    harness.step()
    harness.submit(random_tokens(random.Random(0), 300), max_new=1)
    for _ in range(20):
        before = len(stream.outputs)
        harness.step()
        assert len(stream.outputs) == before + 1


def test_streams_that_fill_the_budget_leave_a_quarter_to_a_waiting_prefill() -> None:
    harness = make_harness(token_budget=8, max_slots=16)
    streams = [harness.submit([i], max_new=60) for i in range(12)]
    while any(not s.outputs for s in streams):
        harness.step()
    counts = [len(s.outputs) for s in streams]
    late = harness.submit(random_tokens(random.Random(2), 20), max_new=1)
    for _ in range(12):
        plan = harness.step()
        assert len(plan.input_ids) <= 8
    assert late.ended is not None
    gained = [len(s.outputs) - n for s, n in zip(streams, counts, strict=True)]
    assert max(gained) - min(gained) <= 2, "streams take turns when the budget is short"


def test_several_prefills_share_one_step() -> None:
    harness = make_harness()
    jobs = [harness.submit([i, 9, 9, 9, 9], max_new=1) for i in range(3)]
    plan = harness.plan()
    assert plan.row_request_ids.tolist() == [j.request_id for j in jobs]
    assert plan.row_lens.tolist() == [5, 5, 5]
    harness.commit()


def test_equal_requests_run_in_order_of_arrival_whatever_their_ids() -> None:
    scheduler = cpp.Scheduler(
        cpp.SchedulerConfig(num_pages=10, max_slots=1, max_context_len=100, token_budget=64)
    )
    for request_id in (9, 3, 10):
        spec = cpp.RequestSpec(
            request_id=request_id,
            token_ids=np.array([request_id, 1], np.int32),
            max_new_tokens=1,
        )
        scheduler.submit([spec])
    order = []
    for now in range(3):
        plan = scheduler.next_plan(now)
        order += plan.row_request_ids.tolist()
        scheduler.advance([step_done(plan)])
    assert order == [9, 3, 10]


def step_done(plan: cpp.Plan, token: int = 5) -> cpp.StepDone:
    rows = len(plan.row_slots)
    return cpp.StepDone(
        step_id=plan.step_id,
        num_accepted=plan.row_samples.astype(np.int32),
        token_ids=np.full((rows, 1), token, np.int32),
        finished=np.zeros(rows, np.uint8),
        failed=np.zeros(rows, np.uint8),
    )


def test_a_lower_priority_number_runs_first_until_age_catches_up() -> None:
    harness = make_harness(max_slots=1, ageing_ms=1000)
    harness.submit([0, 1], max_new=3)
    harness.step()
    background = harness.submit([1, 1], max_new=1, priority=1)
    urgent = harness.submit([2, 1], max_new=1, priority=0)
    harness.run()
    assert background.ended is not None and urgent.ended is not None
    assert list(order_of_first_rows(harness, [background.request_id, urgent.request_id])) == [1, 0]

    harness = make_harness(max_slots=1, ageing_ms=1000)
    harness.submit([0, 1], max_new=3)
    harness.step()
    background = harness.submit([1, 1], max_new=1, priority=1)
    harness.step()
    harness.now_ms += 1001
    urgent = harness.submit([2, 1], max_new=1, priority=0)
    harness.run()
    assert list(order_of_first_rows(harness, [background.request_id, urgent.request_id])) == [0, 1]


def order_of_first_rows(harness: Harness, ids: list[int]) -> list[int]:
    """For each id its rank among `ids` by when it was first admitted."""
    ranked = sorted(ids, key=lambda request_id: harness.admitted_at[request_id])
    return [ranked.index(request_id) for request_id in ids]


def test_a_short_uncached_suffix_passes_a_long_one_that_came_just_before() -> None:
    harness = make_harness(max_slots=1, suffix_us_per_token=1000)
    harness.submit([0, 1], max_new=3)
    harness.step()
    long = harness.submit(random_tokens(random.Random(0), 200), max_new=1)
    short = harness.submit([2, 1], max_new=1)
    harness.run()
    assert order_of_first_rows(harness, [long.request_id, short.request_id]) == [1, 0]


def test_with_overlap_the_next_input_is_on_the_device() -> None:
    harness = make_harness()
    job = harness.submit([1, 2, 3], max_new=3)
    first = harness.plan()
    assert first.input_ids.tolist() == [1, 2, 3]
    second = harness.plan()
    assert second.input_ids.tolist() == [-1]
    assert second.row_starts.tolist() == [3]
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        harness.scheduler.next_plan(0)
    harness.commit()
    third = harness.plan()
    assert third.input_ids.tolist() == [-1]
    harness.commit()
    assert harness.plan().step_id == -1, "all of max_new_tokens is planned"
    (ended,) = harness.commit()
    assert ended.request_id == job.request_id and len(job.outputs) == 3


def test_a_request_that_finished_stays_until_its_last_step_is_back() -> None:
    harness = make_harness()
    harness.submit([1, 2, 3], max_new=9)
    harness.plan()
    harness.flights[0].finished = [1]
    harness.plan()
    assert harness.commit() == []
    assert harness.check()["in_flight_pages"] == 1
    assert harness.plan().step_id == -1
    (ended,) = harness.commit()
    assert (ended.status, ended.num_cached_tokens) == ("finished", 3)
    assert harness.check()["in_flight_pages"] == 0


@pytest.mark.parametrize("steps_before", range(6))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_at_any_point_frees_within_one_step(steps_before: int, overlap: bool) -> None:
    harness = make_harness(overlap)
    job = harness.submit(random_tokens(random.Random(0), 40), max_new=20)
    for _ in range(steps_before):
        harness.step()
    ended = harness.abort(job.request_id)
    while harness.flights:
        ended += harness.commit()
    assert [(e.request_id, e.status) for e in ended] == [(job.request_id, "aborted")]
    stats = harness.check()
    assert stats["owned_pages"] == stats["in_flight_pages"] == stats["running"] == 0
    assert harness.plan().step_id == -1


def test_eight_cold_siblings_compute_their_shared_prefix_once() -> None:
    harness = make_harness(token_budget=32)
    prefix = random_tokens(random.Random(4), 120)
    jobs = [harness.submit(prefix + [40, i], max_new=2) for i in range(8)]
    computed = 0
    while harness.live:
        plan = harness.step()
        computed += int(plan.row_lens.sum())
    assert computed == 122 + 7 * 2 + 8 * 1  # one prefill, seven suffixes, eight decode rows
    assert all(job.outputs == harness.model.generate(job) for job in jobs)


@pytest.mark.parametrize("overlap", [False, True])
def test_followers_go_on_when_their_leader_is_aborted(overlap: bool) -> None:
    harness = make_harness(overlap)
    prefix = random_tokens(random.Random(4), 120)
    leader, *followers = [harness.submit(prefix + [40, i], max_new=2) for i in range(3)]
    harness.step()
    harness.step()
    assert harness.scheduler.stats()["running"] == 1
    harness.abort(leader.request_id)
    harness.run()
    assert all(job.outputs == harness.model.generate(job) for job in followers)


def test_an_urgent_follower_lends_its_leader_its_place() -> None:
    harness = make_harness(ageing_ms=1000)
    prefix = random_tokens(random.Random(4), 64)
    harness.submit(random_tokens(random.Random(5), 300), max_new=1, priority=0)
    harness.now_ms += 1
    slow = harness.submit(prefix + [1], max_new=1, priority=5)
    harness.step()
    harness.step()
    assert slow.admissions == []  # the long one takes the whole budget
    harness = make_harness(ageing_ms=1000, token_budget=16)
    slow = harness.submit(prefix + [1], max_new=1, priority=5)
    harness.step()
    harness.submit(random_tokens(random.Random(5), 300), max_new=1, priority=1)
    harness.step()
    urgent = harness.submit(prefix + [2], max_new=1, priority=0)
    for _ in range(8):
        harness.step()
    assert urgent.ended is not None


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_requests_resume_exactly(overlap: bool) -> None:
    harness = make_harness(overlap, num_pages=16, max_context_len=60)
    rng = random.Random(8)
    jobs = [harness.submit(random_tokens(rng, 9), max_new=40) for _ in range(4)]
    harness.run()
    assert harness.num_retracted > 0
    assert all(job.outputs == harness.model.generate(job) for job in jobs)
    readmitted = [job for job in jobs if len(job.admissions) > 1]
    assert readmitted
    for job in readmitted:
        assert [length for length, _ in job.admissions] == sorted(n for n, _ in job.admissions)


def test_the_latest_request_gives_way_and_never_the_oldest() -> None:
    harness = make_harness(num_pages=12, max_context_len=48)
    jobs = [harness.submit([i, 1, 2], max_new=40) for i in range(4)]
    harness.run()
    assert len(jobs[0].admissions) == 1
    assert harness.num_retracted >= 2


def test_a_retracted_request_finds_its_own_pages_again_if_they_survived() -> None:
    harness = make_harness(num_pages=24, max_context_len=90)
    rng = random.Random(3)
    jobs = [harness.submit(random_tokens(rng, 12), max_new=60) for _ in range(2)]
    harness.run()
    again = [admission for job in jobs for admission in job.admissions[1:]]
    assert again and all(cached > 0 for _, cached in again)


def test_results_may_come_back_while_the_victim_is_still_in_flight() -> None:
    harness = make_harness(True, num_pages=8, max_context_len=32)
    jobs = [harness.submit([i, 1, 2], max_new=28) for i in range(2)]
    seen_in_flight = 0
    while harness.live:
        plan = harness.plan()
        seen_in_flight = max(seen_in_flight, harness.check()["in_flight_pages"])
        if len(harness.flights) > 1 or plan.step_id < 0:
            harness.commit()
    assert seen_in_flight > 0 and harness.num_retracted > 0
    assert all(job.outputs == harness.model.generate(job) for job in jobs)


def test_a_sampled_row_without_a_token_fails_that_request_alone() -> None:
    harness = make_harness()
    bad, good = harness.submit([1, 2], max_new=3), harness.submit([3, 4], max_new=3)
    plan = harness.plan()
    harness.flights.clear()
    (ended,) = harness.scheduler.advance(
        [
            cpp.StepDone(
                step_id=plan.step_id,
                num_accepted=np.array([0, 1], np.int32),
                token_ids=np.array([[0], [9]], np.int32),
                finished=np.zeros(2, np.uint8),
                failed=np.zeros(2, np.uint8),
            )
        ]
    )
    assert (ended.request_id, ended.status) == (bad.request_id, "failed")
    assert "accepted no token" in ended.message
    assert harness.scheduler.stats()["running"] == 1
    del good


def test_views_of_an_old_plan_stay_as_they_were() -> None:
    harness = make_harness()
    harness.submit([1, 2, 3], max_new=20)
    plans = []
    for _ in range(10):
        plans.append((harness.step(), harness.plans))
    starts = [plan.row_starts.tolist()[0] for plan, _ in plans]
    assert starts == [0, *range(3, 12)]


def test_a_tenant_that_floods_the_queue_does_not_delay_the_others() -> None:
    harness = make_harness(max_slots=2)
    rng = random.Random(9)
    flood = [harness.submit(random_tokens(rng, 10), 4, tenant="flood") for _ in range(20)]
    harness.step()
    harness.now_ms += 1
    guest = [harness.submit(random_tokens(rng, 10), 4, tenant="guest") for _ in range(4)]
    while any(job.ended is None for job in guest):
        harness.now_ms += 1
        harness.step()
    done = sum(job.ended is not None for job in flood)
    assert done <= 7, "each tenant gets half of the tokens, whatever waits behind it"
    harness.run()


def test_shares_are_counted_in_tokens_not_in_requests() -> None:
    harness = make_harness(max_slots=1, token_budget=64)
    rng = random.Random(9)
    heavy = [harness.submit(random_tokens(rng, 60), 1, tenant="heavy") for _ in range(10)]
    light = [harness.submit(random_tokens(rng, 6), 1, tenant="light") for _ in range(60)]
    while any(job.ended is None for job in light):
        harness.step()
    tokens = 61 * sum(job.ended is not None for job in heavy)
    assert 0.6 < tokens / (7 * len(light)) < 1.4


def test_priority_orders_the_requests_of_one_tenant() -> None:
    harness = make_harness(max_slots=1)
    harness.submit([0, 0], 3, tenant="a")
    harness.step()
    late = harness.submit([1, 1], 1, tenant="a", priority=2)
    soon = harness.submit([2, 2], 1, tenant="a", priority=1)
    harness.run()
    assert order_of_first_rows(harness, [late.request_id, soon.request_id]) == [1, 0]


def test_a_speculating_row_reserves_for_its_drafts_and_goes_on_behind_the_accepted_ones() -> None:
    harness = make_harness()
    job = harness.submit([1, 2, 3], 40, num_draft_tokens=3)
    harness.step()
    lengths, gains = set(), set()
    while job.ended is None:
        before = len(job.outputs)
        plan = harness.plan()
        assert plan.row_starts.tolist() == [len(job.prompt) + before - 1]
        assert plan.input_ids.tolist()[0] == job.outputs[-1]
        assert set(plan.input_ids.tolist()[1:]) <= {-1}
        lengths.add(len(plan.input_ids))
        harness.commit()
        gains.add(len(job.outputs) - before)
    assert max(lengths) == 4 and gains >= {1, 4}
    assert job.outputs == harness.model.generate(job)
    assert job.ended.num_cached_tokens == 3 + 40 - 1


def test_drafts_never_reach_past_max_new_tokens() -> None:
    harness = make_harness()
    job = harness.submit([1, 2, 3], 3, num_draft_tokens=8)
    harness.step()
    assert harness.plan().row_lens.tolist() == [2]
    harness.commit()
    harness.run()
    assert len(job.outputs) == 3


def test_a_speculating_request_is_not_planned_again_before_its_results() -> None:
    harness = make_harness()
    harness.submit([1, 2, 3], 20, num_draft_tokens=2)
    harness.plan()
    assert harness.plan().step_id == -1
    harness.commit()
    harness.plan()
    assert harness.plan().step_id == -1


def test_drafts_come_and_go_while_a_request_runs() -> None:
    harness = make_harness(token_budget=16)
    job = harness.submit([1, 2, 3], 40)
    scheduler = harness.scheduler
    harness.step()
    scheduler.set_num_draft_tokens(job.request_id, 3)
    assert harness.plan().row_lens.tolist() == [4]
    scheduler.set_num_draft_tokens(job.request_id, 0)
    assert harness.plan().step_id == -1, "where it goes on is not known before its results"
    harness.commit()
    assert harness.plan().row_lens.tolist() == [1]
    scheduler.set_num_draft_tokens(job.request_id, 2)
    assert harness.plan().step_id == -1
    harness.commit()
    assert harness.plan().row_lens.tolist() == [3]
    harness.commit()
    harness.run()
    assert job.outputs == harness.model.generate(job)


@pytest.mark.parametrize("num", [-1, 65])
def test_a_number_of_drafts_out_of_range_is_refused(num: int) -> None:
    harness = make_harness()
    job = harness.submit([1, 2, 3], 4)
    with pytest.raises(ValueError, match=r"num_draft_tokens: -?\d+ is not in \[0, 64\]"):
        harness.scheduler.set_num_draft_tokens(job.request_id, num)
    with pytest.raises(ValueError, match="request_id: 99 is unknown"):
        harness.scheduler.set_num_draft_tokens(99, 1)


def test_drafts_give_way_when_the_budget_is_short() -> None:
    harness = make_harness(token_budget=8)
    jobs = [harness.submit([i, 1], 30, num_draft_tokens=3) for i in range(4)]
    while any(not job.outputs for job in jobs):
        harness.step()
    assert harness.plan().row_lens.tolist() == [1, 1, 1, 1]
    harness.commit()
    harness.run()
    assert all(job.outputs == harness.model.generate(job) for job in jobs)


def test_an_illegal_event_fails_the_one_request_it_hits_with_both_names() -> None:
    harness = make_harness()
    other = harness.submit([1, 2], 6)
    harness.step()
    job = harness.submit(random_tokens(random.Random(0), 60), 2)
    plan = harness.plan()
    harness.flights[0].finished[plan.row_request_ids.tolist().index(job.request_id)] = 1
    harness.over.add(job.request_id)
    (ended,) = harness.commit()
    assert (ended.request_id, ended.status) == (job.request_id, "failed")
    assert ended.message == "illegal event Finish in state Prefilling"
    harness.check()
    harness.run()
    assert other.outputs == harness.model.generate(other)


def later_turns(harness: Harness, num: int, past: int, new: int, streams: int) -> list[Job]:
    """`num` sessions whose next turn (`new` tokens behind `past` cached) comes at one moment,
    beside running streams."""
    prefixes = [random_tokens(random.Random(seed), past) for seed in range(num)]
    for prefix in prefixes:
        harness.submit(prefix, max_new=1)
    harness.run()
    for seed in range(streams):
        harness.submit([7, seed], max_new=90)
    harness.step()
    rng = random.Random(99)
    return [harness.submit(prefix + random_tokens(rng, new), max_new=1) for prefix in prefixes]


def test_later_turns_that_come_together_are_computed_in_as_few_steps_as_the_budget_allows() -> None:
    """The budget of a GPU, eight turns of 800 tokens: two steps of 4,096, not eight of 800; each
    running stream gets its token in both."""
    harness = make_harness(
        page_size=16, num_pages=900, max_slots=16, max_context_len=2000, token_budget=4096
    )
    turns = later_turns(harness, 8, past=320, new=800, streams=4)
    plans = []
    while any(turn.ended is None for turn in turns):
        plans.append(harness.step())
    prefills = [plan.row_lens[plan.row_lens > 1].tolist() for plan in plans]
    assert [sum(lens) for lens in prefills] == [4092, 8 * 800 - 4092]
    assert prefills == [[800] * 5 + [92], [708, 800, 800]]
    assert [int((plan.row_lens == 1).sum()) for plan in plans] == [4, 4]
