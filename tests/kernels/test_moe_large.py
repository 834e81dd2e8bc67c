# SPDX-License-Identifier: Apache-2.0
"""W4 experts with many tokens: gather interpreted, GEMM compiled, the layer checked on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from kernels.moe_routing import MoeRouting
from kernels.reference.moe import moe_w4 as reference_moe
from kernels.reference.quant import quantize_w4
from kernels.w4_layout import tile_w4, tile_w4_gate_up

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Parts of the sum are rounded to bf16: measured 1.2e-3 on an H200.
TOLERANCE = 3e-3

# Position (k2, c, pair) of 16 columns holds column (c, k2, pair), by an independent permutation.
_GATHER = """
import torch
from kernels.triton.moe_gather import moe_gather_kernel
x = torch.arange(3 * 48, dtype=torch.float32).view(3, 48)
pairs = torch.tensor([5, 0, 3, 4], dtype=torch.int32)
out = torch.full((4, 48), -1.0)
moe_gather_kernel[(4, 2)](x, pairs, out, K=48, TOP_K=2, BLOCK=32)
wanted = x[[2, 0, 1, 2]].view(4, 3, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(4, 48)
assert torch.equal(out, wanted), out
print("ok")
"""
# Against the composition of plain ops; shared experts follow the chosen ones.
_ROUTE = """
import torch
from kernels.moe_routing import MoeRouting
from kernels.reference.moe import moe_route
from kernels.reference.norm import rms_norm
from kernels.triton.moe_large import norm_route_large
torch.manual_seed(0)
x, norm = torch.randn(5, 32), torch.rand(32) + 0.5
for routing, bias, num_shared in (
    (MoeRouting(num_experts=12, top_k=3), None, 2),
    (MoeRouting(num_experts=16, top_k=4, score="sigmoid", num_groups=4, groups_kept=2,
                group_score="top2", renormalise=True, scale=2.5), torch.randn(16) * 0.1, 1),
    (MoeRouting(num_experts=8, top_k=2), None, 0),
):
    router = torch.randn(routing.num_experts, 32)
    normed, ids, weights = norm_route_large(x, norm, 1e-6, router, bias, routing, num_shared)
    torch.testing.assert_close(normed, rms_norm(x, norm, 1e-6))
    wanted_ids, wanted = moe_route(normed @ router.T, bias, routing)
    assert torch.equal(ids[:, : routing.top_k], wanted_ids)
    torch.testing.assert_close(weights[:, : routing.top_k], wanted, rtol=1e-5, atol=1e-6)
    behind = torch.arange(routing.num_experts, routing.num_experts + num_shared)
    assert torch.equal(ids[:, routing.top_k :].long(), behind.expand(5, -1))
    assert (weights[:, routing.top_k :] == 1).all()
print("ok")
"""


def _run(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_rows_are_gathered_by_expert_with_columns_in_the_order_of_the_tensor_core() -> None:
    assert _run(["-c", _GATHER], TRITON_INTERPRET="1") == "ok\n"


def test_routing_of_many_tokens_agrees_with_norm_scores_and_choice() -> None:
    assert _run(["-c", _ROUTE], TRITON_INTERPRET="1") == "ok\n"


@pytest.mark.slow
def test_the_gemm_compiles_to_the_units_it_is_written_for() -> None:
    arguments = ["-W", "error", "-m", "tests.kernels.triton_compiled", "moe_w4_hopper"]
    line = json.loads(_run(arguments))
    assert (line["wgmma"], line["tma"], line["mma_sync"]) == (True, True, False)
    assert line["bf16x2_scale"] and line["shared_bytes"] <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxint4"])
@pytest.mark.parametrize("num_tokens", [3, 40, 300, 700, 2000])
def test_the_layer_agrees_with_the_reference(fmt: str, num_tokens: int) -> None:
    """Items of one to four blocks of tokens, experts without any, and NaN in nobody's way."""
    from kernels.triton import expert_choice, moe_large

    torch.manual_seed(num_tokens)

    def quantized(rows: int, cols: int) -> object:
        return quantize_w4(torch.randn(16, rows, cols, device="cuda") * cols**-0.5, fmt)

    gate_up = tile_w4_gate_up(quantized(384, 512), quantized(384, 512))  # type: ignore[arg-type]
    down = tile_w4(quantized(512, 384))  # type: ignore[arg-type]
    x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, 16, device="cuda") + torch.linspace(-3, 3, 16, device="cuda")
    ids, weights = expert_choice.route(logits, None, MoeRouting(num_experts=16, top_k=4))
    shared = torch.randn_like(x) if num_tokens % 200 else None
    args = (x, ids, weights, gate_up, down, shared)
    found = moe_large.moe_w4_large(*args)
    wanted = reference_moe(*args)
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(error) < TOLERANCE
    assert torch.equal(found, moe_large.moe_w4_large(*args))
