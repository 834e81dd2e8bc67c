# SPDX-License-Identifier: Apache-2.0
"""Folded decode rows on a GPU: the definition's values, the logits of rows of one token, and the
same bits by graphs and by eager runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.prefill_layer import LayerSizes, PrefillLayers
from benchmarks.gpu.timing import relative_error
from engine.config import EngineConfig
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_runner import build_model_runner
from kernels.reference.linear import dense_fp32
from kernels.reference.quant import quantize_w4
from kernels.selection import set_override
from kernels.w4_layout import tile_w4_linear
from tests.fakes.attention_by_hand import attention_by_hand
from tests.fakes.folded_layers import FoldedLayers, count_folds
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import GPU_SHAPE, write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# bf16 operands and P, fp32 sums, as for rows of one token.
TOLERANCE = 6e-3


@pytest.fixture(autouse=True)
def own_form() -> Iterator[None]:
    yield
    set_override("mla_decode_form", None)


# (past, tokens of the step): several parts and one, drafts over page borders, rows shorter than
# q_len, nine tokens in rows of two, four and eight, rows without drafts beside.
_STEPS = [
    [(65536, 5)],
    [(63, 2), (64, 1), (62, 5), (1, 4)],
    [(0, 1), (0, 3)],
    [(4090, 9), (500, 1), (30000, 4)],
    [(8192, 2)] * 8,
]


@pytest.mark.parametrize("weight", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("kv", "q_len"), [("bf16", 4), ("bf16", 8), ("bf16", 2), ("fp8", 2)])
@pytest.mark.parametrize("specs", _STEPS)
def test_folded_rows_give_the_values_of_the_definition(
    specs: list[tuple[int, int]], kv: str, q_len: int, weight: str
) -> None:
    """Layer behind layer without a wait; the step's own latents were NaN before, and so is what
    stands in places that no token has, the second time. In 4 bits what surrounds the attention is
    fused with it; in bf16 up to eight tokens."""
    num = sum(new for _, new in specs)
    step = FoldedLayers(PrefillLayers(specs, kv, LayerSizes(), num_layers=3), q_len, 16)
    out = torch.eye(2048, dtype=torch.float64, device="cuda")
    if weight == "nvfp4":
        tiled = tile_w4_linear([quantize_w4(out.float(), "nvfp4")])
        step.weights = replace(step.weights, out=tiled)
        out = dense_fp32(tiled).double()
    with torch.no_grad():
        found = [step.run(layer) for layer in (0, 1, 2)]
        again = [step.run(layer, no_tokens=float("nan")) for layer in (0, 1, 2)]
    for layer, values in enumerate(found):
        wanted = attention_by_hand(step.layers, layer) @ out.T
        assert relative_error(values[:num], wanted) < TOLERANCE
        assert torch.equal(values, again[layer])
        assert not bool(values[num:].any())


def _driver(directory: Path, form: str, kv_dtype: str, *, eager: bool = False) -> PagedDriver:
    config = EngineConfig(
        model=str(write_tiny_deepseek(directory, **GPU_SHAPE)),
        load_format="dummy",
        device="cuda",
        max_slots=6,
        token_budget=512,
        kv_pool_tokens=32768,
        kv_dtype=kv_dtype,
        speculation="ngram",
        kernels=f"mla_decode_form={form}",
        eager=eager,
    )
    runner = build_model_runner(config)
    assert isinstance(runner, DeviceModelRunner)
    return PagedDriver(runner, seed=1)


@pytest.mark.parametrize(("kv_dtype", "q_lens"), [("auto", {1, 4, 8}), ("fp8", {1, 2})])
def test_steps_give_the_logits_of_rows_of_one_token_and_graphs_the_bits_of_eager_runs(
    tmp_path: Path, kv_dtype: str, q_lens: set[int]
) -> None:
    """Tolerance: where an expert's choice is nearly a tie, bf16 decides it either way, and the
    row's later tokens attend to what came of it."""
    drivers = [
        _driver(tmp_path, "rows", kv_dtype),
        _driver(tmp_path, "folded", kv_dtype),
        _driver(tmp_path, "folded", kv_dtype, eager=True),
    ]
    counts = [count_folds(d.runner.step_launcher()) for d in drivers]  # type: ignore[attr-defined]
    rows = [[driver.open(slot) for slot in (2, 0, 5)] for driver in drivers]
    rng = random.Random(1)

    def ids(num: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(num)]

    for place, num in enumerate((62, 300, 3000)):
        prompt = ids(num)
        for driver, mine in zip(drivers, rows, strict=True):
            driver.prefill(mine[place], prompt, chunk=500)
    similar = []
    for _ in range(30):
        tokens = [
            (place, ids(rng.choice((1, 1, 2, 4, 5))))
            for place in rng.sample(range(3), rng.randrange(1, 4))
        ]
        found = [
            driver.step([(mine[place], [token]) for place, some in tokens for token in some])
            for driver, mine in zip(drivers, rows, strict=True)
        ]
        assert bool(found[0].isfinite().all())
        assert torch.equal(found[1], found[2])
        similar.append(torch.nn.functional.cosine_similarity(found[0], found[1], dim=-1))
        for place, some in tokens:
            wrong = rng.randrange(len(some))
            for driver, mine in zip(drivers, rows, strict=True):
                driver.rewind(mine[place], wrong)
    assert [set(count) for count in counts] == [{1}, q_lens, q_lens]
    # Of the whole KV too: the same code wrote it.
    pools = [driver.runner.kv_pool for driver in drivers[1:]]  # type: ignore[attr-defined]
    pages = torch.tensor(sorted({page for row in rows[1] for page in row.pages}), device="cuda")
    assert torch.equal(*(pool[pages].view(torch.uint8) for pool in pools))
    of_rows = torch.cat(similar).sort().values
    assert float(of_rows.median()) > 0.999, of_rows
    assert float(of_rows[len(of_rows) // 4]) > 0.99, of_rows
