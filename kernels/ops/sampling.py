# SPDX-License-Identifier: Apache-2.0
"""Public op: greedy choice. Does not know: implementations, temperature, seeds."""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_shape, format_of


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return int32 [S]: the index of each row's maximum, the lowest among equals.

    A row that holds a NaN gives -1, so that its request can be failed alone.

    Args:
        logits: [S, V] fp32 or bf16, contiguous.

    Raises:
        KernelInputError: if logits is not a matrix.
    """
    expect_shape("logits", logits, (None, None))
    formats = (("logits", format_of(logits.dtype)),)
    out: torch.Tensor = select_kernel(CallSignature("argmax", logits.device.type, formats)).fn(
        logits
    )
    return out
