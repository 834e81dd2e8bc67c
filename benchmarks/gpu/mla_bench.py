# SPDX-License-Identifier: Apache-2.0
"""MLA decode: check against the reference, then time beside its floor.

Does not know: output files.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.timing import relative_error, time_calls_us
from kernels.latent_planes import latent_planes, row_bytes
from kernels.mla_workspace import make_mla_workspace
from kernels.reference.mla import mla_decode as reference
from kernels.triton import mla, mla_fp8

LATENT, ROPE, PAGE = 512, 64, 64
HBM_TB_S, MMA_TFLOP_S = 4.54, 769.0
KERNELS = {"gluon_hopper": mla.decode_hopper, "triton": mla.decode_portable}
FP8_KERNELS = {
    "gluon_hopper_fp8": mla_fp8.decode_fp8,
}
# (batch, context, heads, query tokens)
SHAPES = [(bs, ctx, 16, q) for q in (1, 4) for ctx in (8192, 65536) for bs in (1, 4, 16, 64)] + [
    (4, 65536, 16, 8),
    (1, 65536, 128, 1),
    (16, 65536, 128, 1),
    (4, 65536, 128, 4),
]


# (batch, context, tokens that all rows begin with)
SHARED = [
    (8, 32768, 4096),
    (16, 65536, 4096),
    (4, 65536, 61440),
    (8, 65536, 61440),
    (16, 65536, 61440),
    (8, 8192, 6144),
    (2, 65536, 61440),
]


def _inputs(
    lens: list[int],
    heads: int,
    q_len: int,
    copies: int,
    layers: int = 1,
    shared: int = 0,
    group: int = 1,
) -> Any:
    pages_per_row = [-(-n // PAGE) for n in lens]
    total = sum(pages_per_row) * copies
    pool = torch.randn(total, layers, PAGE, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(total, device="cuda").to(torch.int32)
    tables = torch.zeros(copies, len(lens), max(pages_per_row), dtype=torch.int32, device="cuda")
    at = 0
    for copy in range(copies):
        for row, n in enumerate(pages_per_row):
            tables[copy, row, :n] = order[at : at + n]
            at += n
    tables[:, 1:, : shared // PAGE] = tables[:, :1, : shared // PAGE]
    slots = torch.arange(len(lens), dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    shape = (len(lens) * q_len, heads, LATENT + ROPE)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    workspace = make_mla_workspace(
        max_rows=len(lens), num_heads=heads, q_len=q_len, device="cuda", group=group
    )
    mla.plan(workspace, seq_lens, tables[0], slots)
    return pool[:, layers - 1], tables, slots, seq_lens, q, workspace


def _planes(pool: torch.Tensor) -> torch.Tensor:
    """fp8 pages of as many tokens; numbers between -1 and 1."""
    size = PAGE * row_bytes(LATENT, ROPE)
    coded = torch.empty(pool.shape[0], size, dtype=torch.uint8, device="cuda")
    planes = latent_planes(coded, LATENT, ROPE)
    for page in range(0, pool.shape[0], 1024):  # not all pages in fp32 at once
        rows = pool[page : page + 1024].float().clamp(-4, 4)
        values = rows[..., :LATENT].to(torch.float8_e4m3fn)
        planes.values[page : page + 1024].view(torch.uint8).copy_(values.view(torch.uint8))
        planes.rope[page : page + 1024] = rows[..., LATENT:].to(torch.bfloat16)
    planes.scales.fill_(0.25)
    return coded


def check(kernel: str) -> Iterator[dict[str, Any]]:
    """Yield one line per case: relative error against fp32."""
    cases = [
        ([1000], 16, 1, 1),
        ([1, 65, 4096, 700, 63, 64], 16, 1, 2),
        ([5, 130, 900], 16, 2, 1),
        ([2048, 77, 1900, 64], 16, 4, 3),
        ([300, 1000, 129], 16, 8, 1),
        ([500, 3000], 128, 1, 1),
        ([500, 90], 128, 4, 1),
        ([40000], 16, 4, 1),
        ([0, 200, 0], 16, 1, 1),
    ]
    for lens, heads, q_len, layers in cases:
        pool, tables, slots, seq_lens, q, workspace = _inputs(
            [max(n, 1) for n in lens], heads, q_len, 1, layers
        )
        seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        mla.plan(workspace, seq_lens, tables[0], slots)
        workspace.partial_out.fill_(float("nan"))
        workspace.partial_lse.fill_(float("nan"))
        poison = torch.full((q.shape[0], heads, LATENT), float("nan"), device="cuda", dtype=q.dtype)
        del poison
        args = (q, pool, tables[0], slots, seq_lens, 0.1, LATENT, workspace)
        actual = KERNELS[kernel](*args)
        again = KERNELS[kernel](*args)
        yield {
            "op": "mla_decode",
            "kernel": kernel,
            "check": f"lens={lens} heads={heads} q={q_len}",
            "rel_error": relative_error(actual, reference(*args)),
            "repeatable": bool(torch.equal(actual, again)),
        }


def floor_us(bs: int, ctx: int, heads: int, q_len: int, token_bytes: int = 1152) -> float:
    """The larger of KV bytes over HBM and MMA work over the tensor cores."""
    read = bs * ctx * token_bytes / HBM_TB_S / 1e6
    mma = 2 * heads * q_len * bs * ctx * (2 * LATENT + ROPE) / MMA_TFLOP_S / 1e6
    return max(read, mma)


def bench(kernel: str, shapes: list[tuple[int, int, int, int]]) -> Iterator[dict[str, Any]]:
    """Yield one line per shape: us a layer, plan left out (it runs once a step)."""
    for bs, ctx, heads, q_len in shapes:
        is_fp8 = kernel in FP8_KERNELS
        token_bytes = row_bytes(LATENT, ROPE) if is_fp8 else 2 * (LATENT + ROPE)
        kv_bytes = bs * ctx * token_bytes
        copies = max(2, min(32, -(-(600 << 20) // kv_bytes)))
        pool, tables, slots, seq_lens, q, workspace = _inputs([ctx] * bs, heads, q_len, copies)
        pool = _planes(pool) if is_fp8 else pool
        # A plan names pages, so each copy has its own; the scratch is shared, as between layers.
        calls = []
        for copy in range(copies):
            own = dataclasses.replace(workspace, plan=torch.zeros_like(workspace.plan))
            mla.plan(own, seq_lens, tables[copy], slots)
            args = (q, pool, tables[copy], slots, seq_lens, 0.07, LATENT, own)
            decode = {**KERNELS, **FP8_KERNELS}[kernel]
            calls.append(functools.partial(decode, *args))
            calls[-1]()
        us = time_calls_us(calls)
        floor = floor_us(bs, ctx, heads, q_len, token_bytes)
        yield {
            "op": "mla_decode",
            "kernel": kernel,
            "bs": bs,
            "ctx": ctx,
            "heads": heads,
            "q": q_len,
            "us": round(us, 2),
            "floor_us": round(floor, 1),
            "of_floor": round(floor / us, 3),
        }
        del pool, tables, workspace, calls, own, args
        torch.cuda.empty_cache()


def bench_shared() -> Iterator[dict[str, Any]]:
    """Yield one line per case of rows that begin alike: us a layer where each row reads all it has,
    and where groups of four read what they share once. The same error against fp32 of both."""
    for bs, ctx, shared in SHARED:
        distinct = shared + bs * (ctx - shared)
        copies = max(2, min(8, -(-(300 << 20) // (distinct * 1152))))
        line: dict[str, Any] = {"op": "mla_decode", "bs": bs, "ctx": ctx, "shared": shared}
        for group in (1, 4):
            torch.manual_seed(bs)
            pool, tables, slots, seq_lens, q, workspace = _inputs(
                [ctx - 7 * row for row in range(bs)], 16, 1, copies, 1, shared, group
            )
            calls, outs = [], []
            for copy in range(copies):
                own = dataclasses.replace(workspace, plan=torch.zeros_like(workspace.plan))
                mla.plan(own, seq_lens, tables[copy], slots)
                args = (q, pool, tables[copy], slots, seq_lens, 0.07, LATENT, own)
                calls.append(functools.partial(mla.decode_hopper, *args))
                outs.append(calls[-1]())
            if group > 1:
                assert workspace.shared is not None
                line["shared_tiles"] = workspace.shared.tolist()
            error = relative_error(outs[0], reference(*calls[0].args))
            replan = functools.partial(mla.plan, own, seq_lens, tables[0], slots)
            plan_us = time_calls_us([replan] * 20)
            line[f"us_of_{group}"] = round(time_calls_us(calls), 2)
            line[f"plan_us_of_{group}"] = round(plan_us, 2)
            line["rel_error"] = max(line.get("rel_error", 0.0), error)
            del pool, tables, workspace, calls, own, args, replan
            torch.cuda.empty_cache()
        # Each group of four reads its part of what is shared once; what is a row's own, each.
        read = (-(-bs // 4) * shared + bs * (ctx - shared)) * 1152
        yield {**line, "floor_us": round(read / HBM_TB_S / 1e6, 1)}


def bench_plan() -> dict[str, Any]:
    """Time the plan kernel at 64 rows."""
    _, tables, slots, seq_lens, _, workspace = _inputs([4096] * 64, 16, 1, 1)
    us = time_calls_us([lambda: mla.plan(workspace, seq_lens, tables[0], slots)] * 20)
    return {"op": "mla_plan", "bs": 64, "us": round(us, 2)}
