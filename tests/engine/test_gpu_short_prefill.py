# SPDX-License-Identifier: Apache-2.0
"""Prefill rows in absorbed form on a GPU: the definition's values, and a model's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.prefill_layer import LayerSizes, PrefillLayers
from benchmarks.gpu.timing import relative_error
from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from kernels.selection import override
from kernels.step_work import StepWork
from tests.fakes.attention_by_hand import attention_by_hand
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import GPU_SHAPE, write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# As for the expanded form: bf16 operands and P, fp32 sums.
TOLERANCE = 6e-3


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "specs",
    [
        [(0, 5)],
        [(63, 8)],
        [(4096, 96)],
        [(5000, 33)],
        [(30000, 20)],
        [(1000, 1), (4100, 70), (64, 7), (0, 128)],
    ],
)
def test_absorbed_rows_give_the_values_of_the_definition(
    specs: list[tuple[int, int]], kv: str
) -> None:
    """Layer behind layer without a wait, over one StepWork: each reads its own latents, and the
    step's, which were NaN before."""
    layers = PrefillLayers(specs, kv, LayerSizes(), num_layers=3)
    work = StepWork()
    with torch.no_grad(), override("mla_prefill_form", "absorbed"):
        found = [layers.run(layer, work) for layer in (0, 1, 2)]
        again = [layers.run(layer, work) for layer in (0, 1, 2)]
    for layer, values in enumerate(found):
        assert relative_error(values, attention_by_hand(layers, layer)) < TOLERANCE
        assert torch.equal(values, again[layer])


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_both_forms_agree_on_random_latents(kv: str) -> None:
    for past, new in ((8192, 32), (20000, 96)):
        results = []
        for form in ("absorbed", "expanded"):
            layers = PrefillLayers([(past, new)], kv, LayerSizes())
            with torch.no_grad(), override("mla_prefill_form", form):
                results.append(layers.run())
        assert relative_error(*results) < TOLERANCE


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_step_of_both_forms_gives_the_logits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: bool, kv_dtype: str
) -> None:
    """Tolerance: where an expert's choice is nearly a tie, bf16 decides it either way (on an H200
    in one of fourteen samples, whose row goes on with the same logits)."""
    from kernels.triton import mla_prefill_form

    monkeypatch.setattr(mla_prefill_form, "LEAST_CACHED", 100)
    write_tiny_deepseek(tmp_path, **GPU_SHAPE)
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cuda",
        max_slots=6,
        token_budget=512,
        kv_pool_tokens=32768,
        kv_dtype=kv_dtype,
        prefill_graphs=pieces,
    )
    drivers = [PagedDriver(build_model_runner(config), seed=1) for _ in range(2)]
    rows = [[driver.open(slot) for slot in range(5)] for driver in drivers]
    generator = torch.Generator().manual_seed(1)

    def ids(num: int) -> list[int]:
        return torch.randint(3, 1000, (num,), generator=generator).tolist()

    steps: list[list[tuple[int, list[int]]]] = [
        [(0, ids(300)), (1, ids(150))],
        [(0, ids(20)), (2, ids(130))],
        [(1, ids(96)), (2, ids(7)), (3, ids(200))],
        [(0, ids(33)), (4, ids(40)), (1, [5]), (2, [6])],
        [(0, [5]), (1, [6]), (2, [7])],
    ]
    similar = []
    for step in steps:
        both = []
        for form, driver, mine in zip(("expanded", "crossover"), drivers, rows, strict=True):
            with override("mla_prefill_form", form):
                both.append(driver.step([(mine[place], list(tokens)) for place, tokens in step]))
        similar.append(torch.nn.functional.cosine_similarity(both[0], both[1], dim=-1))
    found = torch.cat(similar).sort().values
    assert float(found[1]) > 0.99, similar  # all but one
    assert float(found.median()) > 0.999, similar
