# SPDX-License-Identifier: Apache-2.0
"""Prompts computed for another engine: their KV stays where it is until that engine has it."""

from __future__ import annotations

import random

import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel, random_tokens


def make(overlap: bool = False, **options: int) -> Harness:
    settings = dict(page_size=4, num_pages=12, max_slots=3, max_context_len=40, token_budget=16)
    harness = Harness(cpp.SchedulerConfig(**{**settings, **options}), ToyModel(), overlap=overlap)
    harness.sends_at_once = False
    return harness


def run_until_sent(harness: Harness) -> None:
    for _ in range(60):
        harness.step()
        if harness.sends:
            return
    raise AssertionError("nothing to send")


def test_a_prefill_for_another_engine_ends_when_its_kv_was_read() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 1, send_kv=True)
    run_until_sent(harness)
    send = harness.sends[job.request_id]
    assert (send.num_tokens, len(send.pages), send.slot) == (10, 3, job.slot)
    assert len(job.outputs) == 1 and job.ended is None
    stats = harness.check()
    assert (stats["running"], stats["leaving"], stats["sending"]) == (0, 1, 1)
    assert harness.plan().step_id == -1
    (ended,) = harness.end_send(job.request_id, ok=True)
    assert (ended.status, ended.num_cached_tokens) == ("finished", 10)
    assert ended.page_hashes == send.page_hashes
    assert harness.check()["leaving"] == 0


def test_a_send_that_failed_fails_the_request_and_keeps_its_full_pages() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 1, send_kv=True)
    run_until_sent(harness)
    (ended,) = harness.end_send(job.request_id, ok=False)
    assert (ended.status, ended.num_cached_tokens) == ("failed", 8)
    assert ended.message == "the other engine did not take the KV"
    assert harness.check()["owned_pages"] == 0


def test_an_abort_keeps_the_pages_until_the_other_engine_reads_no_more() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 1, send_kv=True)
    run_until_sent(harness)
    assert harness.abort(job.request_id) == []
    assert harness.check()["in_flight_pages"] == 1
    (ended,) = harness.end_send(job.request_id, ok=True)
    assert ended.status == "aborted"
    assert harness.check()["in_flight_pages"] == 0


@pytest.mark.parametrize("num_accepted", [0, 1])
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_what_ran_behind_the_end_changes_nothing_of_what_is_read(
    num_accepted: int, finished: bool, failed: bool
) -> None:
    """A step was planned before the end of the request was known; the last page fills up in it."""
    harness = make()
    job = harness.submit(list(range(11)), 5, send_kv=True)
    harness.plan()
    late = harness.plan()
    assert late.row_request_ids.tolist() == [job.request_id]
    first, second = harness.flights
    first.finished, second.finished = [1], [int(finished)]
    second.failed = [int(failed)]
    second.tokens = [second.tokens[0][:num_accepted]]
    harness.advance([harness.step_done(first)])
    job.outputs += first.tokens[0]
    send = harness.sends[job.request_id]
    twin = harness.scheduler.stats()["owned_pages"]
    harness.flights.clear()
    assert harness.advance([harness.step_done(second)]) == []
    stats = harness.check()
    assert (stats["sending"], stats["owned_pages"]) == (1, twin)
    (ended,) = harness.end_send(job.request_id, ok=True)
    assert (ended.status, ended.num_cached_tokens) == ("finished", 11)
    assert ended.page_hashes == send.page_hashes


def test_pages_being_read_are_not_evicted_and_do_not_stop_the_others() -> None:
    harness = make()
    job = harness.submit(list(range(20)), 1, send_kv=True)
    run_until_sent(harness)
    others = [harness.submit([50 + i, 1, 2], 20) for i in range(3)]
    for _ in range(200):
        harness.now_ms += 1
        harness.step()
        harness.check()
    assert all(other.outputs == harness.model.generate(other) for other in others)
    harness.end_send(job.request_id, ok=True)
    assert harness.check()["leaving"] == 0


def test_word_of_a_send_that_is_none_is_refused() -> None:
    harness = make()
    job = harness.submit(list(range(10)), 1, send_kv=True)
    with pytest.raises(ValueError, match=r"events\[0\].request_id: 0 is not being sent"):
        harness.scheduler.advance([cpp.SendDone(request_id=job.request_id, ok=True)])
    run_until_sent(harness)
    done = cpp.SendDone(request_id=job.request_id, ok=True)
    with pytest.raises(ValueError, match=r"events\[1\].request_id: 0 is not being sent"):
        harness.scheduler.advance([done, done])
    with pytest.raises(ValueError, match=r"specs\[0\].send_kv: true with remote_prefill"):
        harness.submit([1, 2], 1, send_kv=True, remote_prefill=True)


def test_a_prompt_prefilled_here_goes_on_there() -> None:
    """Two engines, one memory each: what the first sends is all the second needs."""
    first, second = make(), make()
    prompt = list(range(100, 117))
    sent = first.submit(prompt, 1, send_kv=True)
    job = second.submit(prompt, 6, remote_prefill=True)
    second.step()
    run_until_sent(first)
    send = first.sends[sent.request_id]
    slot, start = second.remote.pop(job.request_id)
    for index, page in enumerate(send.pages.tolist()):
        if (index + 1) * 4 > start:
            second.device.memory[second.device.page_table[slot, index]] = first.device.memory[page]
    second.advance([cpp.RemotePrefill(request_id=job.request_id, ok=True)])
    first.end_send(sent.request_id, ok=True)
    second.run()
    assert job.outputs == second.model.generate(job)
    assert job.outputs[:1] == sent.outputs


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_with_sends_never_send_foreign_kv(seed: int) -> None:
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
    harness = Harness(config, ToyModel(3, rng.choice([0, 8])), overlap=rng.random() < 0.5)
    harness.sends_at_once = False
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
                max_new = rng.randrange(1, min(room, 12))
                job = harness.submit(
                    prompt, max_new, send_kv=rng.random() < 0.5, priority=rng.choice([0, 1])
                )
                history.append(job.prompt)
        elif dice < 0.35 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.6 and harness.sends:
            harness.end_send(rng.choice(sorted(harness.sends)), ok=rng.random() < 0.7)
        harness.step()
        harness.check()
    harness.sends_at_once = True
    harness.run()
    for job in harness.jobs.values():
        expected = harness.model.generate(job)
        assert job.ended is not None
        assert job.outputs == expected[: len(job.outputs)]
        assert job.ended.status != "finished" or job.outputs == expected
    stats = harness.check()
    assert stats["owned_pages"] == stats["leaving"] == stats["sending"] == 0
