# SPDX-License-Identifier: Apache-2.0
"""A grammar's bitmask over rows of logits, in place. Does not know: grammars."""

from __future__ import annotations

import torch

from kernels._triton import tl, triton
from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv

BLOCK = 2048


@triton.jit
def apply_bitmask_kernel(logits, masks, vocab, row_stride, mask_stride, BLOCK: tl.constexpr):
    """Program (row, block of columns). Logits are not read, and written where forbidden."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + row * mask_stride + v // 32, mask=v < vocab, other=-1)
    forbidden = ((word >> (v % 32)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits + row * row_stride + v, nothing, mask=forbidden & (v < vocab))


# A quarter of the reference's time (benchmarks/results/gpu_h200_202612.jsonl).
@register_kernel(
    "apply_bitmask",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"logits": {"fp32"}},
)
def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """One launch."""
    num, vocab = logits.shape
    if num:
        apply_bitmask_kernel[(num, cdiv(vocab, BLOCK))](
            logits, bitmask, vocab, logits.stride(0), bitmask.stride(0), BLOCK=BLOCK, num_warps=4
        )
