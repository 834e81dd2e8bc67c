# SPDX-License-Identifier: Apache-2.0
"""Prefill kernels on the GPU: checked against the references, then timed beside their floors.

    python -m benchmarks.gpu.prefill [--only forms] [--out FILE]

MLA prefill of 16 heads (latent 512, rope 64, nope and value 128) and the W4 mixture of experts with
many tokens, DeepSeek-V2-Lite shape. Does not know: models, steps.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import machine_facts
from benchmarks.gpu.moe_bench import EXPERTS, HIDDEN, INTER, ROUTING, TOP_K, make_weights
from benchmarks.gpu.prefill_layer import form_lines
from benchmarks.gpu.timing import relative_error, time_calls_us
from kernels.reference.mla_prefill import mla_prefill as reference_prefill
from kernels.reference.moe import moe_w4 as reference_moe
from kernels.triton import expert_choice, mla_prefill, moe, moe_large
from kernels.triton.mla_prefill_plan import make_plan

HEADS, NOPE, ROPE, V_DIM, LATENT, PAGE = 16, 128, 64, 128, 512, 64
BF16_TFLOP_S = 769.0
HBM_TB_S = 4.54


class PrefillCase:
    """Rows (cached, new) in a pool with shuffled pages; NaN where no token is."""

    def __init__(self, rows: list[tuple[int, int]], poison: bool) -> None:
        lens = [past + new for past, new in rows]
        pages = [-(-length // PAGE) for length in lens]
        shape = (sum(pages) + 1, 2, PAGE, LATENT + ROPE)
        pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16)[:, 1]
        order = torch.randperm(sum(pages), device="cuda").to(torch.int32)
        table = torch.zeros(len(rows), max(pages), dtype=torch.int32, device="cuda")
        at = 0
        for row, count in enumerate(pages):
            table[row, :count] = order[at : at + count]
            at += count
            if poison and lens[row] % PAGE:
                pool[table[row, count - 1].long(), lens[row] % PAGE :] = float("nan")
        new = sum(new for _, new in rows)
        fused = torch.randn(new, HEADS * (NOPE + ROPE) + 576, device="cuda", dtype=torch.bfloat16)
        q = fused[:, : HEADS * (NOPE + ROPE)].view(new, HEADS, NOPE + ROPE)
        self.args: tuple[Any, ...] = (
            q,
            torch.randn(HEADS, NOPE, LATENT, device="cuda", dtype=torch.bfloat16) * LATENT**-0.5,
            torch.randn(HEADS, V_DIM, LATENT, device="cuda", dtype=torch.bfloat16) * LATENT**-0.5,
            pool,
            table,
            torch.arange(len(rows), dtype=torch.int32),
            torch.tensor([0, *(n for _, n in rows)]).cumsum(0).to(torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            (NOPE + ROPE) ** -0.5,
        )


def check_prefill() -> Iterator[dict[str, Any]]:
    """Yield relative errors against fp32, and whether a second run gives the same bits."""
    cases = [
        [(0, 70)],
        [(0, 1), (5, 2), (63, 33), (128, 64), (1000, 300)],
        [(3000, 500)],
        [(20000, 800)],
        [(0, 2048), (4096, 129)],
    ]
    for rows in cases:
        case = PrefillCase(rows, poison=True)
        wanted = reference_prefill(*case.args)
        for name in ("prefill_hopper", "prefill_portable"):
            run = getattr(mla_prefill, name)
            found = run(*case.args)
            yield {
                "op": "mla_prefill",
                "check": f"{name} {rows}",
                "rel_error": relative_error(found, wanted),
                "repeatable": bool(torch.equal(found, run(*case.args))),
            }


def attention_flops(past: int, new: int) -> float:
    """Both products over the tokens that each query sees."""
    seen = past * new + new * (new + 1) / 2
    return 2.0 * HEADS * seen * (NOPE + ROPE + V_DIM)


def time_prefill(past: int, new: int) -> dict[str, Any]:
    """Time the whole op and what it is made of, us."""
    case = PrefillCase([(past, new)], poison=False)
    q, w_uk, w_uv, pool, table, slots, indptr, lens, scale = case.args

    def whole() -> object:
        return mla_prefill.prefill_hopper(*case.args)

    plan = make_plan(
        tuple(slots.tolist()),
        tuple(indptr.tolist()),
        tuple(lens.tolist()),
        num_heads=HEADS,
        page_size=PAGE,
        block_m=mla_prefill.BLOCK_M,
        tile=mla_prefill.HOPPER_TILE,
        num_processors=torch.cuda.get_device_properties(0).multi_processor_count,
        device=q.device,
    )
    latents = pool.new_empty(plan.num_kv, LATENT + ROPE)
    gather = functools.partial(mla_prefill.gather, pool, table, plan, latents)
    gather()

    def expand() -> None:
        for weight in (w_uk, w_uv):
            latents[:, :LATENT] @ weight.flatten(0, 1).T

    total = time_calls_us([whole] * 2, repeats=5)
    parts = {
        "gather": time_calls_us([gather] * 2, repeats=5),
        "expand": time_calls_us([expand] * 2, repeats=5),
        "portable": time_calls_us(
            [functools.partial(mla_prefill.prefill_portable, *case.args)] * 2, repeats=3
        ),
    }
    rest = total - parts["gather"] - parts["expand"]
    flops = attention_flops(past, new)
    expansion = 2.0 * (past + new) * LATENT * HEADS * (NOPE + V_DIM)
    return {
        "op": "mla_prefill",
        "past": past,
        "new": new,
        "us": round(total, 1),
        **{f"{name}_us": round(value, 1) for name, value in parts.items()},
        "attention_us": round(rest, 1),
        "attention_tflop_s": round(flops / rest / 1e6, 1),
        "expand_tflop_s": round(expansion / parts["expand"] / 1e6, 1),
        "floor_us": round((flops + expansion) / BF16_TFLOP_S / 1e6, 1),
        "parts": plan.num_partials,
        "items": plan.num_items,
    }


def check_moe() -> Iterator[dict[str, Any]]:
    """Yield relative errors of the large path against fp32 weights."""
    for fmt in ("nvfp4", "mxfp4", "mxint4"):
        gate_up, down = make_weights(fmt, 16)
        for num_tokens in (40, 300, 700):
            x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            skew = torch.linspace(-2, 2, 16, device="cuda")
            scores = torch.randn(num_tokens, 16, device="cuda") + skew
            weights, ids = scores.softmax(-1).topk(4)
            shared = torch.randn_like(x) if num_tokens % 200 else None
            args = (x, ids.to(torch.int32), weights.contiguous(), gate_up, down, shared)
            found = moe_large.moe_w4_large(*args)
            yield {
                "op": "moe_w4_large",
                "check": f"{fmt} T={num_tokens}",
                "rel_error": relative_error(found, reference_moe(*args)),
                "repeatable": bool(torch.equal(found, moe_large.moe_w4_large(*args))),
            }


def time_moe(weights: tuple[Any, Any], num_tokens: int) -> dict[str, Any]:
    """Time a layer from routed tokens to the sum, and its parts, us."""
    gate_up, down = weights
    x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids, scales = expert_choice.route(
        torch.randn(num_tokens, EXPERTS, device="cuda"), None, ROUTING
    )
    tiles = moe_large.tiles_for(ids.numel(), EXPERTS, HIDDEN)
    pairs, items = moe_large.sort_pairs(ids, EXPERTS, 256 // tiles)
    args = (pairs, items, scales)
    rows = torch.randn(pairs.shape[0], HIDDEN, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(pairs.shape[0], INTER, device="cuda", dtype=torch.bfloat16)
    parts = torch.empty_like(rows)
    stages: dict[str, Callable[[], object]] = {
        "us": lambda: moe_large.moe_w4_large(x, ids, scales, gate_up, down, None),
        "before_us": lambda: moe.moe_w4(x, ids, scales, gate_up, down, None),
        "sort_us": lambda: moe_large.sort_pairs(ids, EXPERTS, 256 // tiles),
        "gemm1_us": lambda: moe_large._gemm(rows, gate_up, *args, h, first=True, tiles=tiles),
        "gemm2_us": lambda: moe_large._gemm(h, down, *args, parts, first=False, tiles=tiles),
    }
    timed = {name: time_calls_us([f] * 2, repeats=5) for name, f in stages.items()}
    flops = 2.0 * num_tokens * TOP_K * 3 * HIDDEN * INTER
    return {
        "op": "moe_w4_large",
        "T": num_tokens,
        **{name: round(value, 1) for name, value in timed.items()},
        "gemm1_tflop_s": round(flops * 2 / 3 / timed["gemm1_us"] / 1e6, 1),
        "gemm2_tflop_s": round(flops / 3 / timed["gemm2_us"] / 1e6, 1),
        "tflop_s": round(flops / timed["us"] / 1e6, 1),
        "floor_us": round(flops / BF16_TFLOP_S / 1e6, 1),
    }


def lines_of(only: str | None) -> Iterator[dict[str, Any]]:
    """What it ran on, then the lines asked for."""
    yield machine_facts()
    yield from form_lines() if only == "forms" else checks_and_times()


def checks_and_times() -> Iterator[dict[str, Any]]:
    """Checks, then measurements."""
    yield from check_prefill()
    for past, new in (
        (65536, 800),
        (0, 2048),
        (63488, 2048),
        (61440, 4096),
        (57344, 8192),
        (0, 8192),
    ):
        yield time_prefill(past, new)
    yield from form_lines()
    yield from check_moe()
    weights = make_weights("nvfp4")
    for num_tokens in (128, 256, 512, 800, 1024, 2048, 4096, 8192):
        yield time_moe(weights, num_tokens)


def main() -> None:
    """Check, measure; one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("forms",), help="both forms of short prefills alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    lines: list[dict[str, Any]] = []
    with torch.inference_mode():
        for line in lines_of(args.only):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
