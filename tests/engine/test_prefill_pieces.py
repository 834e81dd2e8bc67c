# SPDX-License-Identifier: Apache-2.0
"""Steps with prefill in padded pieces: the forward without padding, whatever the buffers hold.

Here the device is the CPU and a piece is called, not captured; test_gpu_engine.py replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.device_runner import DeviceModelRunner
from engine.execution.graphs import GraphSet
from engine.execution.prefill_pieces import piece_sizes
from tests.fakes.device_runner import device_runner, tiny_config
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

_PAGE, _PAGES, _TOKENS = 16, 160, 300


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _runner(
    directory: Path, *, pieces: bool, eager: bool = False, **changes: Any
) -> DeviceModelRunner:
    write_tiny_deepseek(directory, **changes)
    config = tiny_config(directory, page_size=_PAGE, num_pages=_PAGES)
    runner = device_runner(config, eager=eager, prefill_graphs=pieces, max_tokens=_TOKENS)
    runner.kv_pool.zero_()
    return runner


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist()


def _spoil(runner: DeviceModelRunner) -> None:
    """What an earlier step may have left, at its worst."""
    held = runner.step_launcher()._model._pieces._buffers  # type: ignore[attr-defined]
    for buffer in (held.residual, held.projected, held.values):
        buffer.fill_(float("nan"))
    held.ids.fill_(VOCAB_SIZE - 1)


@pytest.mark.parametrize("q_rank", [None, 24])
def test_pieces_give_the_logits_and_the_kv_of_a_forward_without_padding(
    tmp_path: Path, q_rank: int | None
) -> None:
    whole, padded = (
        _runner(tmp_path, pieces=pieces, q_lora_rank=q_rank) for pieces in (False, True)
    )
    drivers = [PagedDriver(runner, seed=1) for runner in (whole, padded)]
    rows = [[driver.open(slot) for slot in (3, 0, 2, 1)] for driver in drivers]
    steps: list[list[tuple[int, list[int]]]] = [
        [(0, _ids(40, 1))],  # 128
        [(1, _ids(120, 2)), (2, _ids(8, 3)), (0, [9])],  # 256, a decode row beside it
        [(3, _ids(127, 4)), (0, [1])],  # 128 without padding
        [(1, _ids(200, 5)), (0, [1]), (2, [2]), (3, [3])],  # 256 behind a cached prefix
        [(0, [4]), (1, [5]), (2, [6])],  # decode rows alone
        [(2, _ids(299, 6)), (0, [1])],  # 384, more than a step may have
    ]
    for step in steps:
        _spoil(padded)
        expected, found = (
            driver.step([(mine[place], list(tokens)) for place, tokens in step])
            for driver, mine in zip(drivers, rows, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # The last page is the sentinel's: nobody reads it.
    torch.testing.assert_close(padded.kv_pool[:-1], whole.kv_pool[:-1], rtol=1e-5, atol=1e-5)


def test_padding_writes_to_no_page_at_all(tmp_path: Path) -> None:
    runner = _runner(tmp_path, pieces=True)
    driver = PagedDriver(runner)
    row = driver.open(0)
    _spoil(runner)
    driver.step([(row, _ids(20, 1))])
    touched = runner.kv_pool.abs().flatten(1).sum(dim=1).nonzero()[:, 0].tolist()
    assert touched == sorted(row.pages[:2])


def test_a_step_is_padded_by_little_and_the_largest_not_at_all() -> None:
    assert piece_sizes(64) == [64]
    assert piece_sizes(129) == [128, 129]
    assert piece_sizes(800) == [128, 256, 384, 512, 640, 768, 800]
    small = [128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert piece_sizes(4096) == [*small, 2560, 3072, 3584, 4096]
    assert piece_sizes(4000) == [*small, 2560, 3072, 3584, 4000]
    assert piece_sizes(8192) == piece_sizes(4096)  # larger steps are not for pieces


def test_each_piece_is_captured_once_a_size_and_a_step_replays_those_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []
    replayed: list[Any] = []

    def add(graphs: GraphSet, key: Any, function: Callable[[], None]) -> None:
        captured.append(key)
        function()

    def run(graphs: GraphSet, key: Any, function: Callable[[], None]) -> None:
        replayed.append(key)
        function()

    monkeypatch.setattr(GraphSet, "add", add)
    monkeypatch.setattr(GraphSet, "run", run)
    runner = _runner(tmp_path, pieces=True)
    num_pieces = runner.step_launcher()._model.num_layers + 1
    numbers = range(num_pieces)
    pieces = [key for key in captured if key[0] == "piece"]
    assert pieces == [("piece", size, number) for size in (300, 256, 128) for number in numbers]
    replayed.clear()
    driver = PagedDriver(runner)
    driver.step([(driver.open(0), _ids(129, 1))])
    assert replayed == [("piece", 256, number) for number in numbers]


def test_without_the_option_a_step_runs_whole(tmp_path: Path) -> None:
    runner = _runner(tmp_path, pieces=False)
    assert runner.step_launcher()._pieces is None
