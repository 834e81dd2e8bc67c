# SPDX-License-Identifier: Apache-2.0
"""Prompts that another engine computes: pages first, then its word, then the last token here."""

from __future__ import annotations

import random

import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel, random_tokens


def make(**options: int) -> Harness:
    settings = dict(page_size=4, num_pages=12, max_slots=3, max_context_len=40, token_budget=16)
    return Harness(cpp.SchedulerConfig(**{**settings, **options}), ToyModel())


def test_nothing_runs_until_the_kv_is_there_and_then_one_token_is_computed() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 3, remote_prefill=True)
    for _ in range(3):
        assert harness.step().step_id == -1
    assert harness.check()["owned_pages"] == 3
    harness.end_remote(job.request_id, ok=True)
    plan = harness.step()
    assert (plan.row_starts.tolist(), plan.row_lens.tolist()) == ([9], [1])
    harness.run()
    assert job.outputs == harness.model.generate(job)


def test_a_remote_prefill_that_failed_is_computed_here() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 3, remote_prefill=True)
    harness.step()
    harness.end_remote(job.request_id, ok=False)
    plan = harness.step()
    assert (plan.row_starts.tolist(), plan.row_lens.tolist()) == ([0], [10])
    harness.run()
    assert job.outputs == harness.model.generate(job)


def test_only_what_is_not_cached_comes_from_the_other_engine() -> None:
    harness = make()
    harness.submit(list(range(8)), 1)
    harness.run()
    job = harness.submit(list(range(12)), 2, remote_prefill=True)
    harness.step()
    assert harness.remote[job.request_id][1] == 8
    harness.end_remote(job.request_id, ok=True)
    harness.run()
    assert job.outputs == harness.model.generate(job)


def test_an_abort_keeps_the_pages_until_the_other_engine_is_done() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 3, remote_prefill=True)
    harness.step()
    assert harness.abort(job.request_id) == []
    assert harness.check()["in_flight_pages"] == 3
    harness.end_remote(job.request_id, ok=True)
    assert job.ended is not None and job.ended.status == "aborted"
    assert harness.check()["free_pages"] == 12


def test_word_of_a_prefill_nobody_awaits_is_refused() -> None:
    harness = make()
    job = harness.submit([1, 2, 3], 2)
    harness.step()
    for request_id in (job.request_id, 77):
        with pytest.raises(ValueError, match=f"request_id: {request_id} awaits no remote prefill"):
            harness.scheduler.advance([cpp.RemotePrefill(request_id=request_id, ok=True)])


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_with_remote_prefills_never_read_foreign_kv(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.choice([8, 12, 30])
    config = cpp.SchedulerConfig(
        page_size=2,
        num_pages=num_pages,
        max_slots=rng.choice([1, 2, 4]),
        max_context_len=40,
        token_budget=rng.choice([3, 16]),
        lone_token_budget=seed % 3 * 12,
        num_l2_pages=rng.choice([0, 10]),
    )
    harness = Harness(config, ToyModel(3), overlap=rng.random() < 0.5)
    if config.num_l2_pages:
        harness.mover = TierMover(config, harness.device, rng)
    history: list[list[int]] = [[]]
    for _ in range(250):
        harness.now_ms += 1
        dice = rng.random()
        if dice < 0.3 and len(harness.live) < 8:
            prompt = rng.choice(history)[: rng.randrange(12)] + random_tokens(rng, 4, 3)
            room = min(40, num_pages * 2) - len(prompt)
            if room > 1:
                remote = rng.random() < 0.5
                max_new = rng.randrange(1, min(room, 12))
                history.append(harness.submit(prompt, max_new, remote_prefill=remote).prompt)
        elif dice < 0.35 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.55 and harness.remote:
            harness.end_remote(rng.choice(sorted(harness.remote)), ok=rng.random() < 0.7)
        harness.step()
        harness.check()
    while harness.live:
        for request_id in sorted(harness.remote):
            harness.end_remote(request_id, ok=True)
        harness.step()
    while harness.flights:
        harness.commit()
    for job in harness.jobs.values():
        expected = harness.model.generate(job)
        assert job.ended is not None
        assert job.outputs == expected[: len(job.outputs)]
        assert job.ended.status != "finished" or job.outputs == expected
    stats = harness.check()
    assert stats["owned_pages"] == stats["leaving"] == 0
