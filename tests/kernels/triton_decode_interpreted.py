# SPDX-License-Identifier: Apache-2.0
"""Child of test_triton_decode.py: the kernels of a decode step with TRITON_INTERPRET=1, on a CPU.

The kernels' own launch code runs unchanged, in fp32; only the compiler is replaced.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.prefill_layer import LayerSizes, PrefillLayers
from engine.layers import mla as layers_mla
from kernels.fp8_weight import Fp8Weight
from kernels.latent_planes import decode_rows, latent_planes, row_bytes
from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.moe_routing import MoeRouting
from kernels.portable import layer_ops
from kernels.reference import linear as reference
from kernels.reference import mla as reference_mla
from kernels.reference import moe as reference_moe
from kernels.reference import step_ids as reference_ids
from kernels.reference.mla_kv_write import mla_kv_write as reference_write
from kernels.reference.quant import quantize_w4
from kernels.w4_layout import TiledW4, tile_w4, tile_w4_gate_up, tile_w4_linear, tile_w4_swiglu
from tests.fakes.attention_by_hand import attention_by_hand
from tests.fakes.folded_layers import FoldedLayers


def close(actual: torch.Tensor, expected: torch.Tensor, allowed: float = 2e-6) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < allowed, float(error)


def _weight(kind: str, rows: int, cols: int) -> torch.Tensor | Fp8Weight | TiledW4:
    dense: torch.Tensor = torch.randn(rows, cols) * cols**-0.5
    if kind == "dense":
        return dense
    if kind == "fp8":
        scales = torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5
        return Fp8Weight(values=dense.to(torch.float8_e4m3fn), scales=scales)
    half = quantize_w4(dense[: rows // 2], kind), quantize_w4(dense[rows // 2 :] * 3, kind)
    return tile_w4_linear(half)


def check_linear(kind: str, num_tokens: int, rows: int, cols: int) -> None:
    from kernels.triton import linear

    torch.manual_seed(num_tokens + rows)
    weight = _weight(kind, rows, cols)
    x, gain = torch.randn(num_tokens, cols), torch.rand(cols) + 0.5
    residual = torch.randn(num_tokens, rows)
    wide = torch.randn(num_tokens, cols + 64)[:, :cols]  # rows of a wider matrix
    close(linear.linear(x, weight), reference.linear(x, weight))
    close(
        linear.norm_linear(wide, gain, 1e-6, weight, torch.float32),
        reference.norm_linear(wide, gain, 1e-6, weight, torch.float32),
    )
    close(linear.linear_add(x, weight, residual), reference.linear_add(x, weight, residual))
    parts = torch.randn(3, num_tokens, cols)
    close(
        linear.linear_of_parts(parts, weight, residual),
        reference.linear_add(parts.sum(0), weight, residual),
    )


def check_swiglu(kind: str, num_tokens: int) -> None:
    from kernels.triton import linear

    torch.manual_seed(num_tokens)
    gate, up = (quantize_w4(torch.randn(64, 192) * scale, kind) for scale in (0.1, 0.3))
    weight, x, gain = tile_w4_swiglu(gate, up), torch.randn(num_tokens, 192), torch.rand(192)
    for norm in (None, gain):
        close(
            linear.swiglu_linear(x, norm, 1e-5, weight),
            reference.swiglu_linear(x, norm, 1e-5, weight),
        )
    close(linear.expand_w4(weight, torch.float32), reference.dense_fp32(weight))
    plain = tile_w4_linear([gate])
    close(linear.expand_w4(plain, torch.float32), reference.dense_fp32(plain))


def check_moe_rows(fmt: str, num_tokens: int) -> None:
    from kernels.triton import moe

    torch.manual_seed(num_tokens)
    experts, hidden, width = 5, 128, 64

    def quantized(rows: int, cols: int) -> object:
        return quantize_w4(torch.randn(experts, rows, cols) * cols**-0.5, fmt)

    gate_up = tile_w4_gate_up(quantized(width, hidden), quantized(width, hidden))  # type: ignore[arg-type]
    down = tile_w4(quantized(hidden, width))  # type: ignore[arg-type]
    x, residual = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden)
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(num_tokens)]).to(torch.int32)
    args = (x, ids, torch.rand(num_tokens, 3), gate_up, down, residual)
    rows = moe.RowTile(tokens=8)
    tiles = moe.MoeTiles(tokens=8, first=rows, second=rows)
    close(moe.run_moe_w4(*args, tiles), reference_moe.moe_w4(*args))


def check_norm_route(routing: MoeRouting, has_bias: bool, num_shared: int) -> None:
    from kernels.triton import expert_choice

    torch.manual_seed(3)
    x, gain = torch.randn(5, 96), torch.rand(96) + 0.5
    router = torch.randn(routing.num_experts, 96)
    bias = torch.randn(routing.num_experts) * 0.1 if has_bias else None
    args = (x, gain, 1e-6, router, bias, routing, num_shared)
    for found, wanted in zip(
        expert_choice.norm_route(*args), layer_ops.moe_norm_route_of_three(*args), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert not bool(expert_choice.arrivals(x.device, 5).any())
    x[2] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy, of arithmetic with NaN
        _, ids, _ = expert_choice.norm_route(*args)
    assert bool(((ids >= 0) & (ids < routing.num_experts + num_shared)).all())


def check_absorb(num_tokens: int) -> None:
    from kernels.triton import mla_layer

    torch.manual_seed(num_tokens)
    heads, nope, latent, rope, page = 3, 32, 64, 16, 16
    angles = torch.rand(50, rope // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    down = torch.randn(num_tokens, heads * (nope + rope) + latent + rope)
    kv = down[:, -(latent + rope) :]
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(4 * page)[:num_tokens].to(torch.int32)
    w_uk, gain = torch.randn(heads, nope, latent), torch.rand(latent)
    results = []
    for absorb in (mla_layer.mla_absorb, layer_ops.mla_absorb_of_two):
        pool = torch.zeros(4, 2, page, latent + rope)
        q = down.clone()[:, : -(latent + rope)].view(num_tokens, heads, nope + rope)
        found = absorb(q, kv, gain, 1e-6, positions, table, pool[:, 1], slots, w_uk)
        results.append((found, pool))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def check_absorb_placed(num_tokens: int) -> None:
    """Queries at places of their own, the others as they were; latents where they always go."""
    from kernels.triton import mla_layer

    torch.manual_seed(num_tokens)
    heads, nope, latent, rope, page = 3, 32, 64, 16, 16
    table = torch.rand(50, rope)
    kv = torch.randn(num_tokens, latent + rope)
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(4 * page)[:num_tokens].to(torch.int32)
    places = torch.randperm(3 * num_tokens)[:num_tokens].to(torch.int32)
    w_uk, gain = torch.randn(heads, nope, latent), torch.rand(latent)
    q = torch.randn(num_tokens, heads, nope + rope)
    results = []
    for put in (None, places):
        pool = torch.zeros(4, 2, page, latent + rope)
        out = torch.full((3 * num_tokens, heads, latent + rope), 7.0)
        args = (q.clone(), kv, gain, 1e-6, positions, table, pool[:, 1], slots, w_uk)
        if put is None:
            found = mla_layer.mla_absorb(*args)
            results.append((out.index_copy(0, places.long(), found), pool))
        else:
            mla_layer.mla_absorb(*args, out, put)
            results.append((out, pool))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def planes_case(lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool of fp8 planes (two layers) that holds rows of these lengths; NaN where no token is."""
    latent, rope, page = 128, 16, 64
    most = max(-(-n // page) for n in lens)
    num_pages = len(lens) * most + 1
    pool = torch.full((num_pages, 2, page * row_bytes(latent, rope)), 0xFF, dtype=torch.uint8)
    pages = torch.randperm(num_pages)[: len(lens) * most].to(torch.int32).view(len(lens), most)
    for row, length in enumerate(lens):
        at = torch.arange(length)
        slots = pages[row].long()[at // page] * page + at % page
        reference_write(
            torch.zeros(length, 1, rope),
            torch.randn(length, latent + rope),
            torch.rand(latent) + 0.5,
            1e-6,
            torch.zeros(length, dtype=torch.int32),
            torch.tensor([[1.0] * (rope // 2) + [0.0] * (rope // 2)]),
            pool[:, 1],
            slots.to(torch.int32),
        )
    slots = torch.arange(len(lens), dtype=torch.int32)
    return pool, pages, slots, torch.tensor(lens, dtype=torch.int32)


def check_fp8_decode(lens: list[int]) -> None:
    from kernels.triton import mla

    torch.manual_seed(5)
    pool, pages, slots, seq_lens = planes_case(lens)
    q = torch.randn(len(lens), 3, 144)
    workspace = make_mla_workspace(
        max_rows=len(lens), num_heads=3, q_len=1, latent_dim=128, device="cpu", num_processors=3
    )
    mla.plan(workspace, seq_lens, pages, slots)
    args = (q, pool[:, 1], pages, slots, seq_lens, 0.2, 128, workspace)
    close(mla.decode_portable(*args), reference_mla.mla_decode(*args), 1e-5)


def check_fp8_pages() -> None:
    from kernels.triton import mla_layer, rows

    torch.manual_seed(6)
    pool, pages, slots, _ = planes_case([200, 64])
    args = (latent_planes(pool[:, 1], 128, 16), pages, slots, [3, 1], torch.float32)
    found, found_table = mla_layer.mla_expand_pages(*args)
    wanted, _ = reference_mla.mla_expand_pages(*args)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found_table[0, :3].tolist() == [0, 1, 2] and int(found_table[1, 0]) == 3
    assert found_table.shape[1] % 16 == 0  # one compiled form of what reads it
    angles = torch.rand(9, 8) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    kv, gain = torch.randn(5, 144) * 3, torch.rand(128)
    where = torch.tensor([3, 70, 64, 0, 199]).int()
    places = torch.tensor([0, 1, 8, 3, 4]).int()
    pools = []
    for write in (rows.mla_kv_write, reference_write):
        mine = pool.clone()
        write(torch.randn(5, 2, 16), kv, gain, 1e-6, places, table, mine[:, 0], where)
        pools.append(mine)
    first, second = (latent_planes(one[:, 0], 128, 16) for one in pools)
    assert torch.equal(first.scales.view(torch.int32), second.scales.view(torch.int32))
    # The interpreter rounds to e4m3 towards zero, a GPU to nearest.
    at, offsets = where.long() // 64, where.long() % 64
    each = torch.arange(5)
    found, wanted = (decode_rows(one, at, torch.float32)[each, offsets] for one in (first, second))
    close(found, wanted, 0.07)
    torch.testing.assert_close(first.rope[at, offsets], second.rope[at, offsets])


def check_merge_values(lens: list[int], q_len: int) -> None:
    """Partial results as a portable decode leaves them."""
    from kernels.triton import mla, mla_layer

    torch.manual_seed(len(lens))
    heads, latent, rope, page, v_dim = 4, 64, 16, 64, 32
    most = max(-(-n // page) for n in lens)
    pool = torch.randn(len(lens) * most, page, latent + rope)
    pages = torch.randperm(len(lens) * most).to(torch.int32).view(len(lens), most)
    slots = torch.arange(len(lens), dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    q = torch.randn(len(lens) * q_len, heads, latent + rope)
    workspace = make_mla_workspace(
        max_rows=len(lens),
        num_heads=heads,
        q_len=q_len,
        latent_dim=latent,
        device="cpu",
        num_processors=5,
    )
    mla.plan(workspace, seq_lens, pages, slots)
    w_uv = torch.randn(heads, v_dim, latent)
    attended = mla.decode_portable(q, pool, pages, slots, seq_lens, 0.2, latent, workspace)
    wanted = torch.einsum("thc,hvc->thv", attended, w_uv).flatten(1)
    held_whole = workspace.plan[5 * 8 + len(lens) + 1 :].view(-1, 2)[: len(lens), 1] == 1
    mixed = torch.full_like(attended, float("nan"))
    for row in held_whole.nonzero()[:, 0].tolist():
        mixed[row * q_len : (row + 1) * q_len] = attended[row * q_len : (row + 1) * q_len]
    for groups in (1, 4):
        found = mla_layer.merge_values(mixed, workspace, len(lens), w_uv, groups)
        assert found.dim() == (3 if groups > 1 else 2)
        close(found.sum(0) if groups > 1 else found, wanted, 1e-5)
    places = torch.randperm(len(lens) * q_len)[: len(lens) * q_len // 2 + 1].to(torch.int32)
    found = mla_layer.merge_values(mixed, workspace, len(lens), w_uv, 1, places)
    close(found, wanted[places.long()], 1e-5)


def check_folded(kv: str, specs: list[tuple[int, int]], q_len: int) -> None:
    """A layer's decode rows with drafts through the launches of a GPU, against the definition."""
    from unittest import mock

    from kernels.triton import mla, mla_layer

    sizes = LayerSizes(
        num_heads=4,
        nope_dim=16,
        rope_dim=16,
        v_dim=32,
        latent_dim=128,
        dtype=torch.float32,
        device="cpu",
    )
    step = FoldedLayers(PrefillLayers(specs, kv, sizes), q_len, sum(n for _, n in specs) + 2)

    def workspace() -> MlaWorkspace:
        made = make_mla_workspace(
            max_rows=step.size,
            num_heads=sizes.num_heads,
            q_len=q_len,
            latent_dim=sizes.latent_dim,
            device="cpu",
            num_processors=5,
        )
        made.partial_out.fill_(float("nan"))
        mla.plan(made, step.folded.seq_lens, step.rows.page_table, step.folded.row_slots)
        return made

    def absorb(*args: Any) -> torch.Tensor:
        return mla_layer.mla_absorb(*args)

    def output(*args: Any) -> torch.Tensor:
        q, pool, table, slots, lens, scale, made, w_uv, _, _, places = args
        attended = mla.attend_portable(q, pool, table, slots, lens, scale, sizes.latent_dim, made)
        return mla_layer.merge_values(attended, made, slots.shape[0], w_uv, 1, places)

    with (
        mock.patch.object(layers_mla, "mla_absorb", absorb),
        mock.patch.object(layers_mla, "mla_output", output),
        mock.patch.object(step, "workspace", workspace),
    ):
        found = step.run()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy, of arithmetic with NaN
            assert torch.equal(found, step.run(no_tokens=float("nan")))
    num = step.num_tokens
    close(found[:num], attention_by_hand(step.layers), 1e-5)
    assert not bool(found[num:].any())


def check_ids() -> None:
    from kernels.triton import sampling

    torch.manual_seed(0)
    vocab, num_slots = 5003, 6
    logits = torch.randn(5, vocab)
    logits[1, 77] = logits[1, 4000] = 50.0  # equals: the lower index
    logits[2, 100] = float("nan")
    logits[4] = float("-inf")
    masks = torch.randint(-(2**31), 2**31, (num_slots, -(-vocab // 32))).to(torch.int32)
    masks[3] = 0
    masks[1] = -1
    rows = torch.tensor([0.0, 1, 2, 3, 4, 0, 1], dtype=torch.float64)
    slots = torch.tensor([0.0, 1, 2, 3, 4, 5, 5], dtype=torch.float64)
    results = []
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy, of comparisons with NaN
    for greedy in (sampling.greedy_rows, reference_ids.greedy_rows):
        fed, ids = torch.full((num_slots,), 9, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
        greedy(logits, rows, slots, masks, fed, ids)
        results.append((ids, fed))
    assert torch.equal(results[0][0], results[1][0]), results
    assert torch.equal(results[0][1][:5], results[1][1][:5])
    assert results[0][0].tolist()[1] == 77 and results[0][0].tolist()[2:5] == [-1, -1, -1]
    ids, where = torch.tensor([5, -1, 99999, -1]).int(), torch.tensor([0, 1, 2, 5]).int()
    fed = torch.tensor([3, 4, 5, 6, 7, 8]).int()
    assert sampling.feed_ids(ids, where, fed, vocab).tolist() == [5, 4, vocab - 1, 8]
    table = torch.randn(50, 72)
    some = torch.tensor([3, 49, 0]).int()
    assert torch.equal(sampling.embed_rows(table, some, torch.float32), table[some.long()])


def check_move_pages() -> None:
    from kernels.triton import page_copy

    torch.manual_seed(2)
    wide = torch.randint(0, 256, (7, 40000), dtype=torch.uint8)
    pool, pages = wide[:, :39984], torch.tensor([5, 0, 3]).int()
    blob = torch.zeros(3, 39984, dtype=torch.uint8)
    rows = torch.arange(3).int()
    page_copy.move_pages(pool, pages, blob, rows, True)
    assert torch.equal(blob, pool[pages.long()])
    # Slots of a region: a header before each page, in any order.
    region = torch.zeros(5, 40960, dtype=torch.uint8)
    bodies, slots = region[:, 256 : 256 + 39984], torch.tensor([4, 1, 2]).int()
    page_copy.move_pages(pool, pages, bodies, slots, True)
    assert torch.equal(bodies[slots.long()], pool[pages.long()])
    assert not region[[0, 3]].any() and not region[:, :256].any()
    assert not region[:, 256 + 39984 :].any()
    back = wide.clone()
    page_copy.move_pages(back[:, :39984], pages.flip(0), bodies, slots.flip(0), False)
    assert torch.equal(back, wide)
    expected = wide.clone()
    expected[pages.long(), :39984] = blob.flip(0)
    page_copy.move_pages(pool, pages, blob.flip(0).contiguous(), rows, False)
    assert torch.equal(wide, expected)


CHECKS: dict[str, Callable[[], None]] = {
    "linear_nvfp4_one_token": lambda: check_linear("nvfp4", 1, 128, 320),
    "linear_mxint4_tokens": lambda: check_linear("mxint4", 5, 128, 2112),
    "linear_mxfp4_many": lambda: check_linear("mxfp4", 19, 128, 128),
    "linear_dense": lambda: check_linear("dense", 1, 48, 320),
    "linear_dense_tokens": lambda: check_linear("dense", 11, 112, 1120),
    "linear_fp8": lambda: check_linear("fp8", 3, 144, 1216),
    "swiglu": lambda: check_swiglu("nvfp4", 3),
    "swiglu_one_token": lambda: check_swiglu("mxfp4", 1),
    "moe_rows_unsorted": lambda: check_moe_rows("nvfp4", 3),
    "moe_rows_sorted": lambda: check_moe_rows("mxint4", 13),
    "norm_route": lambda: check_norm_route(MoeRouting(num_experts=10, top_k=3), False, 2),
    "norm_route_grouped": lambda: check_norm_route(
        MoeRouting(
            num_experts=16,
            top_k=4,
            score="sigmoid",
            num_groups=4,
            groups_kept=2,
            group_score="top2",
            renormalise=True,
            scale=2.5,
        ),
        True,
        1,
    ),
    "absorb_one": lambda: check_absorb(1),
    "absorb_many": lambda: check_absorb(19),
    "absorb_placed": lambda: check_absorb_placed(19),
    "folded": lambda: check_folded("plain", [(63, 2), (200, 5), (1, 3), (130, 1)], 4),
    "folded_fp8": lambda: check_folded("fp8", [(63, 2), (200, 5), (1, 1)], 2),
    "folded_tiles": lambda: check_folded("plain", [(700, 9), (62, 7)], 8),
    "merge_values": lambda: check_merge_values([300, 64, 1, 200], 1),
    "merge_values_one_token": lambda: check_merge_values([300], 1),
    "merge_values_query_tokens": lambda: check_merge_values([300, 64], 3),
    "fp8_decode": lambda: check_fp8_decode([300, 64, 1]),
    "fp8_pages": check_fp8_pages,
    "move_pages": check_move_pages,
    "ids": check_ids,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
        print("ok", name, flush=True)
