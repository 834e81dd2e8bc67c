# SPDX-License-Identifier: Apache-2.0
"""Launches and registration of draws. Does not know: the insides (draw_rows.py).

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from kernels._triton import triton
from kernels.registry import Priority, register_kernel
from kernels.triton.draw_rows import (
    draw_candidates_kernel,
    draw_choose_kernel,
    draw_peaks_kernel,
)

PIECES = 32  # programs of a row
ROOM = 256  # candidates of a piece


# Compiled for sm_90, not yet run on one.
@register_kernel(
    "draw_tokens",
    "triton_candidates",
    priority=Priority.TRIAL,
    device="cuda",
    formats={"logits": {"fp32"}},
)
def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    chance: torch.Tensor,
    pieces: int = PIECES,
    room: int = ROOM,
) -> torch.Tensor:
    """Three launches; scratch of 64 KB a row."""
    num, vocab = logits.shape
    device = logits.device
    peaks = torch.empty(num, pieces, dtype=torch.float32, device=device)
    places = torch.empty(num, pieces, dtype=torch.int32, device=device)
    masses = torch.empty(num, 2, pieces, dtype=torch.float64, device=device)
    counts = torch.empty(num, pieces, dtype=torch.int32, device=device)
    weights = torch.empty(num, pieces, room, dtype=torch.float32, device=device)
    ids = torch.empty(num, pieces, room, dtype=torch.int32, device=device)
    out = torch.empty(num, dtype=torch.int32, device=device)
    block = min(1024, triton.next_power_of_2(triton.cdiv(vocab, pieces)))
    steps = triton.cdiv(vocab, pieces * block)
    stride = logits.stride(0)
    draw_peaks_kernel[(num, pieces)](
        logits, peaks, places, vocab, stride, PIECES=pieces, BLOCK=block, STEPS=steps, num_warps=4
    )
    draw_candidates_kernel[(num, pieces)](
        logits,
        temperature,
        min_p,
        peaks,
        masses,
        counts,
        weights,
        ids,
        vocab,
        stride,
        PIECES=pieces,
        BLOCK=block,
        STEPS=steps,
        ROOM=room,
        num_warps=4,
    )
    draw_choose_kernel[(num,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        chance,
        peaks,
        places,
        masses,
        counts,
        weights,
        ids,
        out,
        vocab,
        stride,
        PIECES=pieces,
        BLOCK=block,
        STEPS=steps,
        ROOM=room,
        num_warps=8,
    )
    return out
