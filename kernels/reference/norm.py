# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("rms_norm", "reference", priority=Priority.REFERENCE)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 inside, rounded once to x.dtype after the weight."""
    x_TH = x.float()
    inverse_T1 = torch.rsqrt(x_TH.pow(2).mean(-1, keepdim=True) + eps)
    return (x_TH * inverse_T1 * weight.float()).to(x.dtype)


@register_kernel("add_rms_norm", "reference", priority=Priority.REFERENCE)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is kept in the residual's dtype, the norm is taken of the kept sum."""
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps).to(x.dtype), total
