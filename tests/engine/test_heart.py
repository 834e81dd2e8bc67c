# SPDX-License-Identifier: Apache-2.0
"""Signs of life: a step that computes for minutes is alive, one that waits for ever is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.client import EngineClient
from engine.execution.batch import ForwardBatch
from engine.loop import heart
from engine.loop.heart import BEAT_MS, SILENT_STEP_MS, WORK_NS, Heart, Keeper
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner, hashed_script

VOCAB = 100


@pytest.fixture
def pulse() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def beats(fd: int) -> int:
    """Signs of life since the last call."""
    with contextlib.suppress(BlockingIOError):
        return os.eventfd_read(fd)
    return 0


def test_an_old_step_is_alive_only_while_it_is_seen_to_work(pulse: int) -> None:
    worked = [0]
    own = Heart(pulse, lambda: worked[0])
    old = SILENT_STEP_MS + 1
    # (the time, when the oldest step began, the work since the beat before, whether it beats)
    for now_ms, began_ms, more_ns, is_alive in [
        (0, None, 0, True),
        (1, None, 0, False),  # not so often
        (BEAT_MS, None, 0, True),
        (SILENT_STEP_MS, 0, 0, True),  # not old
        (old + BEAT_MS, 0, 0, False),
        (old + 2 * BEAT_MS, 0, WORK_NS, True),
        (old + 2 * BEAT_MS + 1, 0, 9 * WORK_NS, False),  # not so often
        (old + 3 * BEAT_MS, 0, 0, True),  # the work before counts, it was not told
        (old + 4 * BEAT_MS, 0, 0, False),
        (old + 5 * BEAT_MS, 0, WORK_NS - 1, False),
        (old + 6 * BEAT_MS, 0, 1, True),  # slow, and at work
        (old + 60 * 60_000, 0, WORK_NS, True),  # an hour later still
        (old + 60 * 60_000 + BEAT_MS, 0, 0, False),
        (old + 60 * 60_000 + BEAT_MS, old + 60 * 60_000, 0, True),  # the next step has begun
    ]:
        worked[0] += more_ns
        own.beat(now_ms, began_ms)
        assert (beats(pulse) == 1) is is_alive, (now_ms, began_ms, more_ns)


def test_nobody_who_watches_is_nobody_to_tell() -> None:
    Heart(None, lambda: 1 // 0).beat(1, None)


class LongStep(ScriptedRunner):
    """Its first step computes, or waits, until it is let go."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__(hashed_script(VOCAB), vocab_size=VOCAB)
        self.computes = computes
        self.began, self.may_end = threading.Event(), threading.Event()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.began.set()
        if self.computes:
            while not self.may_end.is_set():
                sum(range(1000))
        assert self.may_end.wait(60)
        return super().forward(batch)


@pytest.mark.parametrize("computes", [True, False])
def test_a_long_step_of_a_live_engine_is_told_from_one_that_hangs(
    tmp_path: Path, pulse: int, monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    monkeypatch.setattr(heart, "SILENT_STEP_MS", -1)  # every step is old at once
    monkeypatch.setattr(heart, "BEAT_MS", 0)  # and every turn of the loop may tell
    runner = LongStep(computes=computes)

    async def work(client: EngineClient) -> None:
        await client.stats()
        assert beats(pulse) > 0, "an engine with nothing to do is alive"
        running = asyncio.create_task(run(client, make_request("a", [3, 4, 5], 2)))
        assert await asyncio.to_thread(runner.began.wait, 60)
        signs = 0
        for _ in range(10_000):  # each look turns the loop
            beats(pulse)
            for _ in range(5):
                await client.stats()
            signs = beats(pulse)
            if (signs > 0) is computes:
                break
        assert (signs > 0) is computes
        runner.may_end.set()
        assert len((await running).ids) == 2
        for _ in range(10_000):  # a step that was begun too early may still be under way
            await client.stats()
            if beats(pulse) > 0:
                break
        else:
            pytest.fail("it does not go on")

    try:
        serve(LiveEngine(str(tmp_path), runner, keeper=Keeper(heartbeat_fd=pulse)), work)
    finally:
        runner.may_end.set()
