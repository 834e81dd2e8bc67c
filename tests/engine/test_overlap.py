# SPDX-License-Identifier: Apache-2.0
"""Two steps under way at a time change nothing but the speed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from tests.fakes.flight_watch import FlightWatch
from tests.fakes.live_engine import EOS, LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner, expected_tokens, hashed_script

VOCAB = 64
BANNED = (0, 1)


def test_the_next_step_is_dispatched_before_the_running_one_is_committed(tmp_path: Path) -> None:
    runner = ScriptedRunner(hashed_script(VOCAB), vocab_size=VOCAB)
    runner.hold_at = 1

    async def work(client: EngineClient) -> None:
        request = make_request("r", [5, 6], 6, sampling={"ignore_eos": True})
        task = asyncio.create_task(run(client, request))
        while not runner.is_held:
            await asyncio.sleep(0.001)
        while (stats := await client.stats())["output_tokens"] < 1:
            await asyncio.sleep(0.001)
        assert stats["steps"] == 3, "one committed, one running, one waiting behind it"
        runner.gate.set()
        assert len((await task).ids) == 6

    serve(LiveEngine(str(tmp_path), runner), work)


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_with_aborts_and_retractions_get_the_tokens_of_a_plain_loop(
    tmp_path: Path, seed: int
) -> None:
    """Shared prefixes, a pool that is too small, aborts at random times, requests at any time.

    No transfer between tiers may meet a step under way, even where it did no harm this time.
    """
    rng = random.Random(seed)
    script = hashed_script(VOCAB)
    runner = ScriptedRunner(script, vocab_size=VOCAB, num_pages=rng.choice([20, 30, 80]))
    stems = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(4, 24))] for _ in range(3)]

    async def one(client: EngineClient, number: int) -> None:
        await asyncio.sleep(rng.random() * 0.2)
        tail = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 12))]
        prompt = rng.choice(stems)[: rng.randrange(1, 24)] + tail
        num = rng.randrange(1, 30)
        task = asyncio.create_task(
            run(client, make_request(f"r{number}", prompt, num, priority=rng.randrange(2)))
        )
        is_aborted = rng.random() < 0.25
        if is_aborted:
            await asyncio.sleep(rng.random() * 0.05)
            await client.abort(f"r{number}")
        result = await task
        want = expected_tokens(script, prompt, num, stop_ids=[EOS], banned_ids=BANNED)
        assert result.finished is not None and result.finished.error_code is None
        if result.finished.reason is api.FinishReason.ABORTED:
            assert is_aborted and result.ids == want[: len(result.ids)]
        else:
            assert result.ids == want

    async def work(client: EngineClient) -> None:
        await asyncio.gather(*(one(client, number) for number in range(25)))
        stats = await client.stats()
        assert stats["owned_pages"] == stats["in_flight_pages"] == 0
        assert stats["free_pages"] + stats["cached_pages"] == stats["num_pages"]

    engine = LiveEngine(
        str(tmp_path), runner, prepare=lambda server: FlightWatch(server, runner, 4)
    )
    serve(engine, work)
