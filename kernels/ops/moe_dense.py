# SPDX-License-Identifier: Apache-2.0
"""Public op: the mixture of experts with dense weights. Does not know: implementations, routing."""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def moe_dense(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T, hidden] in x.dtype: sum over a token's experts of
    weight * down(silu(gate(x)) * up(x)), plus `shared`.

    Args:
        x: [T, hidden] fp32 or bf16, contiguous.
        ids: int32 [T, top_k], experts of each token.
        weights: fp32 [T, top_k].
        gate_up: [E, 2 * intermediate, hidden], gate rows, then up rows; x's dtype.
        down: [E, hidden, intermediate]; x's dtype.
        shared: [T, hidden], added in fp32 before rounding, or None.

    Raises:
        KernelInputError: if shapes or dtypes disagree.
    """
    num_tokens, hidden = x.shape
    num_experts, doubled, _ = gate_up.shape
    expect_shape("ids", ids, (num_tokens, None))
    expect_shape("weights", weights, tuple(ids.shape))
    expect_dtype("ids", ids, torch.int32)
    expect_dtype("weights", weights, torch.float32)
    expect_shape("gate_up", gate_up, (None, None, hidden))
    expect_shape("down", down, (num_experts, hidden, doubled // 2))
    expect_dtype("gate_up", gate_up, x.dtype)
    expect_dtype("down", down, x.dtype)
    if shared is not None:
        expect_shape("shared", shared, (num_tokens, hidden))
    formats = (("x", format_of(x.dtype)), ("weight", format_of(gate_up.dtype)))
    traits = (("num_experts", num_experts), ("top_k", ids.shape[1]))
    kernel = select_kernel(CallSignature("moe_dense", x.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(x, ids, weights, gate_up, down, shared)
    return out
