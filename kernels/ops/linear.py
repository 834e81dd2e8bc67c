# SPDX-License-Identifier: Apache-2.0
"""Public ops: x @ weight.T for dense and quantised weights, alone and with what surrounds it in a
decoder layer. Does not know: implementations.
"""

from __future__ import annotations

import torch

from kernels.fp8_weight import Fp8Weight
from kernels.packed_weight import PackedWeight, weight_format
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of
from kernels.w4_layout import TiledW4

LinearWeight = torch.Tensor | PackedWeight | TiledW4 | Fp8Weight

# Up to so many tokens a weight is read once and used few times: a shape class of its own.
SMALL_BATCH_TOKENS = 16


def linear_format(weight: LinearWeight) -> str:
    """Return the selector's format name of a linear layer's weight."""
    if isinstance(weight, TiledW4):
        return weight.format
    if isinstance(weight, Fp8Weight):
        return "fp8_block"
    return weight_format(weight)


def _signature(family: str, x: torch.Tensor, weight: LinearWeight) -> CallSignature:
    formats = (("x", format_of(x.dtype)), ("weight", linear_format(weight)))
    traits = (
        ("small_batch", x.shape[0] <= SMALL_BATCH_TOKENS),
        ("up_to_8_tokens", x.shape[0] <= 8),
        ("num_rows", weight.shape[0]),
        ("num_cols", weight.shape[1]),
        ("interleaved", isinstance(weight, TiledW4) and weight.is_interleaved),
    )
    return CallSignature(family, x.device.type, formats, traits)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """Return x @ weight.T as [T, N] in x.dtype.

    Args:
        x: [T, K] fp32 or bf16, contiguous.
        weight: [N, K] fp32 or bf16 tensor, a PackedWeight (pack_linear), a TiledW4
            (tile_w4_linear), or an Fp8Weight.

    Raises:
        KernelInputError: if K differs.
    """
    expect_shape("x", x, (None, weight.shape[1]))
    out: torch.Tensor = select_kernel(_signature("linear", x, weight)).fn(x, weight)
    return out


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return linear(rms_norm(x, norm_weight, eps), weight) as [T, N] in out_dtype (x.dtype).

    Args:
        x: [T, K]; the last axis contiguous, rows may be parts of wider ones.
        norm_weight: fp32 or bf16 [K].
        weight: as `linear` takes it.

    Raises:
        KernelInputError: if K differs.
    """
    expect_shape("x", x, (None, weight.shape[1]))
    expect_shape("norm_weight", norm_weight, (weight.shape[1],))
    kernel = select_kernel(_signature("norm_linear", x, weight))
    out: torch.Tensor = kernel.fn(x, norm_weight, eps, weight, out_dtype or x.dtype)
    return out


def linear_add(x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor) -> torch.Tensor:
    """Return residual + linear(x, weight) as [T, N] in x.dtype, a new tensor.

    Args:
        x: [T, K], contiguous.
        weight: as `linear` takes it.
        residual: [T, N], x's dtype.

    Raises:
        KernelInputError: if shapes or dtypes disagree.
    """
    expect_shape("x", x, (None, weight.shape[1]))
    expect_shape("residual", residual, (x.shape[0], weight.shape[0]))
    expect_dtype("residual", residual, x.dtype)
    kernel = select_kernel(_signature("linear_add", x, weight))
    out: torch.Tensor = kernel.fn(x, weight, residual)
    return out


def swiglu_linear(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, gate_up: LinearWeight
) -> torch.Tensor:
    """Return silu(y @ gate.T) * (y @ up.T) as [T, F] in x.dtype; y is rms_norm(x), or x itself.

    Args:
        x: [T, K], contiguous.
        norm_weight: [K], or None for no norm.
        gate_up: [2 F, K]: gate rows, then up rows; a TiledW4 comes from `tile_w4_swiglu`.

    Raises:
        KernelInputError: if K differs.
    """
    expect_shape("x", x, (None, gate_up.shape[1]))
    if norm_weight is not None:
        expect_shape("norm_weight", norm_weight, (gate_up.shape[1],))
    kernel = select_kernel(_signature("swiglu_linear", x, gate_up))
    out: torch.Tensor = kernel.fn(x, norm_weight, eps, gate_up)
    return out
