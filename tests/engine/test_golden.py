# SPDX-License-Identifier: Apache-2.0
"""The packaged model against reference ids made by transformers from the same weights in fp32.

Every run is paged, over pages in random order. In fp32 one chunk, several chunks, a cached prefix
and rows that share a step must all give the reference ids; the default precision must agree with
them wherever they are sure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.model_loading import has_compiled_decoder
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
    assert driver.greedy(cold, logits, 4) == prompt["greedy_ids"][:4]
    # The other steps at once: one row per step, all over the same pages, given the ids before.
    found: list[int] = []
    for steps in (range(3, 17), range(17, _NUM_STEPS - 1)):
        rows = []
        for slot, step in enumerate(steps):
            row = Row(slot=slot, pages=list(cold.pages), num_done=len(ids) + step)
            row.token_ids = [*ids, *prompt["greedy_ids"][:step]]
            rows.append((row, prompt["greedy_ids"][step : step + 1]))
        found += driver.step(rows).argmax(dim=-1).tolist()
    assert found == prompt["greedy_ids"][4:]
    shared_pages = len(ids) // runner.page_size
    warm = driver.open(0, shared=cold, shared_pages=shared_pages)
    logits = driver.prefill(warm, ids[warm.num_done :])
    assert driver.greedy(warm, logits, 3) == prompt["greedy_ids"][:3]


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


@pytest.fixture(scope="module")
def default_runner() -> Iterator[PagedModelRunner]:
    before = torch.get_num_threads()
    yield build_model_runner(EngineConfig(kv_pool_tokens=16384))
    torch.set_num_threads(before)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    ("name", "chunk"), [("short", 512), ("short", 5), ("multi_turn", 20), ("long_2000", 300)]
)
def test_the_default_precision_agrees_wherever_the_reference_is_sure(
    default_runner: PagedModelRunner, name: str, chunk: int
) -> None:
    """Teacher-forced: every step whose two best logits differ by 0.5 or more."""
    prompt = _PROMPTS[name]
    driver = PagedDriver(default_runner, seed=14)
    row = driver.open(2)
    logits = driver.prefill(row, prompt["prompt_ids"], chunk)
    wrong = []
    for step, token_id in enumerate(prompt["greedy_ids"]):
        if int(logits.argmax()) != token_id and prompt["margins"][step] >= 0.5:
            wrong.append((step, prompt["margins"][step]))
        logits = driver.step([(row, [token_id])])[0]
    assert wrong == []


@pytest.mark.skipif(not has_compiled_decoder(), reason="the CPU kernels are not built")
def test_the_default_precision_agrees_for_rows_decoding_together(
    default_runner: PagedModelRunner,
) -> None:
    """Four rows a step, two of them over a cached prefix."""
    driver = PagedDriver(default_runner, seed=15)
    prompts = [_PROMPTS["short"], _PROMPTS["multi_turn"], _PROMPTS["long_2000"]]
    rows = [driver.open(slot) for slot in range(3)]
    logits = [
        driver.prefill(row, p["prompt_ids"], 512) for row, p in zip(rows, prompts, strict=True)
    ]
    shared_pages = len(prompts[2]["prompt_ids"]) // default_runner.page_size
    rows.append(driver.open(7, shared=rows[2], shared_pages=shared_pages))
    prompts.append(prompts[2])
    logits.append(driver.prefill(rows[3], prompts[3]["prompt_ids"][rows[3].num_done :]))
    wrong = []
    for step in range(_NUM_STEPS):
        for prompt, found in zip(prompts, logits, strict=True):
            expected, margin = prompt["greedy_ids"][step], prompt["margins"][step]
            if int(found.argmax()) != expected and margin >= 0.5:
                wrong.append((prompt["name"], step, margin))
        new = [(row, [p["greedy_ids"][step]]) for row, p in zip(rows, prompts, strict=True)]
        logits = list(driver.step(new))
    assert wrong == []
