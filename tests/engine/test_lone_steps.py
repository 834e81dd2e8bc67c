# SPDX-License-Identifier: Apache-2.0
"""Larger steps of a prompt that has the engine to itself: the tokens of small ones, on the host and
on a device (here the CPU), and memory that counts them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.execution import model_runner
from engine.execution.device_launcher import DeviceLauncher
from engine.execution.model_loading import load_model
from engine.execution.model_runner import build_model_runner
from tests.fakes.device_runner import device_runner, tiny_config
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

_PAGE, _PAGES, _USUAL, _LONE = 16, 96, 48, 200
_LONG = 450


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _config(directory: Path, **changes: Any) -> EngineConfig:
    write_tiny_deepseek(directory, num_nextn_predict_layers=1)
    return tiny_config(directory, page_size=_PAGE, num_pages=_PAGES, **changes)


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist()


def _in_pieces(config: EngineConfig) -> Any:
    return device_runner(config, prefill_graphs=True, max_tokens=_LONE)


def _whole(config: EngineConfig) -> Any:
    return device_runner(config, max_tokens=_LONE)


_ROWS = {"ignore_eos": True}


def _talk(run_dir: Path, runner: Any, speculation: str, lone: int) -> tuple[Any, list[int]]:
    """What a long prompt alone, a second one behind it and three together are answered; and how
    many tokens the steps had."""
    said: dict[str, list[int]] = {}
    trace = run_dir / "steps.jsonl"

    async def work(client: EngineClient) -> None:
        async def one(name: str, num: int, seed: int) -> None:
            request = make_request(name, _ids(num, seed), 12, sampling=_ROWS)
            said[name] = (await run(client, request)).ids

        await one("alone", _LONG, 1)
        await one("behind", _LONG - 7, 2)
        await asyncio.gather(*(one(f"beside {seed}", 90 + seed, seed) for seed in (3, 4, 5)))

    run_dir.mkdir()
    engine = LiveEngine(
        str(run_dir),
        runner,
        token_budget=_USUAL,
        lone_token_budget=lone,
        speculation=speculation,
        step_trace=str(trace),
    )
    serve(engine, work)
    return said, [json.loads(line)["tokens"] for line in trace.read_text().splitlines()]


@pytest.mark.parametrize("speculation", ["none", "ngram", "mtp"])
@pytest.mark.parametrize("build", [build_model_runner, _whole, _in_pieces])
def test_larger_steps_give_the_tokens_of_small_ones(
    tmp_path: Path, build: Callable[[EngineConfig], Any], speculation: str
) -> None:
    config = _config(tmp_path / "tiny", speculation=speculation)
    usual, usual_sizes = _talk(tmp_path / "usual", build(config), speculation, 0)
    lone, lone_sizes = _talk(tmp_path / "lone", build(config), speculation, _LONE)
    assert lone == usual
    assert all(len(ids) == 12 for ids in usual.values())
    assert max(usual_sizes) == _USUAL
    assert lone_sizes[:3] == [_LONE, _LONE, _LONG - 2 * _LONE]
    assert sorted(lone_sizes)[-4:] == [_LONE] * 4  # two of each that was alone


def test_a_deterministic_engine_says_the_same_tokens(tmp_path: Path) -> None:
    config = _config(tmp_path / "tiny", deterministic=True)
    found = []
    for chunk in (_USUAL, _LONE, _LONG):
        driver = PagedDriver(build_model_runner(config))
        row = driver.open(0)
        found.append(driver.greedy(row, driver.prefill(row, _ids(_LONG, 1), chunk), 40))
    assert found[0] == found[1] == found[2]


def test_a_device_takes_a_prompt_in_steps_of_any_size(tmp_path: Path) -> None:
    config = _config(tmp_path / "tiny")
    found: list[torch.Tensor] = []
    pools: list[torch.Tensor] = []
    for build in (_whole, _in_pieces):
        for chunk in (_USUAL, _LONE):
            driver = PagedDriver(runner := build(config))
            found.append(driver.prefill(driver.open(0), _ids(_LONG, 1), chunk))
            pools.append(runner.kv_pool[:-1])  # the last page is the sentinel's
    for logits, pool in zip(found[1:], pools[1:], strict=True):
        torch.testing.assert_close(logits, found[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool, pools[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lone", [0, 64, 300, 512, 4096])
def test_a_pool_made_of_free_memory_leaves_what_the_larger_step_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lone: int
) -> None:
    """The share that stays free is for a usual step; a prompt's is no longer than a context."""
    config = _config(
        tmp_path / "tiny", kv_pool_tokens=0, token_budget=_USUAL, lone_token_budget=lone
    )
    loaded = load_model(config)
    layout = loaded.model.kv_layout(_PAGE, "float32")
    free_bytes = 1 << 24
    monkeypatch.setattr(model_runner, "free_device_bytes", lambda device: free_bytes)
    runner = model_runner._device_runner(config, loaded, layout)
    max_tokens = max(_USUAL, min(lone, config.max_context_len))
    more_bytes = (max_tokens - _USUAL) * loaded.model.step_bytes_per_token
    assert 0 < more_bytes < free_bytes / 2 or lone == 0
    left = (free_bytes - more_bytes) * model_runner.GPU_POOL_SHARE
    assert runner.num_pages == int(left) // layout.page_bytes
    assert runner.step_launcher()._limits.max_tokens == max_tokens


def test_the_largest_step_runs_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is short is known then, and no kernel is compiled in somebody's first token."""
    steps: list[tuple[int, int, int]] = []
    real = DeviceLauncher._warm_up_step

    def watch(launcher: Any, num: int, past: int, *, num_decodes: int) -> None:
        steps.append((num, past, num_decodes))
        real(launcher, num, past, num_decodes=num_decodes)

    monkeypatch.setattr(DeviceLauncher, "_warm_up_step", watch)
    _whole(_config(tmp_path / "tiny"))
    assert (_LONE, 0, 0) in steps
    steps.clear()
    device_runner(_config(tmp_path / "again"), max_tokens=4096)
    assert (512, 0, 0) in steps  # as long as a context may be
