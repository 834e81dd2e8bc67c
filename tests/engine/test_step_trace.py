# SPDX-License-Identifier: Apache-2.0
"""engine.step_trace: a line a step, which adds up to what was asked for, in the order of time."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import TiersConfig
from engine.errors import ConfigError
from engine.execution.steps import Step, StepResult
from engine.loop.log_file import LogFile
from engine.loop.server import EngineServer
from tests.engine.test_tiers import SCRIPT, VOCAB, prompt_of
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner

TIMES = ["launch_us", "launched_us", "done_us", "commit_us"]


def traced(tmp_path: Path, path: str) -> LiveEngine:
    runner = ScriptedRunner(SCRIPT, vocab_size=VOCAB)
    return LiveEngine(str(tmp_path), runner, token_budget=40, step_trace=path)


def test_every_step_has_a_line_with_its_tokens_and_times(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = traced(tmp_path, str(path))

    async def work(client: EngineClient) -> None:
        await run(client, make_request("a", prompt_of(1, 100), 6))

    serve(engine, work)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # 100 tokens in steps of 40, of which the last samples; each later step computes one.
    assert [line["tokens"] for line in lines[:3]] == [40, 40, 20]
    assert [line["sampled"] for line in lines] == [0, 0, 1, *[1] * 5, *[0] * (len(lines) - 8)]
    assert all(line["rows"] == 1 and line["error"] is None for line in lines)
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    for line in lines:
        times = [line[name] for name in TIMES]
        assert times == sorted(times) and line["plan_us"] <= line["launch_us"]
    assert [line["done_us"] for line in lines] == sorted(line["done_us"] for line in lines)


def test_a_step_was_planned_before_its_launch_though_the_loop_goes_on_late(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = traced(tmp_path, str(path))

    def prepare(server: EngineServer) -> None:
        executor = server._executor
        dispatch = executor.dispatch

        def late(step: Step) -> None:
            num_ended = engine.runner.num_steps  # type: ignore[attr-defined]
            dispatch(step)
            while engine.runner.num_steps == num_ended:  # type: ignore[attr-defined]
                time.sleep(0.001)
            time.sleep(0.003)

        executor.dispatch = late  # type: ignore[method-assign]

    engine._prepare = prepare

    async def work(client: EngineClient) -> None:
        await run(client, make_request("a", prompt_of(1, 9), 3))

    serve(engine, work)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) >= 3
    assert all(line["plan_us"] <= line["launch_us"] for line in lines)


@pytest.mark.parametrize("field", ["step_trace", "tiers.record_inputs"])
def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path, field: str) -> None:
    path = str(tmp_path / "nowhere" / "steps.jsonl")
    engine = traced(tmp_path, path if field == "step_trace" else "")
    if field != "step_trace":
        tiers = TiersConfig(record_inputs=path)
        engine.config = dataclasses.replace(engine.config, tiers=tiers)
    wanted = rf"engine.{field} = '{path}': allowed: a file that can be written \(hint: .*No such"
    with pytest.raises(ConfigError, match=wanted):
        engine.__enter__()


def test_a_full_disk_ends_what_is_written_to_it_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it shows when a line is written or when the last ones are flushed."""
    monkeypatch.setattr("engine.loop.event_loop.HOUSEKEEPING_MS", 0)  # a flush each turn
    engine = traced(tmp_path, "/dev/full")
    tiers = TiersConfig(record_inputs="/dev/full")
    engine.config = dataclasses.replace(engine.config, tiers=tiers)

    async def work(client: EngineClient) -> None:
        assert len((await run(client, make_request("a", prompt_of(1, 100), 6))).ids) > 0
        assert len((await run(client, make_request("b", prompt_of(2, 9), 6))).ids) > 0

    serve(engine, work)
    assert engine.error is None
    said = sorted(record.getMessage() for record in caplog.records)
    names = ["engine.step_trace", "engine.tiers.record_inputs"]
    assert [line.split(" ends: /dev/full: ")[0] for line in said] == names


def test_what_no_longer_fits_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """When it is written, flushed or, at the latest, closed."""
    for num_bytes, acts in ((1 << 20, 0), (10, 1), (10, 2)):
        file = LogFile("engine.of_this_test", "/dev/full", appends=True)
        file.write(b"x" * num_bytes)
        for act in (file.flush, file.close)[acts - 1 :] if acts else ():
            act()
        file.write(b"y")
        file.flush()
        file.close()
        (said,) = (record.getMessage() for record in caplog.records)
        assert said.startswith("engine.of_this_test ends: /dev/full: ")
        caplog.clear()


@pytest.mark.parametrize("is_traced", [True, False])
def test_steps_are_stamped_for_whoever_asks_alone(tmp_path: Path, is_traced: bool) -> None:
    spans: list[tuple[int, int, int]] = []

    def watch(server: EngineServer) -> None:
        take = server._executor.take

        def watched() -> StepResult | None:
            result = take()
            if result is not None:
                spans.append(result.span)
            return result

        server._executor.take = watched  # type: ignore[method-assign]

    engine = traced(tmp_path, str(tmp_path / "steps.jsonl") if is_traced else "")
    engine._prepare = watch

    async def work(client: EngineClient) -> None:
        await run(client, make_request("a", prompt_of(1, 50), 3))

    serve(engine, work)
    assert len(spans) >= 4
    if is_traced:
        assert all(0 < begun <= launched <= done for begun, launched, done in spans)
    else:
        assert set(spans) == {(0, 0, 0)}
