# SPDX-License-Identifier: Apache-2.0
"""Child of test_triton_kernels.py: runs checks with TRITON_INTERPRET=1, on CPU tensors.

The kernels' own launch code runs unchanged; only the compiler is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from kernels.mla_workspace import make_mla_workspace
from kernels.moe_routing import MoeRouting
from kernels.reference import mla as reference_mla
from kernels.reference import moe as reference_moe
from kernels.reference.quant import quantize_w4
from kernels.w4_layout import tile_w4, tile_w4_gate_up


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected| in fp64; NaN stays NaN."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def check_mla(seq_lens: list[int], q_len: int, heads: int, parts: int) -> None:
    from kernels.triton import mla

    torch.manual_seed(q_len * 100 + heads)
    latent, rope, page = 32, 16, 64
    rows = len(seq_lens)
    most = max(1, max(-(-n // page) for n in seq_lens))
    num_pages = rows * most + 3
    # A page stride larger than a page, as in a pool that holds several layers.
    # Tokens of nobody hold NaN: reading one would show.
    pool = torch.full((num_pages, 2, page, latent + rope), float("nan"))
    order = torch.randperm(num_pages)[: rows * most].to(torch.int32)
    page_table = torch.zeros(rows + 2, most, dtype=torch.int32)
    slots = torch.randperm(rows + 2)[:rows].to(torch.int32)
    page_table[slots.long()] = order.view(rows, most)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    for slot, length in zip(slots.tolist(), seq_lens, strict=True):
        for at in range(0, length, page):
            real = torch.randn(min(page, length - at), latent + rope)
            pool[page_table[slot, at // page], 1, : len(real)] = real
    q = torch.randn(rows * q_len, heads, latent + rope)
    workspace = make_mla_workspace(
        max_rows=rows + 1,
        num_heads=heads,
        q_len=q_len,
        latent_dim=latent,
        device="cpu",
        num_processors=parts,
    )
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    args = (q, pool[:, 1], page_table, slots, lens, 0.2, latent, workspace)
    mla.plan(workspace, lens, page_table, slots)
    error = relative_error(mla.decode_portable(*args), reference_mla.mla_decode(*args))
    assert error < 1e-5, error


def check_groups(
    seq_lens: list[int], common: list[int], heads: int, group: int, parts: int, least: int = 1
) -> None:
    """Rows whose first pages are those of the row before: of row r `common[r]`; grouped where that
    spares `least` tiles."""
    from kernels.triton import mla, mla_layer

    torch.manual_seed(sum(seq_lens) + heads)
    latent, rope, page, v_dim = 32, 16, 64, 16
    rows, most = len(seq_lens), max(-(-n // 64) for n in seq_lens) + 1
    pool = torch.full((rows * most + 3, 2, page, latent + rope), float("nan"))
    order = torch.randperm(rows * most).to(torch.int32).view(rows, most)
    slots = torch.randperm(rows + 2)[:rows].to(torch.int32)
    page_table = torch.zeros(rows + 2, most, dtype=torch.int32)
    for row, shared in enumerate(common):
        if shared:
            order[row, :shared] = order[row - 1, :shared]
        page_table[slots[row]] = order[row]
    for slot, length in zip(slots.tolist(), seq_lens, strict=True):
        for at in range(0, length, page):
            place = pool[page_table[slot, at // page], 1]
            count = min(page, length - at)
            place[:count] = torch.randn(count, latent + rope)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    q = torch.randn(rows, heads, latent + rope)
    workspace = make_mla_workspace(
        max_rows=rows + 1,
        num_heads=heads,
        q_len=1,
        latent_dim=latent,
        device="cpu",
        num_processors=parts,
        group=group,
    )
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    mla.LEAST_SHARED, mla.LEAST_SPARED = 2, least
    mla.plan(workspace, lens, page_table, slots)
    # By the definition: tiles in common with a group's first row, and rows, that spare most.
    wanted, members = [], [False] * rows
    for first in range(0, rows, group):
        mine = page_table[slots[first]].tolist()
        same = []
        for row in range(first, min(first + group, rows)):
            table = page_table[slots[row]].tolist()
            bound = max(0, min(seq_lens[first], seq_lens[row]) - 1) // page
            same.append(next((at for at in range(bound) if table[at] != mine[at]), bound))
        best = (0, 0)
        for tiles in same:
            num = sum(other >= tiles for other in same)
            best = max(best, ((num - 1) * tiles if tiles >= 2 else 0, tiles))
        wanted.append(best[1] if best[0] else 0)
        for row, tiles in enumerate(same, first):
            members[row] = best[0] > 0 and tiles >= best[1]
    assert workspace.shared is not None
    found = workspace.shared[: len(wanted)]
    assert found[:, 0].tolist() == wanted, (found, wanted)
    bits = [
        sum(1 << at for at, m in enumerate(members[n : n + group]) if m)
        for n in range(0, rows, group)
    ]
    assert found[:, 1].tolist() == bits
    num_spans = rows + len(wanted)
    total = int(workspace.plan[parts * 8 + num_spans])
    alone = sum(max(1, -(-n // page)) for n in seq_lens)
    spared = sum(wanted[row // group] for row in range(rows) if members[row]) - sum(wanted)
    assert total == alone - (spared if spared >= least else 0)
    args = (q, pool[:, 1], page_table, slots, lens, 0.2, latent, workspace)
    expected = reference_mla.mla_decode(*args)
    assert relative_error(mla.decode_portable(*args), expected) < 1e-5
    w_uv = torch.randn(heads, v_dim, latent)
    attended = mla.attend_portable(*args)
    values = torch.einsum("thc,hvc->thv", expected, w_uv).flatten(1)
    for pieces in (1, 4):
        found = mla_layer.merge_values(attended, workspace, rows, w_uv, pieces)
        assert relative_error(found.sum(0) if pieces > 1 else found, values) < 1e-5


def check_route(routing: MoeRouting, with_bias: bool) -> None:
    from kernels.triton import expert_choice

    torch.manual_seed(routing.num_experts)
    logits = torch.randn(5, routing.num_experts)
    bias = torch.randn(routing.num_experts) * 0.3 if with_bias else None
    ids, weights = expert_choice.route(logits, bias, routing)
    wanted_ids, wanted_weights = reference_moe.moe_route(logits, bias, routing)
    assert torch.equal(ids, wanted_ids), (ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)


def check_route_of_many() -> None:
    """More than 256 experts (Kimi K2 has 384) are chosen one after the other; equal scores by the
    lower index, and what is no number last."""
    from kernels.triton import expert_choice

    routing = MoeRouting(num_experts=384, top_k=8, score="sigmoid", renormalise=True, scale=2.827)
    check_route(routing, True)
    torch.manual_seed(2)
    logits = (torch.randn(4, 384) * 2).round() / 2  # many are equal
    logits[1, 30:] = -40.0
    ids, weights = expert_choice.route(logits, None, routing)
    wanted_ids, wanted_weights = reference_moe.moe_route(logits, None, routing)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)
    logits[2, 100:] = float("nan")
    ids, _ = expert_choice.route(logits, None, routing)
    assert torch.equal(ids[2], reference_moe.moe_route(logits[2:3, :100], None, routing)[0][0])


def check_groups_of_any_size() -> None:
    """DeepSeek-V2 has 160 experts in 8 groups: who cannot run a rule's calls refuses them."""
    import kernels.ops.moe as ops
    import kernels.triton  # noqa: F401 - registers
    from kernels.registry import REGISTRY
    from kernels.signature import CallSignature

    calls: list[CallSignature] = []

    def select(call: CallSignature) -> object:
        calls.append(call)
        return next(s for s in REGISTRY.specs(call.family) if s.device == "any")

    ops.select_kernel = select  # type: ignore[assignment]
    sizes = [(num, *rule) for num in (2, 66) for rule in ((160, 8), (12, 3), (64, 8), (10, 1))]
    for num_tokens, num_experts, groups in sizes:
        kept = min(groups, 2)
        routing = MoeRouting(num_experts=num_experts, top_k=4, num_groups=groups, groups_kept=kept)
        torch.manual_seed(num_experts)
        x, router = torch.randn(num_tokens, 32), torch.randn(num_experts, 32)
        args = (x, torch.ones(32), 1e-6, router, None, routing, 2)
        wanted = ops.moe_norm_route(*args)
        logits = torch.nn.functional.linear(wanted[0], router)
        wanted_of = {"moe_route": ops.moe_route(logits, None, routing), "moe_norm_route": wanted}
        given = {"moe_route": (logits, None, routing), "moe_norm_route": args}
        num_run = 0
        for call in {call.family: call for call in calls}.values():
            for spec in REGISTRY.specs(call.family):
                is_fixed = spec.name == "fixed"  # composed of ops
                if spec.device != "cuda" or is_fixed or spec.refuses(call) is not None:
                    continue
                num_run += 1
                for found, expected in zip(
                    spec.fn(*given[call.family]), wanted_of[call.family], strict=True
                ):
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        is_power = not num_experts & (num_experts - 1)
        assert (num_run > 0) == (is_power or groups == 1), (num_experts, groups)


def check_moe(fmt: str, num_tokens: int, with_shared: bool) -> None:
    from kernels.triton import moe

    torch.manual_seed(num_tokens)
    experts, hidden, inter, top_k = 6, 128, 64, 2
    gate = quantize_w4(torch.randn(experts, inter, hidden) * 0.1, fmt)
    up = quantize_w4(torch.randn(experts, inter, hidden) * 0.3, fmt)
    down = quantize_w4(torch.randn(experts, hidden, inter) * 0.1, fmt)
    gate_up_tiled, down_tiled = tile_w4_gate_up(gate, up), tile_w4(down)
    x = torch.randn(num_tokens, hidden)
    # Uneven load: one expert gets more pairs than one item holds, some get none.
    ids = torch.stack((torch.zeros(num_tokens), 2 + torch.arange(num_tokens) % 3), dim=1)
    ids = ids.to(torch.int32)
    weights = torch.rand(num_tokens, top_k)
    shared = torch.randn(num_tokens, hidden) if with_shared else None
    args = (x, ids, weights, gate_up_tiled, down_tiled, shared)
    counters = torch.zeros(num_tokens * hidden // 16, dtype=torch.int32)
    # Rows of 16, and items of 8 and of 16 tokens.
    for tokens in (1, 8, 30, 1):
        tiles = moe.tiles_for(tokens, top_k, experts)
        found = moe.run_moe_w4(*args, tiles)
        error = relative_error(found, reference_moe.moe_w4(*args))
        assert error < 1e-5, (tiles, error)
        # The sum inside the second GEMM: the same bits, twice, and counters as they were.
        assert torch.equal(moe.run_moe_w4(*args, tiles, counters), found)
        assert not counters.any()


CHECKS: dict[str, Callable[[], None]] = {
    "mla_groups_share": lambda: check_groups([700, 650, 641, 900], [0, 10, 9, 8], 16, 4, 5),
    "mla_some_groups_share": lambda: check_groups(
        [300, 310, 400, 10, 200, 200, 500, 0, 0], [0, 4, 2, 0, 0, 1, 3, 0, 0], 8, 2, 7
    ),
    "mla_a_group_in_one_part": lambda: check_groups([200, 190, 0], [0, 2, 0], 4, 16, 1),
    "mla_groups_of_one_sequence": lambda: check_groups([257, 258, 259, 260], [0, 5, 5, 5], 4, 4, 3),
    "mla_part_of_a_group_shares": lambda: check_groups(
        [700, 900, 650, 800, 0, 900, 900, 0], [0, 10, 3, 2, 0, 0, 14, 0], 16, 4, 6
    ),
    "mla_groups_spare_enough": lambda: check_groups([700, 650], [0, 10], 16, 4, 5, 10),
    "mla_groups_spare_too_little": lambda: check_groups([700, 650], [0, 10], 16, 4, 5, 11),
    "mla_groups_apart": lambda: check_groups([64, 65, 128], [0, 1, 1], 4, 4, 40),
    "mla_one_row_split": lambda: check_mla([300], 1, 4, 4),
    "mla_ragged_and_empty_rows": lambda: check_mla([1, 0, 129, 64, 200], 1, 16, 3),
    "mla_folds_query_tokens": lambda: check_mla([70, 256, 3], 3, 4, 4),
    "mla_more_rows_than_a_tile": lambda: check_mla([130, 66], 5, 16, 6),
    "mla_more_parts_than_tiles": lambda: check_mla([64, 10], 2, 4, 32),
    "route_softmax": lambda: check_route(MoeRouting(num_experts=64, top_k=6), False),
    "route_grouped_sigmoid_with_bias": lambda: check_route(
        MoeRouting(
            num_experts=32,
            top_k=4,
            score="sigmoid",
            num_groups=4,
            groups_kept=2,
            group_score="top2",
            renormalise=True,
            scale=2.5,
        ),
        True,
    ),
    "route_grouped_softmax": lambda: check_route(
        MoeRouting(num_experts=16, top_k=3, num_groups=4, groups_kept=3), False
    ),
    "route_of_many_experts": check_route_of_many,
    "route_in_groups_of_any_size": check_groups_of_any_size,
    "moe_nvfp4_one_token": lambda: check_moe("nvfp4", 1, False),
    "moe_nvfp4_sorted_tokens": lambda: check_moe("nvfp4", 19, True),
    "moe_mxfp4": lambda: check_moe("mxfp4", 5, False),
    "moe_mxint4": lambda: check_moe("mxint4", 5, True),
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print("ok", name, flush=True)
