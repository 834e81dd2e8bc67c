# SPDX-License-Identifier: Apache-2.0
"""The packaged model in fp32 against reference ids made by transformers from the same weights.

Every run is paged, over pages in random order. One chunk, several chunks, a cached prefix and
rows that share a step must all give the reference ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.model_runner import PagedModelRunner, build_model_runner
from tests.fakes.paged_driver import PagedDriver, Row

_PROMPTS: dict[str, dict[str, Any]] = {
    prompt["name"]: prompt
    for prompt in json.loads(
        (Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text()
    )["prompts"]
}
_NUM_STEPS = 32


@pytest.fixture(scope="module")
def runner() -> Iterator[PagedModelRunner]:
    before = torch.get_num_threads()
    config = EngineConfig(
        dtype="float32", weights="dequantized", num_threads=1, kv_pool_tokens=16384
    )
    yield build_model_runner(config)
    torch.set_num_threads(before)


@pytest.mark.parametrize("chunk", [None, 7], ids=["one_chunk", "chunks_of_7"])
@pytest.mark.parametrize("name", ["short", "multi_turn"])
def test_greedy_ids_equal_the_reference(
    runner: PagedModelRunner, name: str, chunk: int | None
) -> None:
    prompt = _PROMPTS[name]
    driver = PagedDriver(runner, seed=11)
    row = driver.open(5)
    logits = driver.prefill(row, prompt["prompt_ids"], chunk)
    for token_id, value in prompt["first_top10"]:
        assert float(logits[token_id]) == pytest.approx(value, abs=2e-3)
    assert driver.greedy(row, logits, _NUM_STEPS) == prompt["greedy_ids"]


def test_a_long_prompt_and_its_cached_prefix_give_the_reference_ids(
    runner: PagedModelRunner,
) -> None:
    prompt = _PROMPTS["long_2000"]
    ids = prompt["prompt_ids"]
    driver = PagedDriver(runner, seed=12)
    cold = driver.open(0)
    logits = driver.prefill(cold, ids, chunk=512)
    assert driver.greedy(cold, logits, _NUM_STEPS) == prompt["greedy_ids"]
    shared_pages = len(ids) // runner.page_size
    warm = driver.open(9, shared=cold, shared_pages=shared_pages)
    logits = driver.prefill(warm, ids[warm.num_done :])
    assert driver.greedy(warm, logits, 12) == prompt["greedy_ids"][:12]


def test_a_prefill_beside_a_decoding_row_changes_neither(runner: PagedModelRunner) -> None:
    short, multi = _PROMPTS["short"], _PROMPTS["multi_turn"]
    driver = PagedDriver(runner, seed=13)
    first, second = driver.open(1), driver.open(0)
    ids = [int(driver.prefill(first, short["prompt_ids"]).argmax())]
    other: list[int] = []
    pending = list(multi["prompt_ids"])
    while len(ids) < _NUM_STEPS:
        steps: list[tuple[Row, list[int]]] = []
        if pending:
            steps.append((second, pending[:20]))
            pending = pending[20:]
            is_sampled = not pending
        else:
            steps.append((second, other[-1:]))
            is_sampled = True
        steps.append((first, ids[-1:]))
        logits = driver.step(steps, sample=[0, 1] if is_sampled else [1])
        ids.append(int(logits[-1].argmax()))
        if is_sampled:
            other.append(int(logits[0].argmax()))
    assert ids == short["greedy_ids"]
    assert other == multi["greedy_ids"][: len(other)]
    assert len(other) > 20
