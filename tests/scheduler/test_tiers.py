# SPDX-License-Identifier: Apache-2.0
"""Pages in host memory and in the store: written through, found again, moved, adopted, lost."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest

import _scheduler as cpp
from engine.loop.replay import RecordingScheduler, read_log, replay
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel, random_tokens

LOAD_BACK, WRITE_BACK, FETCH, STORE = range(4)


def make(*, use_l3: bool = False, num_l2_pages: int = 50, **options: int) -> Harness:
    settings = dict(page_size=4, num_pages=12, max_slots=2, max_context_len=60, token_budget=16)
    config = cpp.SchedulerConfig(
        **{**settings, **options}, num_l2_pages=num_l2_pages, use_l3=use_l3
    )
    harness = Harness(config, ToyModel())
    harness.mover = TierMover(config, harness.device, random.Random(1))
    harness.mover.delay = 0.0
    return harness


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def hit(harness: Harness, tokens: list[int]) -> tuple[int, int, int]:
    found = harness.scheduler.query_prefix(ids(tokens))
    return found.l1, found.l2, found.l3


def settle(harness: Harness) -> None:
    """Steps without work until no move is under way."""
    for _ in range(8):
        harness.step()
    assert harness.check()["transfers_in_flight"] == 0


def events_of(harness: Harness) -> list[tuple[str, str]]:
    return [(event.kind, event.tier) for event in harness.scheduler.drain_kv_events()]


def test_full_pages_are_written_through_as_they_fill() -> None:
    harness = make()
    harness.submit(list(range(10)), 4)
    harness.run()
    settle(harness)
    stats = harness.check()
    assert stats["cached_l2_pages"] == 3  # 13 tokens have KV
    assert harness.mover is not None
    assert harness.mover.num_by_kind == [0, 3, 0, 0]
    assert events_of(harness).count(("stored", "l2")) == 3


def test_what_was_evicted_is_loaded_back_and_counted() -> None:
    harness = make()
    first = harness.submit(list(range(20)), 1)
    harness.run()
    settle(harness)
    harness.submit(list(range(100, 144)), 1)  # takes the rest of the pool and more
    harness.run()
    settle(harness)
    l1, l2, l3 = hit(harness, first.prompt)
    assert l1 < 20 and l1 + l2 == 20 and l3 == 0
    again = harness.submit([*first.prompt, 7, 8, 9], 3)
    harness.run()
    assert again.admissions == [(23, 20)]
    assert again.outputs == harness.model.generate(again)
    assert harness.check()["l2_cached_prompt_tokens"] == l2
    assert ("moved", "l2") in events_of(harness)


@pytest.mark.parametrize("lost", [LOAD_BACK, WRITE_BACK, FETCH, STORE])
def test_a_lost_transfer_is_recomputed(lost: int) -> None:
    harness = make(use_l3=True, num_l2_pages=6)
    mover = harness.mover
    assert mover is not None
    carry_out = mover.carry_out
    mover.carry_out = lambda move, name: move[1] != lost and carry_out(move, name)  # type: ignore[method-assign]
    prompts = [[base + i for i in range(20)] for base in (0, 100, 200, 300)]
    for prompt in prompts + prompts:
        job = harness.submit(prompt, 2)
        harness.run()
        settle(harness)
        assert job.outputs == harness.model.generate(job)
    assert harness.check()["transfers_lost"] > 0


def test_the_store_brings_back_what_both_tiers_above_lost() -> None:
    harness = make(use_l3=True, num_l2_pages=6)
    prompts = [[base + i for i in range(20)] for base in (0, 100, 200, 300)]
    for prompt in prompts:
        harness.submit(prompt, 1)
        harness.run()
        settle(harness)
    l1, l2, l3 = hit(harness, prompts[0])
    assert (l1, l2, l3) == (0, 0, 20)
    job = harness.submit([*prompts[0], 5], 2)
    harness.run()
    assert job.admissions == [(21, 20)]
    assert job.outputs == harness.model.generate(job)
    assert harness.check()["l3_cached_prompt_tokens"] == 20


def test_a_prefix_is_demoted_prefetched_and_forgotten() -> None:
    harness = make()
    job = harness.submit(list(range(20)), 1)
    harness.run()
    settle(harness)
    assert hit(harness, job.prompt) == (20, 0, 0)
    assert harness.scheduler.move(ids(job.prompt), "l2").num_pages == 5
    assert hit(harness, job.prompt) == (0, 20, 0)
    assert harness.scheduler.move(ids(job.prompt), "l1").num_pages == 5
    settle(harness)
    assert hit(harness, job.prompt) == (20, 0, 0)
    assert harness.scheduler.move(ids(job.prompt), "none").num_pages == 10
    assert hit(harness, job.prompt) == (0, 0, 0)
    stats = harness.check()
    assert stats["free_pages"] == 12 and stats["free_l2_pages"] == 50


def test_demotion_waits_for_no_ack_and_its_pages_come_free_with_it() -> None:
    harness = make()
    harness.mover.delay = 1.0  # type: ignore[union-attr]
    job = harness.submit(list(range(20)), 1)
    harness.run()
    harness.scheduler.move(ids(job.prompt), "l2")
    assert harness.check()["in_flight_pages"] == 5
    harness.mover.delay = 0.0  # type: ignore[union-attr]
    settle(harness)
    assert harness.check()["free_pages"] == 12
    assert hit(harness, job.prompt) == (0, 20, 0)


def test_an_abort_while_its_pages_are_loaded_frees_all_once_they_are_acked() -> None:
    harness = make()
    job = harness.submit(list(range(20)), 1)
    harness.run()
    settle(harness)
    harness.scheduler.move(ids(job.prompt), "l2")
    harness.mover.delay = 1.0  # type: ignore[union-attr]
    again = harness.submit([*job.prompt, 1], 2)
    harness.step()
    assert harness.check()["in_flight_pages"] == 5
    assert [ended.status for ended in harness.abort(again.request_id)] == ["aborted"]
    harness.mover.delay = 0.0  # type: ignore[union-attr]
    settle(harness)
    stats = harness.check()
    assert stats["in_flight_pages"] == stats["owned_pages"] == stats["waiting"] == 0


@pytest.mark.parametrize("tier", ["l2", "l3"])
def test_pages_that_survived_a_restart_are_taken_in(tier: str) -> None:
    before = make(use_l3=True)
    job = before.submit(list(range(20)), 1)
    before.run()
    settle(before)
    assert job.ended is not None and before.mover is not None
    hashes = job.ended.page_hashes
    after = make(use_l3=True)
    assert after.mover is not None
    after.mover.l3 = before.mover.l3
    pages = np.arange(7, 12, dtype=np.int32)
    if tier == "l2":
        for i, page in enumerate(pages):
            after.mover.l2[page] = before.mover.l3[hashes[16 * i : 16 * i + 16]]
    owned = pages if tier == "l2" else np.array([], np.int32)
    assert after.scheduler.adopt(tier, ids(job.prompt), hashes, owned) == 5
    assert events_of(after) == [("stored", tier)] * 5
    assert sum(hit(after, job.prompt)) == 20
    again = after.submit([*job.prompt, 3], 3)
    after.run()
    assert again.admissions == [(21, 20)]
    assert again.outputs == after.model.generate(again)


@pytest.mark.parametrize(
    ("tier", "names", "pages", "message"),
    [
        ("l1", "good", [0, 1], "tier: 'l1' is not in"),
        ("l2", "bad", [0, 1], r"page_hashes\[0\]: is not the name"),
        ("l2", "short", [0, 1], "token_ids: 8 tokens are not 1 full pages"),
        ("l2", "good", [0], "pages: 1 pages for 2 names"),
        ("l2", "good", [0, 50], r"pages\[1\]: 50 is not a free L2 page"),
        ("l2", "good", [3, 3], "pages: a page appears twice"),
        ("l3", "good", [], "tier: 'l3' needs use_l3"),
    ],
)
def test_adopting_what_cannot_be_is_refused_whole(
    tier: str, names: str, pages: list[int], message: str
) -> None:
    source = make()
    job = source.submit(list(range(8)), 1)
    source.run()
    assert job.ended is not None
    hashes = {
        "good": job.ended.page_hashes,
        "bad": b"x" * 32,
        "short": job.ended.page_hashes[:16],
    }[names]
    harness = make()
    with pytest.raises(ValueError, match=message):
        harness.scheduler.adopt(tier, ids(job.prompt), hashes, np.array(pages, np.int32))
    assert harness.check()["free_l2_pages"] == 50


def test_an_unknown_target_and_a_store_without_l2_are_refused() -> None:
    with pytest.raises(ValueError, match="tier: 'l4' is not in"):
        make().scheduler.move(ids([1]), "l4")
    with pytest.raises(ValueError, match="use_l3: true needs num_l2_pages > 0"):
        make(use_l3=True, num_l2_pages=0)


@pytest.mark.parametrize("chunk", range(6))
def test_random_runs_over_three_tiers_never_read_foreign_kv(chunk: int) -> None:
    """Delays, losses, aborts, demotions and prefetches on pools too small for the sessions."""
    moves = np.zeros(4, np.int64)
    num_found = 0
    for seed in range(chunk * 20, chunk * 20 + 20):
        harness = run_at_random(seed)
        assert harness.mover is not None
        moves += harness.mover.num_by_kind
        num_found += harness.num_lower_tokens
    assert moves.min() > 20 and num_found > 200


def run_at_random(seed: int, *, overlap_loads: bool = False) -> Harness:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    vocab = rng.choice([2, 3, 50])
    num_pages = rng.choice([8, 12, 20, 40])
    config = cpp.SchedulerConfig(
        page_size=page_size,
        num_pages=num_pages,
        max_slots=rng.choice([1, 2, 4]),
        max_context_len=40,
        token_budget=rng.choice([1, 3, 8, 32]),
        lone_token_budget=seed % 3 * 12,
        lease_percent=rng.choice([0, 100]),
        num_l2_pages=rng.choice([1, 5, 20, 100]),
        use_l3=rng.random() < 0.6,
        overlap_loads=overlap_loads,
        spare_percent=rng.choice([0, 25, 100]),
    )
    harness = Harness(config, ToyModel(vocab, rng.choice([0, 10])), overlap=rng.random() < 0.5)
    mover = harness.mover = TierMover(config, harness.device, rng)
    mover.loss = rng.choice([0.0, 0.1, 0.3])
    history: list[list[int]] = []
    for _ in range(250):
        harness.now_ms += rng.choice([0, 1, 5])
        dice = rng.random()
        if dice < 0.35 and len(harness.live) < 12:
            stem = rng.choice(history) if history and rng.random() < 0.8 else []
            prompt = stem[: rng.randrange(len(stem) + 1)]
            prompt = (prompt + random_tokens(rng, rng.randrange(1, 12), vocab))[:36]
            room = min(40 - len(prompt), num_pages * page_size - len(prompt) + 1)
            if room >= 1:
                job = harness.submit(prompt, rng.randrange(1, min(room, 20) + 1))
                history = [*history[-15:], job.prompt]
        elif dice < 0.39 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.41 and harness.live:
            harness.fail_next = {rng.choice(sorted(harness.live))}
        elif dice < 0.47 and history:
            target = rng.choice(["l1", "l2", "none"])
            harness.scheduler.move(ids(rng.choice(history)), target)
        elif dice < 0.50 and history:
            harness.scheduler.lease(
                lease_id=rng.randrange(3),
                token_ids=ids(rng.choice(history)),
                until_ms=harness.now_ms + 30,
            )
        harness.step()
        harness.check()
    harness.run()
    mover.delay = 0.0
    mover.loss = 0.0
    settle(harness)
    for done in harness.jobs.values():
        expected = harness.model.generate(done)
        assert done.ended is not None
        if done.ended.status == "finished":
            assert done.outputs == expected
        else:
            assert done.outputs == expected[: len(done.outputs)]
    stats = harness.check()
    assert stats["owned_pages"] == stats["in_flight_pages"] == stats["in_flight_l2_pages"] == 0
    assert stats["held_pages"] == 0
    return harness


@pytest.mark.parametrize("chunk", range(4))
def test_no_load_and_no_other_engine_writes_where_a_step_in_flight_reads(chunk: int) -> None:
    """Branches inside a page, in a pool that loads of whole prefixes empty, two steps under way.

    A step copies the page it goes on from; that page may not be loaded into before it has run.
    """
    num_copies = num_loads = 0
    for seed in range(chunk * 15, chunk * 15 + 15):
        rng = random.Random(seed)
        config = cpp.SchedulerConfig(
            page_size=4,
            num_pages=rng.choice([14, 20, 30]),
            max_slots=4,
            max_context_len=54,
            token_budget=16,
            num_l2_pages=400,
        )
        harness = Harness(config, ToyModel(), overlap=True)
        mover = harness.mover = TierMover(config, harness.device, rng)
        mover.delay = 0.3
        stems = [random_tokens(rng, rng.randrange(4, 24)) for _ in range(3)]
        for _ in range(300):
            harness.now_ms += rng.choice([0, 1, 5])
            if rng.random() < 0.35 and len(harness.live) < 20:
                stem = rng.choice(stems)[: rng.randrange(1, 24)]
                harness.submit(
                    stem + random_tokens(rng, rng.randrange(1, 12)),
                    rng.randrange(1, 19),
                    priority=rng.randrange(2),
                    remote_prefill=rng.random() < 0.1,
                )
            for request_id in [i for i in sorted(harness.remote) if rng.random() < 0.3]:
                harness.end_remote(request_id, ok=True)
            harness.step()
            harness.check()
        for request_id in sorted(harness.live):
            harness.abort(request_id)
        num_copies += harness.check()["page_copies"]
        num_loads += mover.num_by_kind[LOAD_BACK]
    assert num_copies > 300 and num_loads > 500


def test_a_run_over_three_tiers_replays_on_mirrored_ranks_bit_for_bit() -> None:
    """What one rank recorded, moves and acks among it, four others repeat."""
    config = cpp.SchedulerConfig(
        page_size=2, num_pages=12, max_slots=2, max_context_len=40, num_l2_pages=10, use_l3=True
    )
    log = io.BytesIO()
    recorder = RecordingScheduler(config, log)
    harness = Harness(config, ToyModel(3), scheduler=recorder)
    rng = random.Random(5)
    harness.mover = TierMover(config, harness.device, rng)
    harness.mover.loss = 0.1
    history: list[list[int]] = [[]]
    for _ in range(400):
        harness.now_ms += 1
        if len(harness.live) < 4:
            prompt = (rng.choice(history)[:12] + random_tokens(rng, 3, 3))[-15:]
            history.append(harness.submit(prompt, 4).prompt)
        if rng.random() < 0.05:
            recorder.move(ids(rng.choice(history[1:])), rng.choice(["l1", "l2", "none"]))
        harness.step()
    harness.run()
    assert harness.num_lower_tokens > 0
    records = read_log(io.BytesIO(log.getvalue()))
    for _ in range(4):
        report = replay(records)
        assert report.first_difference == 0 and report.num_plans >= 400


def test_two_branches_that_survived_are_taken_in_one_after_the_other() -> None:
    before = make()
    stem = list(range(8))
    names: list[bytes] = []
    for tail in ([50, 51, 52, 53], [60, 61, 62, 63]):
        job = before.submit([*stem, *tail], 1)
        before.run()
        assert job.ended is not None
        names.append(job.ended.page_hashes)
    after = make()
    first = [*stem, 50, 51, 52, 53]
    second = [*stem, 60, 61, 62, 63]
    # The stem is known by then: its pages are passed over, whatever is said of them.
    for tokens, hashes, pages, num_new in (
        (first, names[0], [3, 4, 5], 3),
        (second, names[1], [3, 4, 6], 1),
    ):
        owned = np.array(pages, np.int32)
        assert after.scheduler.adopt("l2", ids(tokens), hashes, owned) == num_new
    assert hit(after, first) == hit(after, second) == (0, 12, 0)
    assert after.check()["cached_l2_pages"] == 4


def test_pages_are_named_as_finished_requests_report_them() -> None:
    harness = make()
    job = harness.submit(list(range(17)), 1, salt="tenant")
    harness.run()
    assert job.ended is not None
    tokens = ids(job.prompt)
    names = cpp.name_pages(tokens, page_size=4, salt="tenant")
    assert names == job.ended.page_hashes and len(names) == 64
    rest = cpp.name_pages(tokens[8:], page_size=4, salt="tenant", parent=names[16:32])
    assert rest == names[32:]
    assert cpp.name_pages(tokens, page_size=4) != names
    with pytest.raises(ValueError, match="parent: 3 bytes are neither a name"):
        cpp.name_pages(tokens, page_size=4, parent=b"abc")
    with pytest.raises(ValueError, match="page_size: 0 is not >= 1"):
        cpp.name_pages(tokens, page_size=0)
