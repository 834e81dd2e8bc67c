# SPDX-License-Identifier: Apache-2.0
"""On a device a prefill step gets its successor when it is nearly done, not at once: whoever comes
meanwhile would wait for one chunk more. On the host, never before its result."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.execution.executor import Step
from engine.loop.event_loop import RUN_AHEAD_TOKENS
from engine.loop.server import EngineServer
from tests.engine.test_tiers import PAGE_SIZE, SCRIPT, VOCAB, prompt_of, want
from tests.fakes.late_runner import LateRunner
from tests.fakes.live_engine import Collected, LiveEngine, make_request, serve
from tests.fakes.scripted_runner import ScriptedRunner

CHUNK = 2 * RUN_AHEAD_TOKENS
SIZES = {"vocab_size": VOCAB, "page_size": PAGE_SIZE, "num_pages": 256, "max_context_len": 600}


class Case:
    """An engine whose first step waits at the runner's gate; steps of `us_per_token` lately."""

    def __init__(self, tmp_path: Path, runner: ScriptedRunner, us_per_token: float) -> None:
        self.runner = runner
        self.us_per_token = us_per_token
        self.num_tokens: list[int] = []
        self.engine = LiveEngine(str(tmp_path), runner, token_budget=CHUNK, prepare=self._watch)

    def _watch(self, server: EngineServer) -> None:
        dispatch = server._executor.dispatch

        def watched(step: Step) -> None:
            self.num_tokens.append(len(step.forward.input_ids))
            dispatch(step)

        server._executor.dispatch = watched  # type: ignore[method-assign]
        server._loop._counters.prefill_us_per_token = self.us_per_token

    def serve(self, num_wanted: int) -> list[int]:
        """Tokens of the steps that were dispatched some time after so many of them were, with the
        first one held; then all goes on, to the right end."""
        seen: list[int] = []

        async def work(client: EngineClient) -> None:
            self.runner.gate.clear()
            request = make_request("r", prompt_of(1, 5 * CHUNK // 2), 4)
            reading = asyncio.create_task(Collected().read(client.generate(request)))
            while len(self.num_tokens) < num_wanted:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.2)
            seen.extend(self.num_tokens)
            self.runner.gate.set()
            got = await reading
            assert got.ids == want(prompt_of(1, 5 * CHUNK // 2), 4)

        serve(self.engine, work)
        return seen


def late_runner() -> LateRunner:
    return LateRunner(SCRIPT, delay_s=lambda: 0.0, drafts=False, **SIZES)


def test_a_step_nearly_done_gets_one_successor(tmp_path: Path) -> None:
    case = Case(tmp_path, late_runner(), us_per_token=1.0)
    assert case.serve(2) == [CHUNK, CHUNK]


@pytest.mark.parametrize("us_per_token", [0.0, 1e9])
def test_a_step_that_takes_long_or_nobody_knows_how_long_gets_none(
    tmp_path: Path, us_per_token: float
) -> None:
    case = Case(tmp_path, late_runner(), us_per_token)
    assert case.serve(1) == [CHUNK]


def test_the_time_comes_without_anybody_to_wake_the_loop(tmp_path: Path) -> None:
    """30 ms a step: the successor is dispatched later than the step, and nothing else happens."""
    case = Case(tmp_path, late_runner(), us_per_token=38e3 / CHUNK)
    assert case.serve(2) == [CHUNK, CHUNK]


def test_on_the_host_a_chunk_is_waited_for(tmp_path: Path) -> None:
    case = Case(tmp_path, ScriptedRunner(SCRIPT, **SIZES), us_per_token=1.0)
    assert case.serve(1) == [CHUNK]
