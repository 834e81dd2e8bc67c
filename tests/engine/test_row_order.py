# SPDX-License-Identifier: Apache-2.0
"""The order in which decode rows are computed: relatives in one group, and the same results."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution.row_order import PROBES, RowOrder, pack
from engine.models.deepseek import DeepseekForCausalLM
from tests.fakes.device_runner import device_runner, tiny_config
from tests.fakes.paged_driver import PagedDriver, Row
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

GROUP = 4


def spared(order: list[int], shared: np.ndarray[Any, Any], group: int) -> int:
    """Pages not read where groups of `order` read together what rows have in common with the first:
    `shared[a, b]` pages of rows a and b. By the definition, trying every number of pages."""
    total = 0
    for start in range(0, len(order), group):
        first, *others = order[start : start + group]
        common = [int(shared[first, row]) for row in others]
        total += max([0, *(pages * sum(n >= pages for n in common) for pages in common)])
    return total


def tree_of(rng: random.Random, num_rows: int) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
    """Pages of rows that branch from each other, and how many two rows have in common."""
    rows: list[list[int]] = []
    for number in range(num_rows):
        start = rng.choice(rows)[: rng.choice([0, 20, 60, 140, 300])] if rows else []
        own = rng.randrange(1, 200)
        rows.append([*start, *range(1000 * (number + 1), 1000 * (number + 1) + own)])
    shared = np.zeros((num_rows, num_rows), dtype=np.int64)
    for a, mine in enumerate(rows):
        for b, theirs in enumerate(rows):
            least = min(len(mine), len(theirs))
            shared[a, b] = next((at for at in range(least) if mine[at] != theirs[at]), least)
    return rows, shared


def keys_of(rows: list[list[int]]) -> np.ndarray[Any, Any]:
    probes = [at for at in PROBES if at < 700]
    return np.array(
        [[row[at] if at < len(row) else -1 for at in probes] for row in rows], dtype=np.int32
    )


def test_families_that_come_in_turn_are_put_together() -> None:
    stems = [list(range(40)), list(range(100, 140))]
    rows = [[*stems[number % 2], 900 + number] for number in range(8)]
    order = pack(np.arange(8), keys_of(rows), GROUP)
    assert sorted(order[:4]) in ([0, 2, 4, 6], [1, 3, 5, 7])
    assert sorted(order[4:]) in ([0, 2, 4, 6], [1, 3, 5, 7])
    # What is left of a large family comes before what is left of a small one.
    rows = [[*range(200, 240), 950], *([*stems[0], 900 + number] for number in range(3))]
    assert pack(np.arange(4), keys_of(rows), GROUP) == [1, 2, 3, 0]


def test_any_order_has_all_rows_and_relatives_read_less_than_strangers() -> None:
    rng = random.Random(5)
    found, arrival, chance = 0, 0, 0
    for _ in range(150):
        rows, shared = tree_of(rng, rng.randrange(1, 18))
        order = pack(np.arange(len(rows)), keys_of(rows), GROUP)
        assert sorted(order) == list(range(len(rows)))
        found += spared(order, shared, GROUP)
        arrival += spared(list(range(len(rows))), shared, GROUP)
        mixed = list(range(len(rows)))
        rng.shuffle(mixed)
        chance += spared(mixed, shared, GROUP)
    assert found > 1.2 * arrival and found > 1.3 * chance


def rows_of(driver: PagedDriver, rng: random.Random, size: int) -> list[Row]:
    """Six rows of two stems, in turn."""
    stems = [driver.open(slot) for slot in (6, 7)]
    for stem in stems:
        driver.prefill(stem, [rng.randrange(3, VOCAB_SIZE) for _ in range(19 * size)])
    rows = [driver.open(slot, stems[slot % 2], 18) for slot in range(6)]
    for row in rows:
        driver.prefill(row, [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(2, 40))])
    return rows


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Groups of two rows on a CPU, and the orders that were found."""
    monkeypatch.setattr(DeepseekForCausalLM, "rows_of_group", lambda self, pool: 2)
    orders: list[list[int]] = []
    find = RowOrder._find

    def watched(self: RowOrder, *args: Any) -> Any:
        order = find(self, *args)
        orders.append([] if order is None else order.tolist())
        return order

    monkeypatch.setattr(RowOrder, "_find", watched)
    return orders


def test_rows_in_another_order_get_the_logits_they_get_in_their_own(
    tmp_path: Path, grouped: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_deepseek(tmp_path)
    config = tiny_config(tmp_path, page_size=16, num_pages=200, max_slots=8, max_context_len=512)
    found = []
    for group in (1, 2):
        monkeypatch.setattr(DeepseekForCausalLM, "rows_of_group", lambda self, pool, n=group: n)
        driver = PagedDriver(device_runner(config, max_tokens=512), seed=1)
        rng = random.Random(2)
        rows = rows_of(driver, rng, 16)
        logits = []
        for number in range(6):
            some = rows[: 6 - number // 2]
            decodes = [(row, [5 + number + place]) for place, row in enumerate(some)]
            logits.append(driver.step(decodes, sample=[2, 0, 3][: 1 + number % 3]))
            logits.append(driver.step([(driver.open(6), [7, 8, 9]), *decodes]))
        found.append(logits)
    assert any(order[:2] in ([0, 2], [0, 4], [1, 3]) for order in grouped)
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4)


def test_a_served_answer_is_the_same_in_any_order(
    tmp_path: Path, grouped: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fakes.live_engine import LiveEngine, make_request, run, serve

    write_tiny_deepseek(tmp_path)
    config = tiny_config(tmp_path, page_size=4, num_pages=600, max_slots=6, max_context_len=256)
    stems = [[3 + (7 * at + stem) % 200 for at in range(80)] for stem in range(2)]
    answers = []
    for group in (1, 2):
        monkeypatch.setattr(DeepseekForCausalLM, "rows_of_group", lambda self, pool, n=group: n)

        async def work(client: Any) -> None:
            for stem in stems:
                await run(client, make_request(f"stem{stem[0]}", stem, 1))
            requests = [
                make_request(
                    f"r{number}",
                    [*stems[number % 2], *range(20, 24 + number)],
                    30,
                    sampling={"ignore_eos": True, "temperature": number % 3 * 0.5, "seed": number},
                )
                for number in range(6)
            ]
            found = await asyncio.gather(*(run(client, request) for request in requests))
            answers.append([answer.ids for answer in found])

        runner = device_runner(config, max_tokens=256)
        serve(LiveEngine(str(tmp_path / str(group)), runner, max_slots=6, token_budget=64), work)
    assert answers[0] == answers[1]
    assert all(len(ids) == 30 for ids in answers[0])
    assert any(grouped)
