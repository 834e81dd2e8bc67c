# SPDX-License-Identifier: Apache-2.0
"""Public op: forbid the tokens that a grammar's bitmask leaves out. Does not know: grammars."""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: [S, V] fp32, contiguous.
        bitmask: int32 [S, ceil(V / 32)]; bit i of word w (lowest first) allows token 32 * w + i.
            All bits set (-1) leaves the row as it is.

    Raises:
        KernelInputError: if shapes disagree or the mask is not int32.
    """
    expect_shape("logits", logits, (None, None))
    expect_shape("bitmask", bitmask, (logits.shape[0], -(-logits.shape[1] // 32)))
    expect_dtype("bitmask", bitmask, torch.int32)
    formats = (("logits", format_of(logits.dtype)),)
    select_kernel(CallSignature("apply_bitmask", logits.device.type, formats)).fn(logits, bitmask)
