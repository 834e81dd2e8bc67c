# SPDX-License-Identifier: Apache-2.0
"""Steps on a GPU that are too large for captured pieces: what small ones give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from engine.weights.quant_writer import quantization_config
from kernels.fixed_order import use_usual_order
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import GPU_SHAPE, write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_PROMPT, _LONE = 9000, 8192


def _config(directory: Path, quant: dict[str, Any], **settings: Any) -> EngineConfig:
    shape = {**GPU_SHAPE, "max_position_embeddings": 16384}
    write_tiny_deepseek(directory, **shape, **quant)
    return EngineConfig(
        model=str(directory),
        load_format="dummy",
        device="cuda",
        max_slots=4,
        token_budget=1024,
        lone_token_budget=_LONE,
        kv_pool_tokens=32768,
        **settings,
    )


def _logits(config: EngineConfig, chunks: tuple[int, ...]) -> list[torch.Tensor]:
    """Behind one prompt, computed in steps of each of these sizes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (_PROMPT,), generator=generator).tolist()
    driver = PagedDriver(build_model_runner(config), seed=1)
    return [driver.prefill(driver.open(slot), ids, chunk) for slot, chunk in enumerate(chunks)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_step_larger_than_any_piece_gives_what_small_ones_do(
    tmp_path: Path, kv_dtype: str
) -> None:
    quant = {"quantization_config": quantization_config("nvfp4", [])}
    config = _config(tmp_path, quant, kv_dtype=kv_dtype)
    small, *large = _logits(config, (1024, _LONE, 5001))
    assert bool(torch.isfinite(small).all())
    for logits in large:
        assert float(torch.nn.functional.cosine_similarity(logits, small, dim=0)) > 0.99


def test_a_deterministic_engine_gives_the_same_bits(tmp_path: Path) -> None:
    config = _config(tmp_path, {}, dtype="bfloat16", deterministic=True)
    try:
        small, large = _logits(config, (1024, _LONE))
    finally:
        use_usual_order()
    assert torch.equal(small, large)
