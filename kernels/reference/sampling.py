# SPDX-License-Identifier: Apache-2.0
"""Greedy choice in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("argmax", "reference", priority=Priority.REFERENCE)
def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Lowest index among equals; -1 where the row holds a NaN."""
    is_max = logits == logits.amax(-1, keepdim=True)
    lowest = is_max.to(torch.uint8).argmax(-1)
    return torch.where(torch.isnan(logits).any(-1), -1, lowest).to(torch.int32)
