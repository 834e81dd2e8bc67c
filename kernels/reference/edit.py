# SPDX-License-Identifier: Apache-2.0
"""Penalties, bias and masks in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.ops.edit import RowEdits
from kernels.reference.bitmask import apply_bitmask
from kernels.registry import Priority, register_kernel


@register_kernel("edit_rows", "reference", priority=Priority.REFERENCE)
def edit_rows(logits: torch.Tensor, edits: RowEdits) -> tuple[torch.Tensor, torch.Tensor]:
    """On copies of the rows."""
    slots = edits.slots.long()
    values = logits[edits.rows.long()]
    is_sound = torch.isfinite(values.amax(dim=-1))  # NaN spreads; -inf is a forbidden token
    counts = edits.counts[slots]
    factor = torch.where((counts & 1) == 1, edits.repetition[:, None], 1.0)
    values = torch.where(values > 0, values / factor, values * factor)
    num_output = counts >> 1
    values = values - edits.frequency[:, None] * num_output
    values = values - edits.presence[:, None] * (num_output > 0)
    values = values + edits.bias[slots]
    apply_bitmask(values, edits.masks[slots])
    return values, is_sound
