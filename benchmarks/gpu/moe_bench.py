# SPDX-License-Identifier: Apache-2.0
"""W4 mixture of experts: check against the reference, then time beside its floor.

Does not know: output files. Shape of DeepSeek-V2-Lite: 64 experts, top-6, hidden 2048, 1408 inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.timing import relative_error, time_calls_us
from kernels.moe_routing import MoeRouting
from kernels.reference.moe import moe_route as reference_route
from kernels.reference.moe import moe_w4 as reference_moe
from kernels.reference.quant import quantize_w4
from kernels.triton import expert_choice, moe
from kernels.w4_layout import TiledW4, tile_w4, tile_w4_gate_up

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 1408, 64, 6
ROUTING = MoeRouting(num_experts=EXPERTS, top_k=TOP_K)
BYTES_PER_EXPERT = 3 * HIDDEN * INTER * 0.5625
HBM_TB_S = 4.54


def make_weights(fmt: str, experts: int = EXPERTS) -> tuple[TiledW4, TiledW4]:
    """Random experts, quantised on the device."""

    def quantized(rows: int, cols: int) -> Any:
        return quantize_w4(torch.randn(experts, rows, cols, device="cuda") * cols**-0.5, fmt)

    gate_up = tile_w4_gate_up(quantized(INTER, HIDDEN), quantized(INTER, HIDDEN))
    return gate_up, tile_w4(quantized(HIDDEN, INTER))


def check(fmt: str, token_counts: list[int]) -> Iterator[dict[str, Any]]:
    """Yield one line per case: relative error against fp32 weights."""
    gate_up, down = make_weights(fmt)
    for num_tokens in token_counts:
        x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(num_tokens, EXPERTS, device="cuda")
        shared = torch.randn_like(x) if num_tokens % 2 else None
        ids, weights = expert_choice.route(logits, None, ROUTING)
        wanted_ids, wanted_weights = reference_route(logits, None, ROUTING)
        args = (x, ids, weights, gate_up, down, shared)
        actual = moe.moe_w4(*args)
        yield {
            "op": "moe_w4",
            "check": f"{fmt} T={num_tokens}",
            "rel_error": relative_error(actual, reference_moe(*args)),
            "ids_equal": bool(torch.equal(ids, wanted_ids)),
            "weights_error": relative_error(weights, wanted_weights),
            "repeatable": bool(torch.equal(actual, moe.moe_w4(*args))),
        }


def floor_us(ids: torch.Tensor) -> float:
    """Bytes of the experts that these tokens touch over HBM."""
    return len(set(ids.flatten().tolist())) * BYTES_PER_EXPERT / HBM_TB_S / 1e6


def bench(
    weights_by_copy: list[tuple[TiledW4, TiledW4]], num_tokens: int, tiles: moe.MoeTiles | None
) -> dict[str, Any]:
    """Time a whole layer from router logits, and its parts; calls rotate over weight copies."""
    copies = len(weights_by_copy)
    usual = moe.tiles_for(num_tokens, TOP_K, EXPERTS)
    tiles = tiles or usual
    xs = torch.randn(copies, num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(copies, num_tokens, EXPERTS, device="cuda")
    routed = [expert_choice.route(logits[c], None, ROUTING) for c in range(copies)]
    floor = sum(floor_us(ids) for ids, _ in routed) / copies

    def layer(c: int) -> object:
        ids, weights = expert_choice.route(logits[c], None, ROUTING)
        return moe.run_moe_w4(xs[c], ids, weights, *weights_by_copy[c], None, tiles)

    items = [moe._make_items(ids, EXPERTS, tiles.tokens, True) for ids, _ in routed]
    pairs = num_tokens * TOP_K
    h = torch.randn(pairs, INTER, device="cuda", dtype=torch.bfloat16)
    parts = torch.empty(pairs, HIDDEN, device="cuda")
    common: dict[str, Any] = {"tokens": tiles.tokens, "top_k": TOP_K}

    def gemm1(c: int) -> None:
        moe._gemm(
            xs[c],
            weights_by_copy[c][0],
            items[c],
            routed[c][1],
            h,
            tile=tiles.first,
            first=True,
            **common,
        )

    def gemm2(c: int) -> None:
        moe._gemm(
            h,
            weights_by_copy[c][1],
            items[c],
            routed[c][1],
            parts,
            tile=tiles.second,
            first=False,
            **common,
        )

    def combined(c: int) -> object:
        ids, weights = expert_choice.route(logits[c], None, ROUTING)
        counters = moe._counters(xs.device)
        return moe.run_moe_w4(xs[c], ids, weights, *weights_by_copy[c], None, tiles, counters)

    def front(c: int) -> None:
        ids, _ = expert_choice.route(logits[c], None, ROUTING)
        moe._make_items(ids, EXPERTS, tiles.tokens, True)

    order = list(range(copies)) * 2
    stages: dict[str, Callable[[int], object]] = {
        "us": layer,
        "gemm1": gemm1,
        "gemm2": gemm2,
        "front": front,
    }
    if num_tokens <= moe.COMBINED_TOKENS:
        stages["combined"] = combined
    timed = {
        name: round(time_calls_us([functools.partial(f, c) for c in order]), 2)
        for name, f in stages.items()
    }
    ids, weights = routed[0]
    args = (xs[0], ids, weights, *weights_by_copy[0], None)
    error = relative_error(moe.run_moe_w4(*args, tiles), moe.run_moe_w4(*args, usual))
    return {
        "op": "moe_w4",
        "format": weights_by_copy[0][0].format,
        "T": num_tokens,
        "rel_error": error,  # against the usual tiles, which `check` holds against the reference
        **timed,
        "floor_us": round(floor, 1),
        "of_floor": round(floor / timed["us"], 3),
        "tiles": repr(tiles).replace("GemmTile", "").replace("MoeTiles", ""),
    }
