# SPDX-License-Identifier: Apache-2.0
"""GPU kernels against their references, and in CUDA graphs whose inputs change."""

from __future__ import annotations

import pytest
import torch

from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.moe_routing import MoeRouting
from kernels.reference.mla import mla_decode as reference_mla
from kernels.reference.moe import moe_route as reference_route
from kernels.reference.moe import moe_w4 as reference_moe
from kernels.reference.quant import quantize_w4
from kernels.w4_layout import TiledW4, tile_w4, tile_w4_gate_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LATENT, ROPE, PAGE = 512, 64, 64
# bf16 operands and P, fp32 sums: |out - ref| / |ref| measured 0.8e-3 .. 1.5e-3 on an H200.
MLA_TOLERANCE = 4e-3
# Exact products, bf16 activations between the GEMMs as in the reference: measured <= 4e-4.
MOE_TOLERANCE = 2e-3


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class MlaCase:
    """Rows with shuffled pages in the second layer of a two-layer pool."""

    def __init__(self, capacity: list[int], heads: int, q_len: int) -> None:
        pages = [-(-n // PAGE) for n in capacity]
        self.pool = torch.randn(
            sum(pages), 2, PAGE, LATENT + ROPE, device="cuda", dtype=torch.bfloat16
        )[:, 1]
        order = torch.randperm(sum(pages), device="cuda").to(torch.int32)
        self.table = torch.zeros(len(pages) + 1, max(pages), dtype=torch.int32, device="cuda")
        at = 0
        for row, count in enumerate(pages):
            self.table[row + 1, :count] = order[at : at + count]
            at += count
        self.slots = torch.arange(1, len(pages) + 1, dtype=torch.int32, device="cuda")
        shape = (len(pages) * q_len, heads, LATENT + ROPE)
        self.q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.lens = torch.zeros(len(pages), dtype=torch.int32, device="cuda")
        self.workspace: MlaWorkspace = make_mla_workspace(
            max_rows=len(pages) + 2, num_heads=heads, q_len=q_len, device="cuda"
        )

    def arguments(self) -> tuple[object, ...]:
        return (self.q, self.pool, self.table, self.slots, self.lens, 0.1, LATENT, self.workspace)

    def set_lens(self, lens: list[int]) -> None:
        self.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        # Tokens of nobody hold NaN: reading one would show.
        self.pool.fill_(float("nan"))
        for slot, length in zip(self.slots.tolist(), lens, strict=True):
            pages = self.table[slot, : -(-length // PAGE)].long()
            values = torch.randn(len(pages) * PAGE, LATENT + ROPE, device="cuda")
            values[length:] = float("nan")
            self.pool[pages] = values.view(-1, PAGE, LATENT + ROPE).to(torch.bfloat16)
        self.workspace.partial_out.fill_(float("nan"))
        self.workspace.partial_lse.fill_(float("nan"))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 33, 64, 300])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxint4"])
def test_experts_summed_in_the_second_product_have_the_bits_of_those_summed_behind_it(
    fmt: str, num_tokens: int
) -> None:
    from kernels.triton import moe

    torch.manual_seed(num_tokens)
    gate_up, down = _weights(fmt)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
        chosen = torch.rand(num_tokens, 16, device="cuda").topk(4)
        behind = torch.randn_like(x) if seed else None
        args = (x, chosen.indices.int(), chosen.values.contiguous(), gate_up, down, behind)
        alone = moe.without_combining(*args)
        for _ in range(20):  # whoever ends last differs from run to run
            assert torch.equal(moe.moe_w4_combined(*args), alone)
    assert not moe._counters(x.device).any()


@pytest.mark.parametrize("kernel", ["decode_hopper", "decode_portable"])
@pytest.mark.parametrize(
    ("lens", "heads", "q_len"),
    [
        ([1000], 16, 1),
        ([1, 65, 4096, 700, 63, 64], 16, 1),
        ([5, 130, 900], 16, 2),
        ([2048, 77, 1900, 64], 16, 4),
        ([300, 1000, 129], 16, 8),
        ([500, 3000], 128, 1),
        ([40000], 16, 3),
        ([0, 200, 0], 16, 1),
    ],
)
def test_mla_decode_agrees_with_the_reference(
    kernel: str, lens: list[int], heads: int, q_len: int
) -> None:
    from kernels.triton import mla

    torch.manual_seed(0)
    case = MlaCase([max(n, 1) for n in lens], heads, q_len)
    case.set_lens(lens)
    mla.plan(case.workspace, case.lens, case.table, case.slots)
    actual = getattr(mla, kernel)(*case.arguments())
    assert relative_error(actual, reference_mla(*case.arguments())) < MLA_TOLERANCE  # type: ignore[arg-type]
    assert torch.equal(actual, getattr(mla, kernel)(*case.arguments()))


def test_a_captured_mla_step_follows_the_lengths_of_each_replay() -> None:
    from kernels.triton import mla

    torch.manual_seed(1)
    case = MlaCase([9000, 5000, 700, 64], 16, 4)
    case.set_lens([64, 64, 64, 64])

    def step() -> torch.Tensor:
        mla.plan(case.workspace, case.lens, case.table, case.slots)
        mla.decode_hopper(*case.arguments())  # type: ignore[arg-type]
        return mla.decode_hopper(*case.arguments())  # type: ignore[arg-type]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lens in ([9000, 5000, 700, 64], [4, 4999, 0, 40], [8191, 65, 66, 4]):
        case.set_lens(lens)
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, reference_mla(*case.arguments())) < MLA_TOLERANCE  # type: ignore[arg-type]


def _weights(fmt: str) -> tuple[TiledW4, TiledW4]:
    def quantized(rows: int, cols: int) -> object:
        return quantize_w4(torch.randn(16, rows, cols, device="cuda") * cols**-0.5, fmt)

    gate_up = tile_w4_gate_up(quantized(320, 512), quantized(320, 512))  # type: ignore[arg-type]
    return gate_up, tile_w4(quantized(512, 320))  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxint4"])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 33, 100, 200, 700])
def test_moe_layer_agrees_with_the_reference(fmt: str, num_tokens: int) -> None:
    from kernels.triton import expert_choice, moe

    torch.manual_seed(num_tokens)
    gate_up, down = _weights(fmt)
    routing = MoeRouting(num_experts=16, top_k=4)
    x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
    # A skew: some experts get most tokens, some none.
    logits = torch.randn(num_tokens, 16, device="cuda") + torch.linspace(-2, 2, 16, device="cuda")
    shared = torch.randn_like(x) if num_tokens % 2 else None
    ids, weights = expert_choice.route(logits, None, routing)
    wanted_ids, wanted_weights = reference_route(logits, None, routing)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)
    args = (x, ids, weights, gate_up, down, shared)
    actual = moe.moe_w4(*args)
    assert relative_error(actual, reference_moe(*args)) < MOE_TOLERANCE
    assert torch.equal(actual, moe.moe_w4(*args))


def test_subnormal_codes_and_extreme_scales_are_exact() -> None:
    """Every e2m1 code times the smallest and largest scales; one column at a time, so no sums."""
    from kernels.triton import moe

    codes = torch.arange(16, dtype=torch.float32, device="cuda")
    values = torch.where(
        codes % 8 < 2, codes % 8 * 0.5, (1 + codes % 2 / 2) * 2 ** (codes % 8 // 2 - 1)
    )
    values = torch.where(codes > 7, -values, values)
    down = torch.zeros(16, 64, 64, device="cuda")
    down[:, :, :16] = values * 448.0
    down[:, :, 16:32] = values * 2.0**-9
    gate_up, _ = (quantize_w4(torch.ones(16, 64, 64, device="cuda"), "nvfp4") for _ in range(2))
    tiled = tile_w4(quantize_w4(down, "nvfp4"))
    x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32, device="cuda")
    weights = torch.ones(3, 2, device="cuda")
    args = (x, ids, weights, tile_w4_gate_up(gate_up, gate_up), tiled, None)
    torch.testing.assert_close(moe.moe_w4(*args), reference_moe(*args), rtol=1e-2, atol=0.0)


def test_deepseek_v3_routing_agrees_with_the_reference() -> None:
    from kernels.triton import expert_choice

    torch.manual_seed(4)
    routing = MoeRouting(
        num_experts=256,
        top_k=8,
        score="sigmoid",
        num_groups=8,
        groups_kept=4,
        group_score="top2",
        renormalise=True,
        scale=2.5,
    )
    logits = torch.randn(97, 256, device="cuda")
    bias = torch.randn(256, device="cuda") * 0.1
    ids, weights = expert_choice.route(logits, bias, routing)
    wanted_ids, wanted_weights = reference_route(logits, bias, routing)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)


def test_a_captured_moe_layer_follows_the_routing_of_each_replay() -> None:
    from kernels.triton import expert_choice, moe

    torch.manual_seed(2)
    gate_up, down = _weights("nvfp4")
    routing = MoeRouting(num_experts=16, top_k=4)
    x = torch.randn(24, 512, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(24, 16, device="cuda")

    def layer() -> torch.Tensor:
        ids, weights = expert_choice.route(logits, None, routing)
        return moe.moe_w4(x, ids, weights, gate_up, down, None)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in range(3):
        torch.manual_seed(10 + seed)
        logits.copy_(torch.randn(24, 16, device="cuda") * (seed + 1))
        x.copy_(torch.randn(24, 512, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        ids, weights = reference_route(logits, None, routing)
        assert (
            relative_error(out, reference_moe(x, ids, weights, gate_up, down, None)) < MOE_TOLERANCE
        )
