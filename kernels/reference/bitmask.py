# SPDX-License-Identifier: Apache-2.0
"""Grammar bitmasks in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("apply_bitmask", "reference", priority=Priority.REFERENCE)
def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Bit i of word w allows token 32 * w + i."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, :, None] >> shifts) & 1
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    logits.masked_fill_(forbidden, float("-inf"))
