# SPDX-License-Identifier: Apache-2.0
"""A device's decode steps with folded rows: the logits of rows of one token, drafts taken back and
written over, nothing read or written that is no token's. The device is the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_runner import build_model_runner
from kernels.selection import override
from tests.fakes.device_runner import device_runner, tiny_config
from tests.fakes.folded_layers import count_folds
from tests.fakes.paged_driver import PagedDriver, Row
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

_PAGE, _PAGES, _SLOTS = 16, 60, 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _config(directory: Path, num_heads: int = 4) -> EngineConfig:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    return tiny_config(
        write_tiny_deepseek(directory, **heads),
        page_size=_PAGE,
        num_pages=_PAGES,
        max_slots=_SLOTS,
        speculation="ngram",
    )


def _device_runner(config: EngineConfig, form: str) -> DeviceModelRunner:
    with override("mla_decode_form", form):
        return device_runner(config, eager=True)


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num)]


@pytest.mark.parametrize(("num_heads", "folds"), [(4, {1, 8}), (16, {1, 4, 8}), (32, {1, 2, 4})])
def test_folded_steps_give_the_logits_of_rows_of_one_token(
    tmp_path: Path, num_heads: int, folds: set[int]
) -> None:
    config = _config(tmp_path, num_heads)
    runners = [_device_runner(config, form) for form in ("rows", "folded")]
    counts = [count_folds(runner.step_launcher()) for runner in runners]
    for runner in runners:
        runner.kv_pool.fill_(float("nan"))
    drivers = [PagedDriver(runner, seed=3) for runner in runners]
    rows = [[driver.open(slot) for slot in (2, 0, 3)] for driver in drivers]
    rng = random.Random(num_heads)
    # Drafts begin before, on and behind a page's border.
    for place, num in enumerate((_PAGE - 2, 2 * _PAGE, 5)):
        prompt = _ids(rng, num)
        for driver, mine in zip(drivers, rows, strict=True):
            driver.prefill(mine[place], prompt)
    for _ in range(40):
        left = config.drafted_tokens
        tokens: list[tuple[int, list[int]]] = []
        for place in rng.sample(range(3), rng.randrange(1, 4)):
            num = max(1, min(rng.choice((1, 1, 2, 3, 4, 5, 8, 9)), left - 2))
            left -= num
            tokens.append((place, _ids(rng, num)))
        found = [
            driver.step([(mine[place], [token]) for place, ids in tokens for token in ids])
            for driver, mine in zip(drivers, rows, strict=True)
        ]
        assert bool(found[0].isfinite().all())
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        for place, ids in tokens:
            wrong = rng.randrange(len(ids))
            for driver, mine in zip(drivers, rows, strict=True):
                driver.rewind(mine[place], wrong)
    assert set(counts[0]) == {1} and set(counts[1]) == folds
    for driver, mine in zip(drivers, rows, strict=True):
        _check_pool(driver, mine)
    # And of a prompt that was never drafted for.
    driver, mine = drivers[1], rows[1]
    last = _ids(rng, 4)
    found_last = driver.step([(mine[0], [token]) for token in last])
    history = list(mine[0].token_ids)
    fresh = PagedDriver(build_model_runner(config))
    wanted = fresh.prefill(fresh.open(1), history)
    torch.testing.assert_close(found_last[-1], wanted, rtol=1e-4, atol=1e-4)


def _check_pool(driver: PagedDriver, rows: list[Row]) -> None:
    """Pages of nobody are as they were, apart from the sentinel's; so are places behind the
    furthest token a row ever had."""
    pool: torch.Tensor = driver.runner.kv_pool  # type: ignore[attr-defined]
    touched = pool.isfinite().flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    assert set(touched) <= {page for row in rows for page in row.pages} | {pool.shape[0] - 1}


def test_a_padded_step_writes_no_page_of_others_and_reads_none(tmp_path: Path) -> None:
    """Three tokens of one sequence in the size of four, folded to eight: whatever the other five
    places held in steps before."""
    config = _config(tmp_path)
    answers = []
    for history in (False, True):
        runner = _device_runner(config, "folded")
        runner.kv_pool.fill_(float("nan"))
        driver = PagedDriver(runner, seed=5)
        counts = count_folds(runner.step_launcher())
        row, other = driver.open(1), driver.open(2)
        driver.prefill(row, list(range(10, 40)))
        driver.prefill(other, list(range(30, 45)))
        if history:
            driver.step([(other, [9]), *((row, [token]) for token in (50, 51, 52))])
            driver.rewind(row, 3)
        before = runner.kv_pool.clone()
        answers.append(driver.step([(row, [50]), (row, [51]), (row, [52])]))
        assert counts[1] == 0 and counts[8] == 1 + history
        same = (runner.kv_pool == before) | (runner.kv_pool.isnan() & before.isnan())
        changed = (~same).flatten(2).any(dim=2).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
        assert set(changed) <= {row.pages[1], row.pages[2], runner.num_pages}
    assert bool(answers[0].isfinite().all())
    assert torch.equal(*answers)


def test_a_bad_sequence_spoils_no_other_that_shares_its_folded_step(tmp_path: Path) -> None:
    config = _config(tmp_path)
    runner = _device_runner(config, "folded")
    driver = PagedDriver(runner, seed=5)
    rows = [driver.open(slot) for slot in (0, 1, 3)]
    for row in rows:
        driver.prefill(row, list(range(10, 30)))
    step: list[tuple[Row, list[int]]] = [(row, [7]) for row in rows for _ in range(3)]
    wanted = driver.step(step)
    for row in rows:
        driver.rewind(row, 3)
    runner.kv_pool[rows[1].pages[0]] = float("nan")
    found = driver.step(step)
    assert bool(found[3:6].isnan().all())
    assert torch.equal(found[[0, 1, 2, 6, 7, 8]], wanted[[0, 1, 2, 6, 7, 8]])


def test_every_step_that_can_come_has_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards by size and q_len, and samples by size: what a step runs was captured at the
    start."""
    from engine.execution.graphs import GraphSet

    added: list[Any] = []
    met: list[Any] = []
    add, run = GraphSet.add, GraphSet.run
    monkeypatch.setattr(GraphSet, "add", lambda s, k, f: (added.append(k), add(s, k, f))[1])
    monkeypatch.setattr(GraphSet, "run", lambda s, k, f: (met.append(k), run(s, k, f))[1])
    runner = _device_runner(_config(tmp_path, 16), "folded")
    forwards = sorted(key[1:] for key in added if key[0] == "forward")
    plain = [(size, 1) for size in (1, 2, 4, 8, 16)]
    assert forwards == sorted([*plain, *((size, 4) for size in (2, 4, 8, 16)), (8, 8), (16, 8)])
    driver = PagedDriver(runner, seed=1)
    rows = [driver.open(slot) for slot in range(_SLOTS)]
    for row in rows:
        driver.prefill(row, [5, 6, 7])
    rng = random.Random(0)
    for _ in range(60):
        some = rng.sample(rows, rng.randrange(1, 5))
        nums = [min(rng.randrange(1, 10), 16 // len(some)) for _ in some]
        driver.step([(row, [8]) for row, num in zip(some, nums, strict=True) for _ in range(num)])
        for row, num in zip(some, nums, strict=True):
            driver.rewind(row, num)
    assert set(met) <= set(added)
    assert {key[2] for key in met if key[0] == "forward"} == {1, 4, 8}
