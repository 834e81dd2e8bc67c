# SPDX-License-Identifier: Apache-2.0
"""The store says that it let pages go: the scheduler believes it, and stores again what it has."""

from __future__ import annotations

import io
import random

import pytest

import _scheduler as cpp
from engine.loop.replay import RecordingScheduler, read_log, replay
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel
from tests.scheduler.test_moves import PAGE, finish, hit, ids, make, parts, settle

STORE = 3
NAME_BYTES = 16


def names_of(tokens: list[int]) -> list[bytes]:
    raw = cpp.name_pages(ids(tokens), page_size=PAGE)
    return [raw[at : at + NAME_BYTES] for at in range(0, len(raw), NAME_BYTES)]


def let_go(harness: Harness, names: list[bytes]) -> int:
    """The store has these no longer, and says so."""
    assert harness.mover is not None
    for name in names:
        harness.mover.l3.pop(name, None)
    num_lost = harness.scheduler.lose_l3(b"".join(names))
    harness.check()
    return num_lost


def test_what_l2_has_of_it_is_stored_again_heads_first() -> None:
    harness = make()
    job = finish(harness, 20)
    mover = harness.mover
    assert mover is not None
    names = names_of(job.prompt)
    assert set(mover.l3) == set(names)
    num_stores = mover.num_by_kind[STORE]
    assert let_go(harness, names[2:]) == 3
    plan = harness.scheduler.next_plan(harness.now_ms)
    assert [row[1] for row in plan.moves.tolist()] == [STORE] * 3
    assert [name.tobytes() for name in plan.move_hashes] == names[2:]
    mover.take(plan)
    settle(harness)
    assert mover.num_by_kind[STORE] == num_stores + 3
    assert set(mover.l3) == set(names)
    assert let_go(harness, []) == 0


def test_what_nobody_has_any_longer_is_missing() -> None:
    harness = make()
    tokens = finish(harness, 20).prompt
    harness.scheduler.move(ids(tokens), "l3")
    settle(harness)
    assert hit(harness, tokens) == (0, 0, 20)
    names = names_of(tokens)
    assert let_go(harness, names[3:]) == 2
    assert hit(harness, tokens) == (0, 0, 12)
    assert parts(harness.scheduler.move(ids(tokens), "l3")) == (12, 0, 8)
    settle(harness)
    assert let_go(harness, names) == 3
    assert hit(harness, tokens) == (0, 0, 0)
    again = harness.submit([*tokens, 7], 2)
    harness.run()
    assert again.outputs == harness.model.generate(again)


def test_a_move_to_the_store_brings_it_what_l1_alone_has() -> None:
    harness = make(num_l2_pages=5)
    tokens = finish(harness, 20).prompt
    other = finish(harness, 16, base=500).prompt  # takes the room of the first in L2
    names = names_of(tokens)
    assert harness.mover is not None and set(names) <= set(harness.mover.l3)
    assert let_go(harness, names[1:]) == 4
    settle(harness)
    assert parts(harness.scheduler.move(ids(tokens), "l3"))[2] == 0
    settle(harness, steps=40, ms=20)
    assert set(names) | set(names_of(other)) <= set(harness.mover.l3)
    assert hit(harness, tokens) == (0, 0, 20)


def test_a_page_that_is_being_fetched_is_left_to_its_fetch() -> None:
    harness = make()
    tokens = finish(harness, 20).prompt
    harness.scheduler.move(ids(tokens), "l3")
    settle(harness)
    mover = harness.mover
    assert mover is not None
    mover.delay = 1.0
    harness.scheduler.move(ids(tokens), "l2")
    harness.step()
    names = names_of(tokens)
    assert let_go(harness, names) == 0
    mover.delay = 0.0
    settle(harness)
    assert hit(harness, tokens) == (0, 0, 0)


def test_names_that_mean_nothing_change_nothing() -> None:
    harness = make()
    tokens = finish(harness, 20).prompt
    before = hit(harness, tokens)
    assert harness.scheduler.lose_l3(bytes(NAME_BYTES) + b"x" * NAME_BYTES) == 0
    with pytest.raises(ValueError, match="page_hashes: 17 bytes are not 16 a page"):
        harness.scheduler.lose_l3(bytes(17))
    assert hit(harness, tokens) == before
    assert make(use_l3=False).scheduler.lose_l3(bytes(NAME_BYTES)) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_store_that_forgets_all_the_time_changes_no_token(seed: int) -> None:
    rng = random.Random(seed)
    config = cpp.SchedulerConfig(
        page_size=PAGE,
        num_pages=20,
        max_slots=2,
        max_context_len=80,
        token_budget=32,
        num_l2_pages=rng.choice([6, 50]),
        use_l3=True,
        probe_l3=True,
    )
    log = io.BytesIO()
    harness = Harness(config, ToyModel(), scheduler=RecordingScheduler(config, log))
    mover = harness.mover = TierMover(config, harness.device, rng)
    history = [rng.randrange(40) for _ in range(60)]
    jobs = []
    for turn in range(120):
        harness.now_ms += rng.choice([1, 30])
        if turn % 5 == 0:
            start = rng.choice([0, 0, 100])
            prompt = [start + token for token in history[: rng.randrange(5, 60)]]
            jobs.append(harness.submit(prompt, rng.randint(1, 4)))
        if rng.random() < 0.1:
            tokens = rng.choice(jobs).prompt
            harness.scheduler.move(ids(tokens), rng.choice(["l1", "l2", "l3"]))
        if rng.random() < 0.3 and mover.l3:
            let_go(harness, rng.sample(sorted(mover.l3), min(3, len(mover.l3))))
        harness.step()
        harness.check()
    harness.run()
    for job in jobs:
        assert job.outputs == harness.model.generate(job)
    log.seek(0)
    replay(read_log(log))
