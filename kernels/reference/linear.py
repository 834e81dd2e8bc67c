# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T and its neighbours in a layer in plain torch, the ground truth.

Does not know: dispatch.
"""

from __future__ import annotations

import torch

from kernels.fp8_weight import Fp8Weight
from kernels.packed_weight import PackedWeight
from kernels.reference.norm import rms_norm
from kernels.registry import Priority, register_kernel
from kernels.w4_layout import TiledW4, untile_w4

LinearWeight = torch.Tensor | PackedWeight | TiledW4 | Fp8Weight


def dense_fp32(weight: LinearWeight) -> torch.Tensor:
    """Return the weight [N, K] in fp32; gate rows, then up rows where they are interleaved."""
    if isinstance(weight, PackedWeight):
        return weight.dequantise()
    if isinstance(weight, Fp8Weight):
        return weight.dequantise(torch.float32)
    if isinstance(weight, TiledW4):
        rows = untile_w4(weight)[0]
        if weight.is_interleaved:
            halves = rows.view(-1, 2, 8, rows.shape[1]).transpose(0, 1)
            rows = halves.reshape(rows.shape)
        return rows
    return weight.float()


@register_kernel("linear", "reference", priority=Priority.REFERENCE)
def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """Dense weights in x.dtype; packed ones are dequantised to fp32 and multiplied in fp32."""
    if isinstance(weight, torch.Tensor):
        return torch.nn.functional.linear(x, weight.to(x.dtype))
    return (x.float() @ dense_fp32(weight).T).to(x.dtype)


@register_kernel("norm_linear", "reference", priority=Priority.REFERENCE)
def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The normed rows are rounded to x.dtype; the product is in fp32."""
    normed = rms_norm(x, norm_weight, eps)
    return (normed.float() @ dense_fp32(weight).T).to(out_dtype)


@register_kernel("linear_add", "reference", priority=Priority.REFERENCE)
def linear_add(x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor) -> torch.Tensor:
    """Product and sum in fp32, rounded once."""
    return (x.float() @ dense_fp32(weight).T + residual.float()).to(x.dtype)


@register_kernel("swiglu_linear", "reference", priority=Priority.REFERENCE)
def swiglu_linear(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, gate_up: LinearWeight
) -> torch.Tensor:
    """Products and SwiGLU in fp32, rounded once."""
    y = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    gate, up = (y.float() @ dense_fp32(gate_up).T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
