# SPDX-License-Identifier: Apache-2.0
"""Launches of routing and of the W4 mixture of experts for many tokens (moe_w4_hopper.py). Does not
know: the kernels' insides.

Pairs are sorted by expert and their tokens' rows gathered once, so that a weight is expanded once
for up to 256 tokens. Grids follow from shapes alone.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels._triton import HAS_GLUON_HOPPER
from kernels.moe_routing import MoeRouting
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.boxes import boxes_of
from kernels.triton.expert_choice import refuse_groups
from kernels.triton.mla_prefill import num_processors
from kernels.triton.moe_gather import moe_gather_kernel
from kernels.triton.moe_route import moe_combine_kernel, moe_topk_kernel
from kernels.triton.moe_sort import moe_count_kernel, moe_place_kernel
from kernels.triton.router_terms import NUM_TERMS, scores_of_terms
from kernels.triton.rows import rms_norm, rms_norm_twice
from kernels.w4_layout import SCALE_CODES, TiledW4

# Up to so many tokens an expert (in the mean), items of 128 by 256 weight rows are the faster ones,
# else of 256 by 128 (H200, V2-Lite: 288 us where 331 at 97, 492 where 437 at 194).
_TALL_TOKENS = 120
_STAGES = {1: 4, 2: 6}  # by tiles of a consumer: 128 and 96 KB of tokens
_COUNTED_PAIRS = 1024
_PLACED_PAIRS = 256


def _refuse(call: CallSignature) -> str | None:
    if not call.trait("many_tokens", False):
        return "an expert gets too few tokens"
    if not HAS_GLUON_HOPPER:
        return "this triton has no Gluon"
    if torch.cuda.get_device_capability()[0] != 9:
        return "wgmma exists on compute capability 9.x only"
    if any(int(call.trait(name)) % 128 for name in ("hidden", "intermediate")):
        return "hidden and intermediate sizes are not multiples of 128"
    return None


def _refuse_route(call: CallSignature) -> str | None:
    if call.trait("num_tokens_up_to_64"):
        return "it takes more than 64 tokens"
    if int(call.trait("chosen")) > 16:
        return "it takes up to 16 experts a token, shared ones included"
    return refuse_groups(call)


@register_kernel(
    "moe_norm_route",
    "triton_large",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"x": {"bf16", "fp16", "fp32"}},
    refuses=_refuse_route,
)
def norm_route_large(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: MoeRouting,
    num_shared: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, scores (router_terms.py), choice with the shared experts behind it."""
    num_tokens = x.shape[0]
    shape = (num_tokens, routing.top_k + num_shared)
    ids = torch.empty(shape, dtype=torch.int32, device=x.device)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    if x.dtype == torch.bfloat16 and x.device.type != "cpu":
        normed = rms_norm(x, norm_weight, eps)
        logits, num_terms = scores_of_terms(normed, router), NUM_TERMS
    else:
        normed, wide = rms_norm_twice(x, norm_weight, eps)
        logits, num_terms = torch.nn.functional.linear(wide, router), 1
    moe_topk_kernel[(num_tokens,)](
        logits,
        bias if bias is not None else weights,
        ids,
        weights,
        routing.scale,
        E=routing.num_experts,
        E_PAD=next_power_of_2(routing.num_experts),
        TOP_K=routing.top_k,
        NUM_SHARED=num_shared,
        GROUPS=routing.num_groups,
        GROUPS_KEPT=routing.groups_kept,
        SIGMOID=routing.score == "sigmoid",
        HAS_BIAS=bias is not None,
        GROUP_TOP2=routing.group_score == "top2",
        RENORMALISE=routing.renormalise,
        TERMS=num_terms,
        USE_PDL=False,
        num_warps=1,
    )
    return normed, ids, weights


def place_sizes(padded: int) -> dict[str, int]:
    """Constants of moe_place_kernel for so many experts: about what fits into its registers."""
    return {
        "E_PAD": padded,
        "COUNTED": _COUNTED_PAIRS,
        "BLOCK": _PLACED_PAIRS if padded <= 128 else _PLACED_PAIRS // 2,
        "ROWS": max(1, 4096 // padded),
    }


def sort_pairs(
    ids: torch.Tensor, num_experts: int, item_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs in order of expert, and items [3, most] = expert, first of its pairs, their number, up
    to `item_tokens`."""
    num_pairs = ids.numel()
    most = min(num_pairs, num_experts) + num_pairs // item_tokens
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    # Rows begin at multiples of 16 bytes, else kernels are compiled once more for some numbers.
    width = cdiv(most, 4) * 4
    items = torch.empty(3, width, dtype=torch.int32, device=ids.device)[:, :most]
    num_counts, padded = cdiv(num_pairs, _COUNTED_PAIRS), next_power_of_2(num_experts)
    counts = torch.empty(num_counts, padded, dtype=torch.int32, device=ids.device)
    moe_count_kernel[(num_counts,)](
        ids, counts, num_pairs, E_PAD=padded, BLOCK=_COUNTED_PAIRS, num_warps=4
    )
    sizes = place_sizes(padded)
    moe_place_kernel[(cdiv(num_pairs, sizes["BLOCK"]),)](
        ids,
        counts,
        pairs,
        items[0],
        items[1],
        items[2],
        num_pairs,
        most,
        TOKENS=item_tokens,
        num_warps=8,
        **sizes,
    )
    return pairs, items


def tiles_for(num_pairs: int, num_experts: int, hidden: int) -> int:
    """Tiles of 64 weight rows that a consumer of the kernel holds; an item has up to 256 / tiles
    tokens."""
    return 2 if num_pairs <= _TALL_TOKENS * num_experts and hidden % 256 == 0 else 1


def _gemm(
    x: torch.Tensor,
    weight: TiledW4,
    pairs: torch.Tensor,
    items: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    first: bool,
    tiles: int,
) -> None:
    from kernels.triton.moe_w4_hopper import moe_w4_hopper_kernel

    num_works = items.shape[1] * (weight.num_rows // (128 * tiles))
    scale = SCALE_CODES[weight.format]
    constants: dict[str, Any] = {"N": weight.num_rows, "K": weight.num_cols, "FIRST": first}
    moe_w4_hopper_kernel[(min(num_processors(x.device), num_works),)](
        boxes_of(x, 64 // tiles, 64),
        weight.codes.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.factors,
        pairs,
        items[0],
        items[1],
        items[2],
        weights,
        out,
        num_works,
        INT4=weight.format == "mxint4",
        SCALE_MUL=scale.multiply,
        SCALE_ADD=scale.add,
        STAGES=_STAGES[tiles],
        TILES=tiles,
        num_warps=4,
        **constants,
    )


@register_kernel(
    "moe_w4",
    "gluon_hopper_large",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"x": {"bf16"}, "weight": {"nvfp4", "mxfp4", "mxint4"}},
    refuses=_refuse,
)
def moe_w4_large(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Sort, gather, GEMM + SwiGLU, GEMM * router weight, sum. Parts of the sum are bf16."""
    num_tokens, hidden = x.shape
    top_k = ids.shape[1]
    tiles = tiles_for(ids.numel(), gate_up.num_experts, hidden)
    pairs, items = sort_pairs(ids, gate_up.num_experts, 256 // tiles)
    like: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    rows = torch.empty(pairs.shape[0], hidden, **like)
    block = min(2048, next_power_of_2(hidden))
    moe_gather_kernel[(pairs.shape[0], cdiv(hidden, block))](
        x, pairs, rows, K=hidden, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    h = torch.empty(pairs.shape[0], down.num_cols, **like)
    parts = torch.empty(pairs.shape[0], hidden, **like)
    out = torch.empty_like(x)
    _gemm(rows, gate_up, pairs, items, weights, h, first=True, tiles=tiles)
    _gemm(h, down, pairs, items, weights, parts, first=False, tiles=tiles)
    moe_combine_kernel[(num_tokens, cdiv(hidden, 1024))](
        parts,
        shared if shared is not None else x,
        out,
        N=hidden,
        TOP_K=top_k,
        BLOCK=1024,
        HAS_SHARED=shared is not None,
        USE_PDL=False,
        num_warps=4,
    )
    return out
