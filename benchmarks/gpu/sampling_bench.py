# SPDX-License-Identifier: Apache-2.0
"""Draws and edits of logits: check against the references, then time beside their floors.

Does not know: output files. `check` runs in the interpreter too, on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.timing import time_calls_us
from kernels.ops.edit import RowEdits
from kernels.reference import bitmask as reference_bitmask
from kernels.reference import draw as reference_draw
from kernels.reference import edit as reference_edit
from kernels.triton import bitmask, draw, edit_rows

HBM_TB_S = 4.54
KINDS = {
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_p": (0.8, 0, 0.95, 0.0),
    "top_k_top_p": (0.8, 50, 0.95, 0.0),
}
Parts = tuple[torch.Tensor, ...]


def _case(num: int, vocab: int, kind: str, spread: float, device: str) -> Parts:
    temperature, top_k, top_p, min_p = KINDS[kind]
    generator = torch.Generator(device=device).manual_seed(num)
    logits = torch.randn(num, vocab, generator=generator, device=device) * spread
    chance = torch.rand(num, generator=generator, dtype=torch.float64, device=device)

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num,), value, dtype=dtype, device=device)

    columns = (column(temperature), column(top_k, torch.int32), column(top_p), column(min_p))
    return (logits, *columns, chance)


def _edits(num: int, vocab: int, device: str) -> tuple[torch.Tensor, RowEdits]:
    numbers = torch.arange(num, dtype=torch.float64, device=device)

    def column(value: float) -> torch.Tensor:
        return torch.full((num,), value, device=device)

    words = (num, -(-vocab // 32))
    edits = RowEdits(
        rows=numbers,
        slots=numbers,
        repetition=column(1.1),
        presence=column(0.2),
        frequency=column(0.1),
        masks=torch.full(words, -1, dtype=torch.int32, device=device),
        counts=torch.randint(0, 3, (num, vocab), device=device).int(),
        bias=torch.zeros(num, vocab, device=device),
    )
    return torch.randn(num, vocab, device=device), edits


def _masked(num: int, vocab: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which one of two forbids half of its tokens."""
    masks = torch.randint(-(1 << 31), 1 << 31, (num, -(-vocab // 32)), device=device)
    masks[::2] = -1
    return torch.randn(num, vocab, device=device), masks.int()


def check(vocab: int = 102400, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Yield one line per case: the share of draws that differ, the error of the edits."""
    for kind in KINDS:
        for spread in (3.0, 0.1):
            case = _case(16, vocab, kind, spread, device)
            differs = reference_draw.draw_tokens(*case) != draw.draw_tokens(*case)
            yield {
                "op": "draw_tokens",
                "check": f"{kind} spread={spread}",
                # A chance on an edge, where sums of another order differ, is no error of one in 16.
                "rel_error": 0.0 if int(differs.sum()) <= 1 else float(differs.float().mean()),
            }
    logits, edits = _edits(4, vocab, device)
    found, _ = edit_rows.edit_rows(logits, edits)
    wanted, _ = reference_edit.edit_rows(logits, edits)
    yield {"op": "edit_rows", "rel_error": float((found - wanted).norm() / wanted.norm())}
    logits, masks = _masked(4, vocab, device)
    wanted = logits.clone()
    reference_bitmask.apply_bitmask(wanted, masks)
    bitmask.apply_bitmask(logits, masks)
    yield {"op": "apply_bitmask", "rel_error": float((logits != wanted).float().mean())}


def bench() -> Iterator[dict[str, Any]]:
    """Yield one line per case: us, beside the time to read the logits once from memory."""
    for vocab in (102400, 131072):
        for num in (1, 16, 64):
            floor_us = num * vocab * 4 / HBM_TB_S / 1e6
            sized = {"vocab": vocab, "rows": num, "floor_us": round(floor_us, 1)}
            for kind in KINDS:
                for spread in (3.0, 0.1):
                    call = functools.partial(
                        draw.draw_tokens, *_case(num, vocab, kind, spread, "cuda")
                    )
                    us = round(time_calls_us([call] * 4), 1)
                    case = {"kind": kind, "spread": spread, **sized, "us": us}
                    yield {"op": "draw_tokens", "kernel": "triton_search", **case}
            case_of = _case(num, vocab, "top_p", 3.0, "cuda")
            plain = functools.partial(reference_draw.draw_tokens, *case_of)
            us = round(time_calls_us([plain] * 2), 1)
            yield {"op": "draw_tokens", "kernel": "reference", "kind": "top_p", **sized, "us": us}
            yield from _pairs(num, vocab, sized)


def _pairs(num: int, vocab: int, sized: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Edits and masks, each beside its reference."""
    edits, masked = _edits(num, vocab, "cuda"), _masked(num, vocab, "cuda")
    for op, name, kernel, inputs in (
        ("edit_rows", "triton", edit_rows.edit_rows, edits),
        ("edit_rows", "reference", reference_edit.edit_rows, edits),
        ("apply_bitmask", "triton", bitmask.apply_bitmask, masked),
        ("apply_bitmask", "reference", reference_bitmask.apply_bitmask, masked),
    ):
        us = round(time_calls_us([functools.partial(kernel, *inputs)] * 4), 1)
        yield {"op": op, "kernel": name, **sized, "us": us}
