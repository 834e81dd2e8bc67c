# SPDX-License-Identifier: Apache-2.0
"""Public op: RMSNorm, plain and fused with the residual add. Does not know: implementations."""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_shape, format_of


def _signature(family: str, x: torch.Tensor, weight: torch.Tensor) -> CallSignature:
    formats = (("x", format_of(x.dtype)), ("weight", format_of(weight.dtype)))
    return CallSignature(family, x.device.type, formats)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight per row, in x.dtype.

    Args:
        x: [T, H] fp32 or bf16, contiguous.
        weight: [H] fp32 or bf16.

    Raises:
        KernelInputError: if the widths differ.
    """
    expect_shape("x", x, (None, None))
    expect_shape("weight", weight, (x.shape[1],))
    out: torch.Tensor = select_kernel(_signature("rms_norm", x, weight)).fn(x, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); both new tensors, inputs unchanged.

    Args:
        x: [T, H] fp32 or bf16, contiguous.
        residual: [T, H], the dtype of the returned sum.
        weight: [H] fp32 or bf16.

    Raises:
        KernelInputError: if shapes differ.
    """
    expect_shape("x", x, (None, None))
    expect_shape("residual", residual, tuple(x.shape))
    expect_shape("weight", weight, (x.shape[1],))
    kernel = select_kernel(_signature("add_rms_norm", x, weight))
    normed, total = kernel.fn(x, residual, weight, eps)
    return normed, total
