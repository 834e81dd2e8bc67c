# SPDX-License-Identifier: Apache-2.0
"""`engine.deterministic` on a GPU: a row gets the same bits whatever shares its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from kernels.fixed_order import use_usual_order
from tests.fakes.paged_driver import PagedDriver, Row
from tests.fakes.tiny_deepseek import GPU_SHAPE, write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPT = 1400  # more than one part of the attention
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def usual_order() -> Iterator[None]:
    yield
    use_usual_order()


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (num,), generator=generator).tolist()


def _said(runner: Any, others: int, chunk: int) -> torch.Tensor:
    """Logits of a prompt's end and of the steps behind it, beside other rows."""
    driver = PagedDriver(runner, seed=others + chunk)
    mine = driver.open(others)
    beside: list[Row] = [driver.open(slot) for slot in range(others)]
    for number, row in enumerate(beside):
        driver.step([(row, _ids(20 + 90 * number, number))])
    logits, ids = [], _ids(PROMPT, 77)
    for start in range(0, PROMPT, chunk):
        parts = [(mine, ids[start : start + chunk]), *((row, [9]) for row in beside)]
        last = driver.step(parts)[0]
    logits.append(last)
    for number in range(NUM_STEPS):
        parts = [*((row, [11]) for row in beside), (mine, [500 + number])]
        logits.append(driver.step(parts)[-1])
    return torch.stack(logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_batches(tmp_path: Path, dtype: str) -> None:
    write_tiny_deepseek(tmp_path, **GPU_SHAPE)
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cuda",
        dtype=dtype,
        deterministic=True,
        max_slots=17,
        token_budget=2048,
        kv_pool_tokens=65536,
    )
    runner = build_model_runner(config)
    alone = _said(runner, 0, PROMPT)
    assert bool(torch.isfinite(alone).all())
    for others, chunk in ((0, 333), (1, PROMPT), (7, 700), (16, 450)):
        found = _said(runner, others, chunk)
        assert torch.equal(found, alone), f"{others} other rows, chunks of {chunk}"


def test_fp32_of_fixed_order_is_near_the_host(tmp_path: Path) -> None:
    # A checkpoint, as random weights are other ones on each kind of device.
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = json.loads((write_tiny_deepseek(tmp_path, **GPU_SHAPE) / "config.json").read_text())
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**settings)).save_pretrained(tmp_path / "plain")
    found = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            model=str(tmp_path / "plain"),
            device=device,
            dtype="float32",
            deterministic=True,
            max_slots=4,
            token_budget=512,
            kv_pool_tokens=4096,
        )
        driver = PagedDriver(build_model_runner(config), seed=1)
        row = driver.open(0)
        found.append(driver.step([(row, _ids(100, 5))])[0])
    similarity = torch.nn.functional.cosine_similarity(found[0], found[1], dim=0)
    assert float(similarity) > 0.9999
