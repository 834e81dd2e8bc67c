# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of the mixture-of-experts kernels. Does not know: their insides.

Grids follow from shapes alone (unused items are empty), so a launch may be captured in a CUDA
graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kernels.ops.moe import moe_w4_signature
from kernels.registry import Priority, register_kernel
from kernels.selection import usual_kernel
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.mla import use_pdl
from kernels.triton.moe_route import (
    moe_align_kernel,
    moe_combine_kernel,
)
from kernels.triton.moe_w4 import moe_w4_kernel
from kernels.triton.w4_rows import w4_rows_kernel
from kernels.w4_layout import SCALE_CODES, TiledW4

# Up to so many tokens each pair is its own item: sorting costs more than reading twice the few
# experts that two tokens share.
UNSORTED_TOKENS = 4
# Up to so many the second GEMM may sum a token's experts itself, with so many counters.
COMBINED_TOKENS = 64
MAX_COUNTERS = 1 << 15
# Up to so many tokens a program takes 16 weight rows at once instead of 64 in a pipeline.
ROW_TOKENS = 2
# Up to so many tokens an expert, on the mean, few experts have more than eight.
FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """One program: 16 * slices * nm weight rows, 64 * kc columns a step, pipeline depth."""

    nm: int
    kc: int
    stages: int
    warps: int
    slices: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """One program of w4_rows: 16 weight rows, all columns of up to 2048, `tokens` of an item."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTiles:
    """Tokens per item and the tiles of the two GEMMs."""

    tokens: int
    first: GemmTile | RowTile
    second: GemmTile | RowTile


def tiles_for(num_tokens: int, top_k: int, num_experts: int) -> MoeTiles:
    """Choose by the mean number of tokens an expert gets."""
    mean = num_tokens * top_k / num_experts
    if num_tokens <= ROW_TOKENS:
        rows = RowTile(tokens=8)
        return MoeTiles(tokens=8, first=rows, second=rows)
    if mean <= FEW:
        wide = GemmTile(nm=1, kc=4, stages=3, warps=4)
        return MoeTiles(tokens=8, first=wide, second=wide)
    if mean <= 26:
        first = GemmTile(nm=1, kc=2, stages=3, warps=2)
        second = GemmTile(nm=1, kc=2, stages=2, warps=2)
        return MoeTiles(tokens=16 if mean <= 12 else 32, first=first, second=second)
    tile = GemmTile(nm=2, kc=1, stages=3, warps=4)
    return MoeTiles(tokens=64 if mean <= 56 else 128, first=tile, second=tile)


def _pdl(enabled: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if enabled else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Where the second GEMM itself puts the sums over a token's experts."""

    out: torch.Tensor  # [T, hidden]
    behind: torch.Tensor | None  # [T, hidden], added
    counters: torch.Tensor  # int32, zeros: moe_combine.py


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    """Work items: pairs in order of expert, and per item its expert, first position, length.
    Unsorted: item i is pair i, and only `expert` is read."""

    num: int
    unsorted: bool
    pairs: torch.Tensor
    expert: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor


def _make_items(ids: torch.Tensor, num_experts: int, tokens: int, pdl: bool) -> _Items:
    num_pairs = ids.numel()
    if ids.shape[0] <= UNSORTED_TOKENS:
        flat = ids.view(-1)
        return _Items(num=num_pairs, unsorted=True, pairs=flat, expert=flat, begin=flat, count=flat)
    most = min(num_pairs, num_experts) + num_pairs // tokens
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    expert, begin, count = torch.empty(3, most, dtype=torch.int32, device=ids.device).unbind()
    block = 128 if num_pairs <= 1024 else 1024
    moe_align_kernel[(num_experts,)](
        ids,
        pairs,
        expert,
        begin,
        count,
        num_pairs,
        most,
        E=num_experts,
        E_PAD=next_power_of_2(num_experts),
        TOKENS=tokens,
        BLOCK=block,
        USE_PDL=pdl,
        num_warps=1 if num_pairs <= 128 else 4,
        **_pdl(pdl),
    )
    return _Items(num=most, unsorted=False, pairs=pairs, expert=expert, begin=begin, count=count)


def _pointers(combined: Combined | None) -> tuple[torch.Tensor | None, ...]:
    if combined is None:
        return None, None, None
    return combined.out, combined.behind, combined.counters


def _gemm_rows(
    x: torch.Tensor,
    weight: TiledW4,
    items: _Items,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: RowTile,
    top_k: int,
    first: bool,
    combined: Combined | None,
) -> None:
    pdl = use_pdl(x.device)
    loads = 1 if items.unsorted else tile.tokens
    scale = SCALE_CODES[weight.format]
    blocks = weight.num_cols // 64
    w4_rows_kernel[(weight.num_rows // 16, items.num)](
        x,
        None,
        weight.codes.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.factors,
        None,
        items.pairs,
        items.expert,
        items.begin,
        items.count,
        weights,
        out,
        *_pointers(combined),
        0,
        weight.num_cols,
        0,
        0.0,
        K=weight.num_cols,
        N=weight.num_rows,
        TOP_K=top_k,
        TOKENS=max(8, loads),
        LOADS=loads,
        WAYS=4,
        KC=min(8, next_power_of_2(cdiv(blocks, 4))),
        PARTS=0,
        NORMS=False,
        ADDS=False,
        SWIGLU=first,
        EXPERTS=True,
        UNSORTED=items.unsorted,
        COMBINES=combined is not None,
        HAS_BEHIND=combined is not None and combined.behind is not None,
        INT4=weight.format == "mxint4",
        SCALE_MUL=scale.multiply,
        SCALE_ADD=scale.add,
        PORTABLE=x.device.type != "cuda",
        USE_PDL=pdl,
        num_warps=4,
        num_stages=1,
        **_pdl(pdl),
    )


def _gemm(
    x: torch.Tensor,
    weight: TiledW4,
    items: _Items,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: GemmTile | RowTile,
    tokens: int,
    top_k: int,
    first: bool,
    combined: Combined | None = None,
) -> None:
    if isinstance(tile, RowTile):
        _gemm_rows(
            x,
            weight,
            items,
            weights,
            out,
            tile=tile,
            top_k=top_k,
            first=first,
            combined=combined,
        )
        return
    pdl = use_pdl(x.device)
    nm = tile.nm if weight.num_rows % (64 * tile.nm) == 0 else 1
    blocks = weight.num_cols // 64
    kc = tile.kc
    while blocks % kc:
        kc //= 2
    scale = SCALE_CODES[weight.format]
    moe_w4_kernel[(weight.num_rows // (16 * tile.slices * nm), items.num)](
        x,
        weight.codes.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.factors,
        items.pairs,
        items.expert,
        items.begin,
        items.count,
        weights,
        out,
        *_pointers(combined),
        K=weight.num_cols,
        N=weight.num_rows,
        TOP_K=top_k,
        TOKENS=tokens,
        NM=nm,
        SLICES=tile.slices,
        KC=kc,
        STAGES=tile.stages,
        FIRST=first,
        UNSORTED=items.unsorted,
        COMBINES=combined is not None,
        HAS_BEHIND=combined is not None and combined.behind is not None,
        INT4=weight.format == "mxint4",
        SCALE_MUL=scale.multiply,
        SCALE_ADD=scale.add,
        PORTABLE=x.device.type != "cuda",
        USE_PDL=pdl,
        num_warps=tile.warps,
        **_pdl(pdl),
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that every launch leaves as zeros; captured graphs hold their address."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@register_kernel(
    "moe_w4",
    "triton_combined",
    priority=Priority.TRIAL,
    device="cuda",
    min_sm=(9, 0),
    formats={"x": {"bf16"}, "weight": {"nvfp4", "mxfp4", "mxint4"}},
)
def moe_w4_combined(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """The sum inside the second GEMM: three launches (two up to 4 tokens). An override is for every
    call, so a call of many tokens goes where it goes without one."""
    num_tokens, hidden = x.shape
    if num_tokens > COMBINED_TOKENS or num_tokens * (hidden // 16) > MAX_COUNTERS:
        return without_combining(x, ids, weights, gate_up, down, shared)
    tiles = tiles_for(num_tokens, ids.shape[1], gate_up.num_experts)
    return run_moe_w4(x, ids, weights, gate_up, down, shared, tiles, _counters(x.device))


@register_kernel(
    "moe_w4",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(9, 0),
    formats={"x": {"bf16"}, "weight": {"nvfp4", "mxfp4", "mxint4"}},
)
def moe_w4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Sort, GEMM + SwiGLU, GEMM * router weight, sum; four launches, three up to 4 tokens. Of one
    token the second GEMM makes the sum: 1.6 % of a step less at 64K, but more from 8 rows on."""
    num_tokens, hidden = x.shape
    tiles = tiles_for(num_tokens, ids.shape[1], gate_up.num_experts)
    sums_itself = num_tokens == 1 and hidden // 16 <= MAX_COUNTERS
    counters = _counters(x.device) if sums_itself else None
    return run_moe_w4(x, ids, weights, gate_up, down, shared, tiles, counters)


def without_combining(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """By the kernel that runs the call where nothing is overridden."""
    usual = usual_kernel(moe_w4_signature(x, ids, gate_up, down))
    out: torch.Tensor = usual.fn(x, ids, weights, gate_up, down, shared)
    return out


def run_moe_w4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None,
    tiles: MoeTiles,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer with given tiles (the benchmark tries several).

    Args:
        counters: int32 zeros, at least tokens * hidden / 16: the second GEMM sums itself.
    """
    num_tokens, hidden = x.shape
    top_k = ids.shape[1]
    pdl = use_pdl(x.device)
    items = _make_items(ids, gate_up.num_experts, tiles.tokens, pdl)
    h = torch.empty(ids.numel(), down.num_cols, dtype=x.dtype, device=x.device)
    parts = torch.empty(ids.numel(), hidden, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    common: dict[str, Any] = {"tokens": tiles.tokens, "top_k": top_k}
    _gemm(x, gate_up, items, weights, h, tile=tiles.first, first=True, **common)
    combined = None
    if counters is not None:
        combined = Combined(out=out, behind=shared, counters=counters)
    second = {**common, "tile": tiles.second, "first": False, "combined": combined}
    _gemm(h, down, items, weights, parts, **second)
    if combined is not None:
        return out
    block = 512 if num_tokens <= 16 else 1024
    moe_combine_kernel[(num_tokens, cdiv(hidden, block))](
        parts,
        shared if shared is not None else x,
        out,
        N=hidden,
        TOP_K=top_k,
        BLOCK=block,
        HAS_SHARED=shared is not None,
        USE_PDL=pdl,
        num_warps=4,
        **_pdl(pdl),
    )
    return out
