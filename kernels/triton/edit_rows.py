# SPDX-License-Identifier: Apache-2.0
"""Penalties, bias and mask of a row of logits in one pass. Does not know: what is drawn from it."""

from __future__ import annotations

import torch

from kernels._triton import tl, triton
from kernels.ops.edit import RowEdits
from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv, next_power_of_2

PIECES = 32  # programs of a row


@triton.jit
def edit_rows_kernel(
    logits,
    rows,
    slots,
    repetitions,
    presences,
    frequencies,
    masks,
    counts,
    bias,
    out,
    bad,
    peaks,
    vocab,
    row_stride,
    mask_stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program (sample, piece). rows, slots fp64 [S]; out fp32 [S, V]; bad int32, peaks fp32
    [S, PIECES]: whether a logit of the piece is NaN or +inf, and its largest, before any edit."""
    sample = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows + sample).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    repetition = tl.load(repetitions + sample)
    presence = tl.load(presences + sample)
    frequency = tl.load(frequencies + sample)
    broken = tl.zeros([BLOCK], tl.int32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for step in range(STEPS):
        v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        real = v < vocab
        x = tl.load(logits + row * row_stride + v, mask=real, other=float("-inf"))
        broken = broken | ((x != x) | (x == float("inf"))).to(tl.int32)
        top = tl.maximum(top, tl.where(x == x, x, float("-inf")))
        count = tl.load(counts + slot * vocab + v, mask=real, other=0)
        factor = tl.where((count & 1) == 1, repetition, 1.0)
        x = tl.where(x > 0, x / factor, x * factor)
        num_output = count >> 1
        x = x - frequency * num_output.to(tl.float32)
        x = x - tl.where(num_output > 0, presence, 0.0)
        x = x + tl.load(bias + slot * vocab + v, mask=real, other=0.0)
        word = tl.load(masks + slot * mask_stride + v // 32, mask=real, other=0)
        x = tl.where(((word >> (v % 32)) & 1) == 1, x, float("-inf"))
        tl.store(out + sample.to(tl.int64) * vocab + v, x, mask=real)
    tl.store(bad + sample * PIECES + piece, tl.max(broken, axis=0))
    tl.store(peaks + sample * PIECES + piece, tl.max(top, axis=0))


# A third to an eighth of the reference's time (benchmarks/results/gpu_h200_202612.jsonl).
@register_kernel(
    "edit_rows",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"logits": {"fp32"}},
)
def edit_rows(logits: torch.Tensor, edits: RowEdits) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch, and what folds the pieces' verdicts."""
    num, vocab = edits.rows.shape[0], logits.shape[1]
    out = torch.empty(num, vocab, dtype=torch.float32, device=logits.device)
    bad = torch.empty(num, PIECES, dtype=torch.int32, device=logits.device)
    peaks = torch.empty(num, PIECES, dtype=torch.float32, device=logits.device)
    block = min(1024, next_power_of_2(cdiv(vocab, PIECES)))
    edit_rows_kernel[(num, PIECES)](
        logits,
        edits.rows,
        edits.slots,
        edits.repetition,
        edits.presence,
        edits.frequency,
        edits.masks,
        edits.counts,
        edits.bias,
        out,
        bad,
        peaks,
        vocab,
        logits.stride(0),
        edits.masks.stride(0),
        PIECES=PIECES,
        BLOCK=block,
        STEPS=cdiv(vocab, PIECES * block),
        num_warps=4,
    )
    is_sound = (bad.amax(dim=-1) == 0) & torch.isfinite(peaks.amax(dim=-1))
    return out, is_sound
