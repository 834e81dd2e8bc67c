# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decode step on a GPU against their references, at the sizes they are made for."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8_weight import Fp8Weight
from kernels.latent_planes import decode_rows, latent_planes
from kernels.mla_workspace import make_mla_workspace
from kernels.moe_routing import MoeRouting
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.portable import layer_ops
from kernels.reference import linear as reference
from kernels.reference import moe as reference_moe
from kernels.reference import step_ids as reference_ids
from kernels.reference.mla import mla_decode as reference_mla
from kernels.reference.quant import quantize_w4
from kernels.selection import override
from kernels.w4_layout import TiledW4, tile_w4, tile_w4_gate_up, tile_w4_linear, tile_w4_swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# bf16 results: 2^-9 of each number at most, about 1.7e-3 in the norm; a norm multiplied in rounds
# once more.
TOLERANCE = 5e-3


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def _weight(kind: str, rows: int, cols: int) -> torch.Tensor | Fp8Weight | TiledW4:
    dense = torch.randn(rows, cols, device="cuda") * cols**-0.5
    if kind == "bf16":
        plain: torch.Tensor = dense.to(torch.bfloat16)
        return plain
    if kind == "fp8":
        scales = torch.rand(-(-rows // 128), -(-cols // 128), device="cuda") + 0.5
        return Fp8Weight(values=(dense * 8).to(torch.float8_e4m3fn), scales=scales)
    parts = (dense[:64], dense[64:] * 3)
    return tile_w4_linear([quantize_w4(part, kind) for part in parts])


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxint4", "fp8", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), [(3648, 2048), (192, 10944), (1024, 512)])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 17, 100])
def test_linear_layers_agree_with_the_reference(
    kind: str, rows: int, cols: int, num_tokens: int
) -> None:
    from kernels.ops.linear import linear, linear_add, norm_linear

    torch.manual_seed(num_tokens)
    weight = _weight(kind, rows, cols)
    x, residual = draw(num_tokens, cols), draw(num_tokens, rows)
    gain = torch.rand(cols, device="cuda") + 0.5
    wide = draw(num_tokens, cols + 64)[:, :cols]
    pairs = [
        (linear(x, weight), reference.linear(x, weight)),
        (linear_add(x, weight, residual), reference.linear_add(x, weight, residual)),
        (
            norm_linear(wide, gain, 1e-6, weight, torch.float32),
            reference.norm_linear(wide, gain, 1e-6, weight, torch.float32),
        ),
    ]
    for found, wanted in pairs:
        assert relative_error(found, wanted) < TOLERANCE
    if num_tokens == 1:
        from kernels.triton.linear import linear_of_parts

        parts = torch.randn(4, num_tokens, cols, device="cuda")
        summed = parts.sum(0).to(torch.bfloat16)
        found = linear_of_parts(parts, weight, residual)
        assert relative_error(found, reference.linear_add(summed, weight, residual)) < TOLERANCE


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxint4"])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_swiglu_layers_agree_with_the_reference(kind: str, num_tokens: int) -> None:
    from kernels.ops.linear import swiglu_linear

    torch.manual_seed(num_tokens)
    gate, up = (quantize_w4(torch.randn(1408, 2048, device="cuda") * s, kind) for s in (0.02, 0.05))
    weight, x = tile_w4_swiglu(gate, up), draw(num_tokens, 2048)
    for norm in (None, torch.rand(2048, device="cuda") + 0.5):
        found = swiglu_linear(x, norm, 1e-5, weight)
        assert relative_error(found, reference.swiglu_linear(x, norm, 1e-5, weight)) < TOLERANCE


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxint4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 16])
def test_experts_by_rows_agree_with_the_reference(fmt: str, num_tokens: int) -> None:
    from kernels.triton import moe

    torch.manual_seed(num_tokens)

    def quantized(rows: int, cols: int) -> object:
        return quantize_w4(torch.randn(16, rows, cols, device="cuda") * cols**-0.5, fmt)

    gate_up = tile_w4_gate_up(quantized(1408, 2048), quantized(1408, 2048))  # type: ignore[arg-type]
    down = tile_w4(quantized(2048, 1408))  # type: ignore[arg-type]
    scores = torch.rand(num_tokens, 16, device="cuda")
    ids = scores.topk(8).indices.to(torch.int32)
    weights = torch.rand(num_tokens, 8, device="cuda")
    args = (draw(num_tokens, 2048), ids, weights, gate_up, down, draw(num_tokens, 2048))
    rows = moe.RowTile(tokens=8)
    found = moe.run_moe_w4(*args, moe.MoeTiles(tokens=8, first=rows, second=rows))
    assert relative_error(found, reference_moe.moe_w4(*args)) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 16, 64])
@pytest.mark.parametrize("kind", ["v2_lite", "v3"])
def test_norm_and_routing_in_one_agree_with_their_parts(num_tokens: int, kind: str) -> None:
    from kernels.triton import expert_choice

    torch.manual_seed(num_tokens)
    routing, hidden, bias = MoeRouting(num_experts=64, top_k=6), 2048, None
    if kind == "v3":
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
        hidden, bias = 7168, torch.randn(256, device="cuda") * 0.1
    gain = torch.rand(hidden, device="cuda") + 0.5
    router = torch.randn(routing.num_experts, hidden, device="cuda") * hidden**-0.5
    args = (draw(num_tokens, hidden), gain, 1e-6, router, bias, routing, 2)
    for _ in range(3):  # the counters are as they were
        normed, ids, weights = expert_choice.norm_route(*args)
    wanted_normed, wanted_ids, wanted_weights = layer_ops.moe_norm_route_of_three(*args)
    assert relative_error(normed, wanted_normed) < 1e-3
    # Sums in another order turn near-equal scores round.
    same = (ids.sort(dim=1).values == wanted_ids.sort(dim=1).values).all(dim=1)
    assert float(same.float().mean()) > 0.9
    rows = (ids == wanted_ids).all(dim=1)
    torch.testing.assert_close(weights[rows], wanted_weights[rows], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 16, 30])
def test_absorbed_queries_and_stored_latents_agree_with_their_parts(num_tokens: int) -> None:
    from kernels.triton import mla_layer

    torch.manual_seed(num_tokens)
    angles = torch.rand(500, 32, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    down = draw(num_tokens, 16 * 192 + 576)
    positions = torch.randint(0, 500, (num_tokens,), device="cuda").int()
    slots = torch.randperm(8 * 64, device="cuda")[:num_tokens].int()
    w_uk, gain = draw(16, 128, 512) * 0.1, torch.rand(512, device="cuda")
    results = []
    for absorb in (mla_layer.mla_absorb, layer_ops.mla_absorb_of_two):
        pool = torch.zeros(8, 3, 64, 576, device="cuda", dtype=torch.bfloat16)
        mine = down.clone()
        q = mine[:, :-576].view(num_tokens, 16, 192)
        found = absorb(q, mine[:, -576:], gain, 1e-6, positions, table, pool[:, 2], slots, w_uk)
        results.append((found, pool))
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) < TOLERANCE


@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
@pytest.mark.parametrize("lens", [[4000], [64, 1, 700, 5000], [100] * 16])
def test_attention_up_to_the_residual_agrees_with_the_reference(kind: str, lens: list[int]) -> None:
    from kernels.triton import mla, mla_layer

    torch.manual_seed(len(lens))
    num, most = len(lens), max(-(-n // 64) for n in lens)
    pool = draw(num * most, 1, 64, 576)[:, 0]
    pages = torch.randperm(num * most, device="cuda").int().view(num, most)
    slots = torch.arange(num, device="cuda").int()
    seq_lens = torch.tensor(lens, device="cuda").int()
    q, w_uv, residual = draw(num, 16, 576), draw(16, 128, 512) * 0.05, draw(num, 2048)
    weight = _weight(kind, 2048, 2048)
    workspace = make_mla_workspace(max_rows=num, num_heads=16, q_len=1, device="cuda")
    workspace.partial_out.fill_(float("nan"))
    mla.plan(workspace, seq_lens, pages, slots)
    attended = reference_mla(q, pool, pages, slots, seq_lens, 0.1, 512, workspace)
    values = torch.einsum("thc,hvc->thv", attended.float(), w_uv.float()).flatten(1)
    wanted = reference.linear_add(values.to(torch.bfloat16), weight, residual)
    args = (q, pool, pages, slots, seq_lens, 0.1, workspace, w_uv, weight, residual)
    found = mla_layer.mla_output(*args)
    assert relative_error(found, wanted) < TOLERANCE
    assert torch.equal(found, mla_layer.mla_output(*args))


def test_the_greedy_choice_is_the_reference() -> None:
    from kernels.triton import sampling

    torch.manual_seed(0)
    logits = torch.randn(16, 102400, device="cuda")
    logits[1, 77] = logits[1, 99999] = 50.0
    logits[2, 100] = float("nan")
    logits[4] = float("-inf")
    masks = torch.randint(-(2**31), 2**31 - 1, (17, 3200), device="cuda").int()
    masks[3] = 0
    masks[1] = -1
    rows = torch.arange(16, device="cuda").double()
    results = []
    for greedy in (sampling.greedy_rows, reference_ids.greedy_rows, sampling.greedy_rows):
        fed = torch.full((17,), 9, device="cuda").int()
        ids = torch.zeros(16, device="cuda").int()
        greedy(logits, rows, rows, masks, fed, ids)
        results.append((ids, fed))
    for ids, fed in results[1:]:
        assert torch.equal(results[0][0], ids)
        assert torch.equal(results[0][1], fed)


@pytest.mark.parametrize("lens", [[1000], [1, 65, 4096, 700, 63, 64], [0, 200, 0], [40000]])
@pytest.mark.parametrize(
    ("kernel", "q_len"),
    [
        ("gluon_hopper_fp8", 1),
        ("gluon_hopper_fp8", 2),
        ("triton", 1),
        ("triton", 4),
    ],
)
def test_decode_over_fp8_planes_agrees_with_the_reference(
    lens: list[int], kernel: str, q_len: int
) -> None:
    from kernels.ops.mla import mla_decode, plan_mla_decode

    torch.manual_seed(len(lens))
    lens = [max(n, q_len) if n else 0 for n in lens]
    most = max(-(-n // 64) for n in lens)
    num_pages = len(lens) * most
    pool = torch.full((num_pages, 2, 64 * 656), 0xFF, dtype=torch.uint8, device="cuda")
    pages = torch.randperm(num_pages, device="cuda").int().view(len(lens), most)
    identity = torch.tensor([[1.0] * 32 + [0.0] * 32], device="cuda")
    for row, length in enumerate(lens):
        if not length:
            continue
        at = torch.arange(length, device="cuda")
        slots = (pages[row].long()[at // 64] * 64 + at % 64).int()
        mla_kv_write(
            draw(length, 1, 64),
            draw(length, 576),
            torch.rand(512, device="cuda") + 0.5,
            1e-6,
            torch.zeros_like(slots),
            identity,
            pool[:, 1],
            slots,
        )
    slots = torch.arange(len(lens), device="cuda").int()
    seq_lens = torch.tensor(lens, device="cuda").int()
    q = draw(len(lens) * q_len, 16, 576)
    workspace = make_mla_workspace(max_rows=len(lens), num_heads=16, q_len=q_len, device="cuda")
    workspace.partial_out.fill_(float("nan"))
    plan_mla_decode(workspace, seq_lens, pages, slots)
    args = (q, pool[:, 1], pages, slots, seq_lens, 0.1, workspace)
    with override("mla_decode", kernel):
        found, again = mla_decode(*args), mla_decode(*args)
    wanted = reference_mla(q, pool[:, 1], pages, slots, seq_lens, 0.1, 512, workspace)
    assert relative_error(found, wanted) < TOLERANCE
    assert torch.equal(found, again)


def test_queries_of_any_size_attend_over_fp8_planes_as_the_reference() -> None:
    """Rows of zeros, tiny and huge ones, and rows in which one number outweighs all others."""
    from kernels.ops.mla import mla_decode, plan_mla_decode

    torch.manual_seed(3)
    size, num_pages = 64 * 656, 40
    pool = torch.zeros(num_pages, size, dtype=torch.uint8, device="cuda")
    planes = latent_planes(pool, 512, 64)
    codes = torch.randint(0, 0x7F, planes.values.shape, device="cuda")
    codes += 0x80 * torch.randint(0, 2, codes.shape, device="cuda")
    planes.values.view(torch.uint8).copy_(codes)
    exponents = torch.randint(-12, -6, planes.scales.shape, device="cuda")
    planes.scales.copy_(torch.exp2(exponents.float()))
    planes.rope.copy_(draw(num_pages, 64, 64))
    lens = [num_pages // 2 * 64 - 3, 700]
    pages = torch.randperm(num_pages, device="cuda").int().view(2, -1)
    slots, seq_lens = torch.arange(2, device="cuda").int(), torch.tensor(lens, device="cuda").int()
    q = draw(2, 16, 576)
    sizes = torch.tensor([0.0, 1e-20, 1e-5, 1e-2, 1.0, 3.0, 10.0, 1.0] * 2, device="cuda")
    q *= sizes[:, None]
    q[:, 7, 100] = 100.0
    q[:, 15, 300] = -40.0
    workspace = make_mla_workspace(max_rows=2, num_heads=16, q_len=1, device="cuda")
    plan_mla_decode(workspace, seq_lens, pages, slots)
    with override("mla_decode", "gluon_hopper_fp8"):
        found = mla_decode(q, pool, pages, slots, seq_lens, 0.1, workspace)
    for row, length in enumerate(lens):
        shown = pages[row].long()
        scales = planes.scales[shown].repeat_interleave(128, dim=-1)
        latents = (planes.values[shown].float() * scales).flatten(0, 1)[:length].double()
        keys = torch.cat((latents, planes.rope[shown].flatten(0, 1)[:length].double()), -1)
        weights = torch.softmax(q[row].double() @ keys.T * 0.1, dim=-1)
        wanted = weights @ latents
        error = (found[row].double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(error.max()) < 2 * TOLERANCE, error  # of the worst row, sharp ones among them


def test_fp8_planes_are_written_as_the_reference_writes_them() -> None:
    torch.manual_seed(1)
    angles = torch.rand(500, 32, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    kv, gain = draw(100, 576) * 3, torch.rand(512, device="cuda")
    kv[3, :512] = 0.0
    positions = torch.randint(0, 500, (100,), device="cuda").int()
    slots = torch.randperm(4 * 64, device="cuda")[:100].int()
    pools = []
    for name in ("triton", "reference"):
        pool = torch.zeros(4, 2, 64 * 656, dtype=torch.uint8, device="cuda")
        with override("mla_kv_write", name):
            mla_kv_write(draw(100, 2, 64), kv, gain, 1e-6, positions, table, pool[:, 1], slots)
        pools.append(latent_planes(pool[:, 1], 512, 64))
    pages = torch.arange(4, device="cuda")
    rows = [decode_rows(planes, pages, torch.float32) for planes in pools]
    assert relative_error(*rows) < 3e-3  # some numbers lie halfway between two codes
    assert torch.equal(pools[0].scales, pools[1].scales)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_pages_go_to_a_blob_and_come_back(is_pinned: bool) -> None:
    from kernels.ops.page_copy import move_pages

    pool = torch.randint(0, 256, (40, 27 * 64 * 656), device="cuda").to(torch.uint8)
    before = pool.clone()
    pages = torch.randperm(40, device="cuda")[:9].int()
    shape = (9, pool.shape[1])
    blob = torch.zeros(shape, dtype=torch.uint8, device=None if is_pinned else "cuda")
    blob = blob.pin_memory() if is_pinned else blob
    move_pages(pool, pages, blob, is_out=True)
    torch.cuda.synchronize()
    assert torch.equal(blob.cuda(), before[pages.long()])
    pool[pages.long()] = 0
    move_pages(pool, pages, blob, is_out=False)
    assert torch.equal(pool, before)
