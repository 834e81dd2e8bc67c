# SPDX-License-Identifier: Apache-2.0
"""Public op: x @ weight.T for dense and block-quantised weights. Does not know: implementations."""

from __future__ import annotations

import torch

from kernels.packed_weight import Weight, weight_format
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_shape, format_of

# Up to so many tokens a weight is read once and used few times: a shape class of its own.
SMALL_BATCH_TOKENS = 16


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return x @ weight.T as [T, N] in x.dtype.

    Args:
        x: [T, K] fp32 or bf16, contiguous.
        weight: [N, K] fp32 or bf16 tensor, or a PackedWeight (pack_linear).

    Raises:
        KernelInputError: if K differs.
    """
    expect_shape("x", x, (None, weight.shape[1]))
    formats = (("x", format_of(x.dtype)), ("weight", weight_format(weight)))
    traits = (("small_batch", x.shape[0] <= SMALL_BATCH_TOKENS),)
    kernel = select_kernel(CallSignature("linear", x.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(x, weight)
    return out
