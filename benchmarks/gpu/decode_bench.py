# SPDX-License-Identifier: Apache-2.0
"""The kernels of a decode step beside attention and experts, timed beside their floors.

Does not know: output files. Shapes of DeepSeek-V2-Lite. Weights rotate over copies larger in all
than the L2 cache. Checks against references: tests/kernels/test_gpu_decode.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.timing import time_calls_us
from kernels.fp8_weight import Fp8Weight
from kernels.mla_workspace import make_mla_workspace
from kernels.moe_routing import MoeRouting
from kernels.reference.quant import quantize_w4
from kernels.triton import expert_choice, linear, mla, mla_layer, page_copy, sampling
from kernels.w4_layout import tile_w4_linear

HBM_TB_S = 4.54
TOKENS = (1, 8, 16)
# name, rows, columns, whether a norm is in front
LINEARS = (("q_kv_down", 3648, 2048, True), ("o_proj", 2048, 2048, False))
BYTES = {"nvfp4": 0.5625, "fp8_block": 1.0, "bf16": 2.0}


def _draw(*shape: int) -> torch.Tensor:
    values: torch.Tensor = torch.randn(*shape, device="cuda").to(torch.bfloat16)
    return values


def _line(name: str, calls: list[Callable[[], object]], floor_bytes: float, **more: Any) -> Any:
    us, floor = time_calls_us(calls), floor_bytes / HBM_TB_S / 1e6
    return {"op": name, **more, "us": round(us, 2), "floor_us": round(floor, 2)}


def _weight(kind: str, rows: int, cols: int) -> Any:
    if kind == "bf16":
        return _draw(rows, cols)
    if kind == "fp8_block":
        scales = torch.rand(-(-rows // 128), -(-cols // 128), device="cuda")
        return Fp8Weight(values=_draw(rows, cols).to(torch.float8_e4m3fn), scales=scales)
    return tile_w4_linear([quantize_w4(_draw(rows, cols), kind)])


def bench_linears() -> Iterator[dict[str, Any]]:
    """Projections of a layer, the output head, and torch's own product for comparison."""
    for name, rows, cols, norms in LINEARS:
        for kind, size in BYTES.items():
            copies = max(4, int(150e6 / (rows * cols * size)))
            weights = [_weight(kind, rows, cols) for _ in range(copies)]
            for num in TOKENS:
                x, gain = _draw(num, cols), torch.rand(cols, device="cuda")
                residual, parts = _draw(num, rows), torch.randn(4, num, cols, device="cuda")
                calls: list[Callable[[], object]] = []
                for w in weights:
                    if norms:
                        call = functools.partial(
                            linear.norm_linear, x, gain, 1e-6, w, torch.bfloat16
                        )
                    else:
                        call = functools.partial(linear.linear_of_parts, parts, w, residual)
                    calls.append(call)
                more = {"weight": kind, "T": num}
                yield _line(name, calls, rows * cols * size, **more)
            if kind == "bf16":
                x = _draw(1, cols)
                calls = [functools.partial(torch.nn.functional.linear, x, w) for w in weights]
                yield _line(f"{name} by torch", calls, rows * cols * 2, weight=kind, T=1)
    head, gain = _draw(102400, 2048), torch.rand(2048, device="cuda")
    for num in TOKENS:
        x = _draw(num, 2048)
        call = functools.partial(linear.norm_linear, x, gain, 1e-6, head, torch.float32)
        yield _line("lm_head", [call] * 3, head.numel() * 2, weight="bf16", T=num)


def bench_small() -> Iterator[dict[str, Any]]:
    """Absorption, merge, routing, the greedy choice."""
    routing = MoeRouting(num_experts=64, top_k=6)
    table = torch.rand(70000, 64, device="cuda")
    for num in TOKENS:
        down, pool = _draw(num, 3648), _draw(64, 64, 576)
        q, positions = down[:, :3072].view(num, 16, 192), torch.arange(num, device="cuda").int()
        gain, hidden_gain = torch.rand(512, device="cuda"), torch.rand(2048, device="cuda")
        weights = [_draw(16, 128, 512) for _ in range(32)]
        calls: list[Callable[[], object]] = [
            functools.partial(
                mla_layer.mla_absorb,
                q,
                down[:, 3072:],
                gain,
                1e-6,
                positions,
                table,
                pool,
                positions,
                w,
            )
            for w in weights
        ]
        yield _line("mla_absorb", calls, weights[0].numel() * 2, T=num)
        workspace = make_mla_workspace(max_rows=num, num_heads=16, q_len=1, device="cuda")
        lens = torch.full((num,), 65536 // num * 2, device="cuda").int()
        pages = torch.zeros(num, 2048, device="cuda").int()
        mla.plan(workspace, lens, pages, positions)
        workspace.partial_out.normal_()
        workspace.partial_lse.normal_()
        attended = _draw(num, 16, 512)
        ups = [_draw(16, 128, 512) for _ in range(32)]
        groups = mla_layer.VALUE_PARTS if num == 1 else 1
        calls = [
            functools.partial(mla_layer.merge_values, attended, workspace, num, w, groups)
            for w in ups
        ]
        yield _line("mla_merge_values", calls, ups[0].numel() * 2, T=num)
        routers = [torch.randn(64, 2048, device="cuda") for _ in range(128)]
        x = _draw(num, 2048)
        calls = [
            functools.partial(expert_choice.norm_route, x, hidden_gain, 1e-6, r, None, routing, 2)
            for r in routers
        ]
        yield _line("moe_norm_route", calls, routers[0].numel() * 4, T=num)
        logits = torch.randn(num, 102400, device="cuda")
        masks = torch.full((num + 1, 3200), -1, device="cuda").int()
        rows = torch.arange(num, device="cuda").double()
        ids = torch.zeros(num + 1, device="cuda").int()
        greedy = functools.partial(
            sampling.greedy_rows, logits, rows, rows, masks, ids, ids.clone()[:num]
        )
        yield _line("greedy_rows", [greedy] * 4, logits.numel() * 4, T=num)


def bench_pages() -> Iterator[dict[str, Any]]:
    """Pages of 27 layers to pinned host memory and back."""
    size, num = 27 * 64 * 1152, 64
    pool = torch.zeros(4 * num, size, dtype=torch.uint8, device="cuda")
    pages = torch.randperm(4 * num, device="cuda")[:num].int()
    blob = torch.zeros(num, size, dtype=torch.uint8).pin_memory()
    rows = torch.arange(num, device="cuda").int()
    for is_out in (True, False):
        call = functools.partial(page_copy.move_pages, pool, pages, blob, rows, is_out)
        us = time_calls_us([call] * 4, repeats=5)
        yield {"op": "move_pages", "is_out": is_out, "gb_s": round(num * size / us / 1e3, 1)}


def bench() -> Iterator[dict[str, Any]]:
    """Everything."""
    yield from bench_linears()
    yield from bench_small()
    yield from bench_pages()
