# SPDX-License-Identifier: Apache-2.0
"""Public op: one draw per row under temperature, top-k, top-p and min-p. Does not know: seeds."""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    chance: torch.Tensor,
) -> torch.Tensor:
    """Return int32 [S]: the token that `chance` falls on, walking the vocabulary in id order.

    A cut keeps ties; top-p counts what top-k left. Rows with temperature 0 take the maximum, the
    lowest id among equals. A row without a finite maximum gives -1. Nothing is read on the host.

    Args:
        logits: [S, V] fp32, contiguous; forbidden tokens are -inf.
        temperature, top_p, min_p: fp32 [S]; top_p above 0, 1 and min_p 0 keep everything.
        top_k: int32 [S]; 0 keeps everything.
        chance: fp64 [S] in [0, 1).

    Raises:
        KernelInputError: if shapes or dtypes disagree.
    """
    expect_shape("logits", logits, (None, None))
    for name, values, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("chance", chance, torch.float64),
    ):
        expect_shape(name, values, (logits.shape[0],))
        expect_dtype(name, values, dtype)
    formats = (("logits", format_of(logits.dtype)),)
    kernel = select_kernel(CallSignature("draw_tokens", logits.device.type, formats))
    out: torch.Tensor = kernel.fn(logits, temperature, top_k, top_p, min_p, chance)
    return out
