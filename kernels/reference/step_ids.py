# SPDX-License-Identifier: Apache-2.0
"""The ends of a decode step in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.reference.bitmask import apply_bitmask
from kernels.reference.sampling import argmax
from kernels.registry import Priority, register_kernel


@register_kernel("feed_ids", "reference", priority=Priority.REFERENCE)
def feed_ids(
    ids: torch.Tensor, slots: torch.Tensor, next_ids: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Gather, choose, clamp."""
    return torch.where(ids < 0, next_ids[slots.long()], ids).clamp(0, vocab_size - 1)


@register_kernel("embed_rows", "reference", priority=Priority.REFERENCE)
def embed_rows(table: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather."""
    return table[ids.long()].to(dtype)


@register_kernel("greedy_rows", "reference", priority=Priority.REFERENCE)
def greedy_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    masks: torch.Tensor,
    next_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """On a copy of the rows."""
    chosen = logits[rows.long()]
    is_sound = torch.isfinite(chosen.amax(dim=-1))  # NaN spreads; -inf is a forbidden token
    apply_bitmask(chosen, masks[slots.long()])
    ids = argmax(chosen)
    peaks = chosen.gather(1, ids.clamp_min(0).long()[:, None])[:, 0]
    token_ids.copy_(torch.where(is_sound & torch.isfinite(peaks), ids, -1))
    next_ids[slots.long()] = token_ids.clamp_min(0)
