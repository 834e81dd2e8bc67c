# SPDX-License-Identifier: Apache-2.0
"""Public op: SwiGLU's elementwise part. Does not know: implementations."""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_shape, format_of


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x[:, :F]) * x[:, F:] as [T, F] in x.dtype.

    Args:
        x: [T, 2F] fp32 or bf16, contiguous.

    Raises:
        KernelInputError: if the width is odd.
    """
    expect_shape("x", x, (None, None))
    if x.shape[1] % 2:
        raise KernelInputError("x.shape[1]", x.shape[1], "an even number (gate, then up)")
    signature = CallSignature("silu_and_mul", x.device.type, (("x", format_of(x.dtype)),))
    out: torch.Tensor = select_kernel(signature).fn(x)
    return out
