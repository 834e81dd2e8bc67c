# SPDX-License-Identifier: Apache-2.0
"""Requests that run while pages of their prefix still come from L2."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, TierMover, ToyModel
from tests.scheduler.test_tiers import LOAD_BACK, hit, ids, run_at_random, settle

PROMPT = list(range(20))  # five pages


def make(*, overlap_loads: bool = True, num_l2_pages: int = 50, **options: int) -> Harness:
    settings = dict(page_size=4, num_pages=16, max_slots=3, max_context_len=60, token_budget=16)
    config = cpp.SchedulerConfig(
        **{**settings, **options}, num_l2_pages=num_l2_pages, overlap_loads=overlap_loads
    )
    harness = Harness(config, ToyModel())
    harness.mover = TierMover(config, harness.device, random.Random(1))
    harness.mover.delay = 0.0
    return harness


def mover_of(harness: Harness) -> TierMover:
    assert harness.mover is not None
    return harness.mover


def lower(harness: Harness, prompt: list[int]) -> None:
    """The prompt's pages lie in L2 alone."""
    harness.submit(prompt, 1)
    harness.run()
    settle(harness)
    harness.scheduler.move(ids(prompt), "l2")
    settle(harness)
    assert hit(harness, prompt) == (0, len(prompt) // 4 * 4, 0)


def resume(harness: Harness, prompt: list[int] = PROMPT, max_new: int = 3) -> tuple[Job, cpp.Plan]:
    """Plan the first step after a request that goes on behind the prompt has come."""
    job = harness.submit([*prompt, 7, 8, 9], max_new)
    return job, harness.plan()


def test_a_request_runs_in_the_plan_that_loads_its_prefix() -> None:
    harness = make()
    lower(harness, PROMPT)
    job, plan = resume(harness)
    tickets = plan.moves[:, 0].tolist()
    assert plan.moves[:, 1].tolist() == [LOAD_BACK] * 5
    assert tickets == list(range(tickets[0], tickets[0] + 5))
    assert plan.row_loads.tolist() == [[tickets[0], tickets[0] + 5]]
    assert (plan.row_starts.tolist(), plan.row_lens.tolist()) == ([20], [3])
    # In the order of the row's pages: the first ticket brings the first page.
    table = harness.device.page_table[job.slot, :5].tolist()
    assert plan.moves[:, 5].tolist() == table
    assert plan.admissions[0].cached_l2 == 20 and plan.admissions[0].cached_l1 == 0
    harness.run()
    assert job.outputs == harness.model.generate(job)
    assert hit(harness, PROMPT) == (20, 0, 0)
    assert harness.num_rows_while_loading >= 1 and harness.num_void_rows == 0


def test_without_the_option_it_waits_for_the_pages_first() -> None:
    harness = make(overlap_loads=False)
    lower(harness, PROMPT)
    job, plan = resume(harness)
    assert len(plan.moves) == 5 and len(plan.row_slots) == 0
    harness.run()
    assert job.outputs == harness.model.generate(job)
    assert harness.num_rows_while_loading == 0


@pytest.mark.parametrize("num_good", range(5))
def test_of_a_bad_load_the_pages_before_the_first_bad_one_are_used(num_good: int) -> None:
    harness = make()
    lower(harness, PROMPT)
    job, plan = resume(harness)
    mover = mover_of(harness)
    bad = int(plan.row_loads[0, 0]) + num_good
    mover.fates = {ticket: ticket != bad for ticket in range(*plan.row_loads[0].tolist())}
    harness.commit()
    assert harness.num_void_rows == 1 and job.outputs == []
    again = harness.plan()
    assert again.row_starts.tolist() == [4 * num_good]
    assert again.row_loads.tolist() == [[-1, -1]], "it is computed, not loaded once more"
    harness.run()
    assert job.outputs == harness.model.generate(job)
    assert len(job.admissions) == 1, "it never left the running ones"
    assert harness.check()["retractions"] == 0


@pytest.mark.parametrize("num_from_l3", [0, 2, 5])
@pytest.mark.parametrize("num_good", range(6))
def test_pages_count_as_cached_once_they_are_known_to_be_good(
    num_good: int, num_from_l3: int
) -> None:
    harness = make(use_l3=True)
    mover = mover_of(harness)
    lower(harness, PROMPT)
    harness.scheduler.move(ids(PROMPT), "l3")
    settle(harness)
    num_in_l2 = 4 * (5 - num_from_l3)
    harness.scheduler.move(ids(PROMPT[:num_in_l2]), "l2")
    settle(harness)
    assert hit(harness, PROMPT) == (0, num_in_l2, 4 * num_from_l3)
    names = ("cached_prompt_tokens", "l2_cached_prompt_tokens", "l3_cached_prompt_tokens")

    def counted() -> tuple[int, ...]:
        stats = harness.check()
        return tuple(stats[name] for name in names)

    before = counted()
    job, plan = resume(harness)
    while not len(plan.row_slots):  # what lies in L3 comes to L2 first
        harness.commit()
        plan = harness.plan()
    assert counted() == before, "nobody knows yet"
    tickets = range(*plan.row_loads[0].tolist())
    mover.fates = {ticket: ticket < tickets[0] + num_good for ticket in tickets}
    harness.run()
    assert job.outputs == harness.model.generate(job)
    from_l2 = min(4 * num_good, num_in_l2)
    found = (4 * num_good, from_l2, 4 * num_good - from_l2)
    assert counted() == tuple(a + b for a, b in zip(before, found, strict=True))


@pytest.mark.parametrize("is_good", [True, False])
def test_an_aborted_requests_pages_count_like_any_others(is_good: bool) -> None:
    harness = make()
    lower(harness, PROMPT)
    before = harness.check()
    job, plan = resume(harness)
    mover_of(harness).fates = {t: is_good for t in range(*plan.row_loads[0].tolist())}
    harness.abort(job.request_id)
    settle(harness)
    after = harness.check()
    for name in ("cached_prompt_tokens", "l2_cached_prompt_tokens"):
        assert after[name] - before[name] == (20 if is_good else 0), name


def test_results_that_come_before_the_pages_they_read_are_refused() -> None:
    harness = make()
    lower(harness, PROMPT)
    _, plan = resume(harness)
    first, end = plan.row_loads[0].tolist()
    done = harness.step_done(harness.flights[0])
    message = rf"step_id: {plan.step_id} read pages of tickets {first} to {end - 1}"
    acks = [cpp.TransferAck(ticket=ticket, ok=True) for ticket in range(first, end)]
    for events in ([done], [*acks[1:], done], [done, *acks]):
        with pytest.raises(ValueError, match=message):
            harness.scheduler.advance(events)
    harness.check()
    harness.scheduler.advance([*acks, done])


def test_a_token_of_a_row_that_read_a_bad_page_is_refused() -> None:
    harness = make()
    lower(harness, PROMPT)
    _, plan = resume(harness)
    done = harness.step_done(harness.flights[0])
    assert done.num_accepted.tolist() == [1]
    acks = [
        cpp.TransferAck(ticket=ticket, ok=ticket % 2 == 0)
        for ticket in range(*plan.row_loads[0].tolist())
    ]
    for events in ([*acks, done], [done]):
        with pytest.raises(ValueError, match=r"num_accepted\[0\]: 1 is not in \[0, 0\]"):
            harness.scheduler.advance(events)
        if len(events) > 1:
            harness.scheduler.advance(acks)
    harness.check()


def test_a_step_planned_behind_it_waits_too_and_counts_for_nothing_with_it() -> None:
    """The first token of a prefill is decoded on before anybody has seen it."""
    harness = make()
    lower(harness, PROMPT)
    job, first = resume(harness)
    second = harness.plan()
    assert second.row_starts.tolist() == [23]
    assert second.row_loads.tolist() == first.row_loads.tolist()
    mover_of(harness).fates = {int(first.row_loads[0, 0]) + 2: False}
    harness.commit()
    harness.commit()
    assert harness.num_void_rows == 2 and job.outputs == []
    harness.run()
    assert job.outputs == harness.model.generate(job)


def test_loads_come_one_at_a_time_beside_a_step() -> None:
    """A second one would make all wait in the step for what comes after the first."""
    harness = make(num_pages=40)
    other = list(range(100, 120))
    lower(harness, PROMPT)
    lower(harness, other)
    jobs = [harness.submit([*prompt, 7, 8, 9], 3) for prompt in (PROMPT, other)]
    plan = harness.plan()
    assert len(plan.moves) == 10 and plan.row_request_ids.tolist() == [jobs[0].request_id]
    harness.run()
    for job in jobs:
        assert job.outputs == harness.model.generate(job)


def test_who_wants_the_same_pages_waits_for_those_on_their_way() -> None:
    harness = make(num_pages=40)
    lower(harness, PROMPT)
    jobs = [harness.submit([*PROMPT, 7, last], 3) for last in (8, 9)]
    plan = harness.plan()
    assert len(plan.moves) == 5 and len(plan.row_slots) == 1
    harness.run()
    assert mover_of(harness).num_by_kind[LOAD_BACK] == 5
    for job in jobs:
        assert job.outputs == harness.model.generate(job)


def test_an_abort_gives_the_pages_back_when_nothing_writes_to_them_any_more() -> None:
    harness = make()
    lower(harness, PROMPT)
    job, _ = resume(harness)
    assert harness.abort(job.request_id) == []
    assert harness.check()["in_flight_pages"] >= 5
    settle(harness)
    stats = harness.check()
    assert stats["owned_pages"] == stats["in_flight_pages"] == 0
    assert hit(harness, PROMPT) == (20, 0, 0), "what came is there for the next one"


def test_the_simulated_device_finds_a_forward_that_reads_before_a_layer_is_there() -> None:
    """What the checks below rest on: a row that does not say what it waits for is found."""
    harness = make()
    lower(harness, PROMPT)
    harness.submit([*PROMPT, 7, 8, 9], 3)
    plan = harness.scheduler.next_plan(1)
    mover_of(harness).take(plan)
    harness.device.apply_tables(plan)
    silent = SimpleNamespace(
        step_id=plan.step_id,
        row_loads=np.full((1, 2), -1),
        row_slots=plan.row_slots,
        row_starts=plan.row_starts,
    )
    with pytest.raises(AssertionError, match="reads layer 0 of .* too early"):
        harness.device.wait_for_layers(silent)  # type: ignore[arg-type]
    harness.device.wait_for_layers(plan)


@pytest.mark.parametrize("chunk", range(6))
def test_random_runs_never_read_what_is_not_there_nor_keep_what_was_bad(chunk: int) -> None:
    num_rows = num_void = 0
    for seed in range(chunk * 20, chunk * 20 + 20):
        harness = run_at_random(seed, overlap_loads=True)
        num_rows += harness.num_rows_while_loading
        num_void += harness.num_void_rows
    assert num_rows > 40 and num_void > 0


def _who_runs_next(
    *, num_below: int, num_good: int, tier: str = "l2", overlap_loads: bool = True
) -> list[str]:
    """Tenants in the order in which their requests were admitted, behind one of `mine` that found
    so many pages of its prompt in a lower tier, of which so many came to L1 well."""
    harness = make(max_slots=1, use_l3=tier == "l3", overlap_loads=overlap_loads)
    if num_below:
        lower(harness, PROMPT[: 4 * num_below])
        harness.scheduler.move(ids(PROMPT[: 4 * num_below]), tier)
        settle(harness)
    harness.submit([*PROMPT, 7, 8, 9], 3, tenant="mine")
    while True:
        plan = harness.plan()
        loads = plan.moves[plan.moves[:, 1] == LOAD_BACK, 0].tolist()
        mover_of(harness).fates |= {ticket: at < num_good for at, ticket in enumerate(loads)}
        if len(plan.row_slots):
            break
        harness.commit()
    small = [
        harness.submit([100 + 10 * number, *range(5)], 1, tenant=tenant)
        for number, tenant in enumerate(["mine", "theirs"] * 8)
    ]
    harness.run()
    return [job.tenant for job in sorted(small, key=lambda j: harness.admitted_at[j.request_id])]


@pytest.mark.parametrize("overlap_loads", [True, False])
@pytest.mark.parametrize("tier", ["l2", "l3"])
@pytest.mark.parametrize("num_good", range(6))
def test_pages_that_come_bad_cost_their_tenant_what_it_takes_to_compute_them(
    num_good: int, tier: str, overlap_loads: bool
) -> None:
    """As much as if they had never been there: the others wait no longer for it."""
    expected = _who_runs_next(num_below=num_good, num_good=num_good)
    found = _who_runs_next(num_below=5, num_good=num_good, tier=tier, overlap_loads=overlap_loads)
    assert found == expected
    if num_good < 4:
        assert expected != _who_runs_next(num_below=5, num_good=5), "it makes a difference"
