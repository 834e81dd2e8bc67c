# SPDX-License-Identifier: Apache-2.0
"""`prefill_us_per_token` is measured on prefill alone: decode rows, each of which reads a context
and the weights for one token, would say that a token is dear to compute."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.execution.executor import Step
from engine.loop.event_loop import PREFILL_STEP_TOKENS
from engine.loop.server import EngineServer
from tests.engine.test_tiers import SCRIPT, VOCAB, prompt_of
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner

NUM_ROWS = PREFILL_STEP_TOKENS + 6


def build(tmp_path: Path, steps: list[int], **options: object) -> LiveEngine:
    """An engine that notes the tokens of each step; budget for all rows and a prefill."""

    def watch(server: EngineServer) -> None:
        dispatch = server._executor.dispatch

        def watched(step: Step) -> None:
            steps.append(len(step.forward.input_ids))
            dispatch(step)

        server._executor.dispatch = watched  # type: ignore[method-assign]

    runner = ScriptedRunner(SCRIPT, vocab_size=VOCAB, num_pages=1024, max_slots=NUM_ROWS)
    return LiveEngine(
        str(tmp_path), runner, max_slots=NUM_ROWS, token_budget=256, prepare=watch, **options
    )  # type: ignore[arg-type]


async def cost(client: EngineClient) -> float:
    return (await client.stats())["prefill_us_per_token"]


@pytest.mark.parametrize("num_tokens", [PREFILL_STEP_TOKENS - 1, PREFILL_STEP_TOKENS])
def test_a_step_of_enough_prefill_says_it(tmp_path: Path, num_tokens: int) -> None:
    async def work(client: EngineClient) -> None:
        await run(client, make_request("r", prompt_of(1, num_tokens), 1))
        assert (await cost(client) > 0) is (num_tokens == PREFILL_STEP_TOKENS)

    serve(build(tmp_path, []), work)


@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_many_streams_say_nothing_of_it(tmp_path: Path, speculation: str) -> None:
    steps: list[int] = []
    engine = build(tmp_path, steps, speculation=speculation)

    async def work(client: EngineClient) -> None:
        await run(client, make_request("prefill", prompt_of(1, 100), 1))
        before = await cost(client)
        assert before > 0
        steps.clear()
        engine.runner.gate.clear()  # type: ignore[attr-defined]
        requests = [
            make_request(f"r{i}", prompt_of(2 + i, 1), 20, sampling={"ignore_eos": True})
            for i in range(NUM_ROWS)
        ]
        reading = [asyncio.create_task(run(client, request)) for request in requests]
        while (await client.stats())["requests_received"] <= NUM_ROWS:
            await asyncio.sleep(0.005)
        engine.runner.gate.set()  # type: ignore[attr-defined]
        await asyncio.gather(*reading)
        assert max(steps) >= PREFILL_STEP_TOKENS
        assert await cost(client) == before

    serve(engine, work)
