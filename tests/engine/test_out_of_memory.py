# SPDX-License-Identifier: Apache-2.0
"""A step for which the device has no memory: it fails its requests and no others, and what it had
made is gone before the next one, which may need it. Here the device is the CPU."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.execution import device_launcher, executor
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.executor import Executor
from engine.execution.model_runner import build_model_runner
from engine.models import deepseek
from engine.sampling.params import RowSampling
from kernels.step_work import StepWork
from tests.engine.test_device_launcher import _PAGE, _PAGES, _SLOTS, _device_runner, _ids, _step
from tests.fakes.device_runner import tiny_config
from tests.fakes.live_engine import Collected, LiveEngine, make_request, run, serve
from tests.fakes.tiny_deepseek import write_tiny_deepseek

_TEXT = "CUDA out of memory. Tried to allocate 1.50 GiB"
_SAMPLING = {"ignore_eos": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = write_tiny_deepseek(tmp_path_factory.mktemp("tiny"))
    return tiny_config(
        directory, page_size=_PAGE, num_pages=_PAGES, max_slots=_SLOTS, speculation="ngram"
    )


class ShortOfMemory:
    """Stands for the layers' second half: raises once, in a step that `fails` says, by tokens.

    It waits in one that `holds` says, until `may_go_on`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: Callable[[int], bool] = lambda num_tokens: False
        self.num_raised = self.num_before = 0
        self.holds: Callable[[int], bool] = lambda num_tokens: False
        self.is_held, self.may_go_on = threading.Event(), threading.Event()
        self._feed_forward = deepseek.feed_forward
        monkeypatch.setattr(deepseek, "feed_forward", self)

    def __call__(self, residual: torch.Tensor, *args: Any) -> torch.Tensor:
        if self.holds(residual.shape[0]):
            self.is_held.set()
            assert self.may_go_on.wait(60)
        if self.fails(residual.shape[0]) and self.num_before > 0:
            self.num_before -= 1
        elif self.fails(residual.shape[0]):
            self.fails = lambda num_tokens: False
            self.num_raised += 1
            raise torch.OutOfMemoryError(_TEXT)
        return self._feed_forward(residual, *args)

    def after(self, num_layers: int, fails: Callable[[int], bool]) -> None:
        """In that step, when so many layers are through."""
        self.fails, self.num_before = fails, num_layers


def _num_works() -> int:
    return sum(type(each) is StepWork for each in gc.get_objects())


def _num_tensors() -> int:
    """Those of size: the newest step's rows stay for a while."""
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(each.numel() > 64 for each in found)


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_step_without_memory_fails_its_requests_alone_and_keeps_nothing(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    short = ShortOfMemory(monkeypatch)
    # pytest keeps what is logged, with the frames of the error in it.
    monkeypatch.setattr(executor.logger, "disabled", True)
    prompts = {name: _ids(60 + place, 7 + place) for place, name in enumerate("abc")}
    expected: dict[str, list[int]] = {}

    async def ask(client: EngineClient, name: str, run_name: str) -> Collected:
        request = make_request(f"{name} {run_name}", prompts[name], 200, sampling=_SAMPLING)
        return await run(client, request)

    async def undisturbed(client: EngineClient) -> None:
        for name in prompts:
            expected[name] = (await ask(client, name, "expected")).ids

    async def work(client: EngineClient) -> None:
        await run(client, make_request("first", _ids(50, 1)))  # what is kept for good comes once
        gc.collect()
        before = _num_tensors()
        num_requests = (await client.stats())["requests_received"]
        short.holds = lambda num: True
        short.fails = (lambda num: num > 2) if where == "prefill" else (lambda num: num == 2)
        asking = asyncio.gather(*(ask(client, name, "short") for name in prompts))
        while (await client.stats())["requests_received"] < num_requests + len(prompts):
            await asyncio.sleep(0.005)
        short.may_go_on.set()
        results = await asking
        assert short.num_raised == 1
        num_failed = 0
        for name, result in zip(prompts, results, strict=True):
            assert result.finished is not None
            if result.finished.reason != "error":
                assert result.ids == expected[name]
                continue
            num_failed += 1
            assert result.finished.error_code == "step_failed"
            assert f"OutOfMemoryError: {_TEXT}" in str(result.finished.error_message)
        assert num_failed == max_slots  # those in the step; the others wait for a slot
        stats = await client.stats()
        assert stats["owned_pages"] == stats["in_flight_pages"] == 0
        assert stats["free_pages"] + stats["cached_pages"] == stats["num_pages"]
        await _until(lambda: _num_works() == 0 and _num_tensors() <= before)
        for name in prompts:
            assert (await ask(client, name, "after")).ids == expected[name]

    max_slots = 1 if where == "prefill" else 2
    serve(LiveEngine(str(tmp_path / "host"), build_model_runner(config)), undisturbed)
    run_dir = str(tmp_path / "device")
    engine = LiveEngine(run_dir, _device_runner(config), max_slots=max_slots, token_budget=48)
    gc.disable()
    try:
        serve(engine, work)
    finally:
        gc.enable()


@pytest.mark.parametrize("are_apart", [True, False])
def test_a_prompt_without_memory_costs_nobody_beside_it_a_token(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_apart: bool
) -> None:
    """Whether the step's decode rows are computed beside its prefill or with it, and wherever in
    it the memory ends."""
    short = ShortOfMemory(monkeypatch)
    monkeypatch.setattr(device_launcher, "are_better_apart", lambda batch, num_prefill: are_apart)
    streams = {name: _ids(9 + 4 * place, 7 + place) for place, name in enumerate("abc")}
    expected: dict[str, list[int]] = {}

    async def undisturbed(client: EngineClient) -> None:
        for name in streams:
            expected[name] = (await run(client, stream(name))).ids

    def stream(name: str) -> api.GenerateRequest:
        return make_request(name, streams[name], 90, sampling=_SAMPLING)

    async def work(client: EngineClient) -> None:
        short.holds = lambda num: 3 <= num <= 4  # a row each, padded
        running = [asyncio.create_task(run(client, stream(name))) for name in streams]
        await _until(short.is_held.is_set)
        stats = await client.stats()
        assert stats["running"] == len(streams)
        num_steps = stats["steps"]
        short.may_go_on.set()
        while (await client.stats())["steps"] < num_steps + 3:  # all are decoded
            await asyncio.sleep(0.005)
        for number in range(6):
            short.after(number % 3, lambda num: num > 8)
            late = await run(client, make_request(f"late {number}", _ids(70, 90 + number), 2))
            assert late.finished is not None and late.finished.error_code == "step_failed"
            assert f"OutOfMemoryError: {_TEXT}" in str(late.finished.error_message)
        assert short.num_raised == 6
        for name, task in zip(streams, running, strict=True):
            assert (await task).ids == expected[name]
        stats = await client.stats()
        assert stats["owned_pages"] == stats["in_flight_pages"] == 0
        assert stats["steps_failed"] == 6
        assert (await run(client, stream("a"))).ids == expected["a"]

    serve(LiveEngine(str(tmp_path / "host"), build_model_runner(config)), undisturbed)
    run_dir = str(tmp_path / "device")
    serve(LiveEngine(run_dir, _device_runner(config), max_slots=4, token_budget=48), work)


def test_a_failed_step_s_frames_are_gone_when_its_result_is_there(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the step's tensors; no collection of garbage comes in between."""
    short = ShortOfMemory(monkeypatch)
    monkeypatch.setattr(executor.logger, "disabled", True)
    runner = _device_runner(config)
    running = Executor(runner, lambda: None)
    try:
        gc.collect()
        gc.disable()
        before = _num_works()
        short.fails = lambda num_tokens: True
        running.dispatch(_step(runner, [0, 1], {0: 3, 1: 4}, 1))
        running.dispatch(_step(runner, [0, 1], {0: 3, 1: 4}, 2))
        results = []
        deadline = time.monotonic() + 60
        while len(results) < 2 and time.monotonic() < deadline:
            found = running.take()
            results += [found] if found is not None else []
            time.sleep(0.001)
        assert [result.error is None for result in results] == [False, True]
        assert _num_works() == before
    finally:
        gc.enable()
        running.close()


def test_page_table_entries_of_a_step_that_failed_before_them_come_with_the_next(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are of requests without a row in that step, which go on; each is told once."""
    runner = _device_runner(config)
    launcher = runner.step_launcher()
    upload, is_short = launcher._ring.upload, [True]

    def short_of_memory(values: np.ndarray[Any, Any]) -> torch.Tensor:
        if is_short[0]:
            raise torch.OutOfMemoryError(_TEXT)
        return upload(values)

    monkeypatch.setattr(launcher._ring, "upload", short_of_memory)
    told = [
        [(0, 0, 3), (1, 0, 4), (2, 0, 5), (2, 1, 6)],  # 2 has no row
        [(0, 0, 7), (0, 1, 8)],  # the slot is another request's
        [(1, 0, 9)],
    ]
    for step_id, deltas in enumerate(told):
        step = _with_deltas(runner, step_id, deltas)
        if step_id == 2:
            is_short[0] = False
            launcher.launch(step)()
        else:
            with pytest.raises(torch.OutOfMemoryError):
                launcher.launch(step)
    table = launcher._page_table
    entries = [(0, 0, 7), (0, 1, 8), (1, 0, 9), (2, 0, 5), (2, 1, 6)]
    assert [int(table[slot, index]) for slot, index, _ in entries] == [page for *_, page in entries]


def _with_deltas(
    runner: DeviceModelRunner, step_id: int, deltas: list[tuple[int, int, int]]
) -> Any:
    step = _step(runner, [0, 1], {0: 3, 1: 4}, step_id)
    object.__setattr__(step, "page_deltas", np.array(deltas, dtype=np.int32))
    return step


def test_a_bias_that_could_not_be_taken_away_counts_for_nobody(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was to do it fails, and the next request in the slot has no bias either."""
    runner = _device_runner(config)
    launcher = runner.step_launcher()
    biased = RowSampling(bias_ids=np.array([77]), bias=np.array([1e6], dtype=np.float32))
    other = RowSampling(bias_ids=np.array([78]), bias=np.array([1e6], dtype=np.float32))

    def sampled(step_id: int, rows: list[RowSampling]) -> list[int]:
        step = _step(runner, [0, 1], {0: 3, 1: 4}, step_id)
        step.sampling.rows[:] = rows
        result = launcher.launch(step)().sampled
        assert result is not None
        return result.token_ids.tolist()

    plain = sampled(0, [RowSampling(), other])[0]
    assert sampled(1, [biased, other]) == [77, 78]

    def short_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError(_TEXT)

    with monkeypatch.context() as patch:
        patch.setattr(launcher._edits, "hold", short_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            sampled(2, [RowSampling(), other])
    assert sampled(3, [RowSampling(), other]) == [plain, 78] != [77, 78]
