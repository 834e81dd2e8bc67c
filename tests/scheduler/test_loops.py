# SPDX-License-Identifier: Apache-2.0
"""Sessions that take turns in a loop larger than the memory: some of them stay."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel

PAGE = 4
SESSION_TOKENS = 32
SESSIONS_THAT_FIT = 8


def make(eviction: str, num_l2_pages: int) -> Harness:
    config = cpp.SchedulerConfig(
        page_size=PAGE,
        num_pages=SESSIONS_THAT_FIT * SESSION_TOKENS // PAGE,
        max_slots=2,
        max_context_len=80,
        token_budget=64,
        eviction=eviction,
        attention_len=1000,
        num_l2_pages=num_l2_pages,
    )
    harness = Harness(config, ToyModel(vocab=1000))
    if num_l2_pages:
        harness.mover = TierMover(config, harness.device, random.Random(1))
        harness.mover.delay = 0.0
    return harness


def prompt_of(session: int) -> list[int]:
    return [session, *range(100, 100 + SESSION_TOKENS)]


def turn(harness: Harness, session: int) -> int:
    """Run one turn of a session; tokens found."""
    job = harness.submit(prompt_of(session), 2)
    harness.run()
    for _ in range(2):
        harness.now_ms += 1
        harness.step()
    harness.check()
    assert job.outputs == harness.model.generate(job)
    return job.admissions[0][1]


def found_share(harness: Harness, sessions: list[int]) -> float:
    return sum(turn(harness, session) for session in sessions) / len(sessions) / SESSION_TOKENS


@pytest.mark.parametrize("num_l2_pages", [0, 2 * SESSIONS_THAT_FIT * SESSION_TOKENS // PAGE])
@pytest.mark.parametrize("times", [1.5, 3])
def test_a_loop_larger_than_memory_keeps_a_share_of_its_sessions(
    times: float, num_l2_pages: int
) -> None:
    most = SESSIONS_THAT_FIT * (3 if num_l2_pages else 1)  # L2 is twice as large, and beside L1
    below = 2 * SESSIONS_THAT_FIT if num_l2_pages else SESSIONS_THAT_FIT
    loop = list(range(int(below * times)))
    harness = make("value", num_l2_pages)
    found_share(harness, loop * 3)
    share = found_share(harness, loop * 3)
    assert 0.6 * below / len(loop) <= share <= most / len(loop)
    recent = make("lru", num_l2_pages)
    found_share(recent, loop * 2)
    assert found_share(recent, loop) < 0.35, "least recently used keeps what is wanted last"


def test_sessions_that_stay_make_room_when_others_take_turns_instead() -> None:
    harness = make("value", 0)
    found_share(harness, list(range(24)) * 4)
    others = list(range(100, 106))
    found_share(harness, others * 6)
    assert found_share(harness, others) > 0.9


def test_while_all_of_them_fit_every_turn_is_found() -> None:
    harness = make("value", 0)
    few = list(range(SESSIONS_THAT_FIT - 1))
    found_share(harness, few)
    assert found_share(harness, few * 3) == pytest.approx(1.0)


def test_of_a_session_that_is_found_in_part_the_head_is_there() -> None:
    harness = make("value", 0)
    loop = list(range(24))
    found_share(harness, loop * 4)
    hits = []
    for session in loop:
        tokens = np.array(prompt_of(session), np.int32)
        depth = harness.scheduler.query_prefix(tokens).l1
        for length in range(PAGE, depth + 1, PAGE):
            assert harness.scheduler.query_prefix(tokens[:length]).l1 == length
        hits.append(depth)
    assert min(hits) == 0 and max(hits) >= SESSION_TOKENS
