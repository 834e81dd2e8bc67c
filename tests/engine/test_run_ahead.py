# SPDX-License-Identifier: Apache-2.0
"""On a device a prefill step gets its successor when it is nearly done, not at once: whoever comes
meanwhile would wait for one chunk more. On the host, never before its result."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.client import EngineClient
from engine.execution.executor import Step
from engine.execution.steps import StepResult
from engine.loop.commit import DispatchedStep
from engine.loop.counters import Counters
from engine.loop.event_loop import RUN_AHEAD_MS, RUN_AHEAD_TOKENS, EngineLoop
from engine.loop.server import EngineServer
from engine.sampling.params import SampleBatch
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
        server._loop._counters.last_us_per_token = self.us_per_token

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


class Alone:
    """A loop whose steps are told of by hand, on a clock that only the test moves.

    Nothing is ever there to run; `looks` are the times at which it asked for a plan.
    """

    def __init__(self, us_per_token: float) -> None:
        self.now_ms = 1000
        self.looks: list[int] = []
        self.results: deque[StepResult] = deque()
        self.ms_of_a_flush = 0
        nothing: Any = lambda *_, **__: []  # noqa: E731
        none = SimpleNamespace(step_id=-1, admissions=[])

        def next_plan(now_ms: int) -> Any:
            self.looks.append(now_ms)
            return none

        def flush() -> None:
            self.now_ms += self.ms_of_a_flush

        parts: dict[str, Any] = {
            "desk": SimpleNamespace(forget_old=nothing, tell_starts=nothing),
            "control": SimpleNamespace(
                take_acks=nothing,
                take_bad_loads=nothing,
                tell_costs=nothing,
                advance=nothing,
                next_plan=next_plan,
            ),
            "grammars": SimpleNamespace(serve=nothing, next_deadline_ms=None),
            "outbox": SimpleNamespace(forget_silent=nothing, flush=flush),
            "executor": SimpleNamespace(
                is_async=True, take=lambda: self.results.popleft() if self.results else None
            ),
            "builder": SimpleNamespace(keep_deltas=nothing),
        }
        counters = Counters(last_us_per_token=us_per_token)
        self.loop = EngineLoop(
            **parts,
            counters=counters,
            speculation=SimpleNamespace(),  # type: ignore[arg-type]
            trace=None,
            max_samples=1,
            vocab_size=32,
            now_ms=lambda: self.now_ms,
        )
        self.loop.turn()  # housekeeping is not due for a second

    def dispatch(self, step_id: int, num_tokens: int) -> None:
        """A step without rows, as if it had so many tokens."""
        no_rows = SampleBatch(
            rows=[],
            slots=np.empty(0, np.int64),
            positions=np.empty(0, np.int64),
            draft_places=np.empty(0, np.int64),
        )
        step = DispatchedStep(
            step_id=step_id,
            requests=[],
            samples=np.empty(0, np.uint8),
            num_done=np.empty(0, np.int32),
            sampling=no_rows,
            drafts=[],
            num_tokens=num_tokens,
            num_prefill_tokens=num_tokens,
            dispatched_ms=self.now_ms,
            loads=[],
        )
        self.loop._in_flight.append(step)

    def turn_at(self, now_ms: int) -> list[int]:
        """Turn once; when it asked for plans in that turn."""
        self.now_ms = now_ms
        self.looks.clear()
        self.loop.turn()
        return list(self.looks)


def test_the_moment_is_not_missed_between_a_turn_and_the_wait_behind_it() -> None:
    case = Alone(us_per_token=100.0)
    case.dispatch(1, 1000)
    nearly_ms = 1000 + 100 - RUN_AHEAD_MS
    case.ms_of_a_flush = 2
    assert case.turn_at(nearly_ms - 1) == [], "too early"
    assert case.loop.wait_ms() == 0, "now it is not, and nobody has tried"
    assert case.turn_at(nearly_ms + 1) == [nearly_ms + 1]
    assert case.loop.wait_ms() > 500, "it was tried: nothing is to be waited for but the step"


def test_a_small_step_with_nothing_behind_it_leaves_the_loop_asleep() -> None:
    case = Alone(us_per_token=1000.0)
    case.dispatch(1, RUN_AHEAD_TOKENS)
    waits = 0
    while case.now_ms < 1500:
        assert case.turn_at(case.now_ms) == [case.now_ms]
        wait_ms = case.loop.wait_ms()
        assert wait_ms > 0
        case.now_ms += wait_ms
        waits += 1
    assert waits <= 2


def test_a_long_prompt_s_steps_take_ever_longer_and_each_is_held_against_the_last() -> None:
    case = Alone(us_per_token=100.0)
    ended_ms = 1000
    for step_id, took_ms in enumerate((100, 150, 200, 250), 1):
        case.dispatch(step_id, 1000)
        case.results.append(
            StepResult(
                step_id=step_id, sampled=None, forward_ms=took_ms, mask_wait_ms=0.0, sample_ms=0.0
            )
        )
        ended_ms += took_ms
        case.turn_at(ended_ms)
        case.dispatch(step_id + 1, 1000)
        nearly_ms = ended_ms + took_ms - RUN_AHEAD_MS
        assert case.turn_at(nearly_ms - 1) == [] and case.turn_at(nearly_ms) == [nearly_ms]
        case.loop._in_flight.clear()


def test_a_step_that_began_late_is_nearly_done_later() -> None:
    """The one before it took longer than steps did lately, as behind a long prefix."""
    case = Alone(us_per_token=100.0)
    case.dispatch(1, 1000)
    case.now_ms = 1000 + 100 - RUN_AHEAD_MS
    case.dispatch(2, 1000)
    case.results.append(
        StepResult(step_id=1, sampled=None, forward_ms=100.0, mask_wait_ms=0.0, sample_ms=0.0)
    )
    assert case.turn_at(1400) == [], "the second has just begun"
    nearly_ms = 1400 + 100 - RUN_AHEAD_MS
    assert case.loop.wait_ms() == nearly_ms - 1400
    assert case.turn_at(nearly_ms - 1) == [] and case.turn_at(nearly_ms) == [nearly_ms]
