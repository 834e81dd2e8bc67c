# SPDX-License-Identifier: Apache-2.0
"""Draws from cut distributions in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("draw_tokens", "reference", priority=Priority.REFERENCE)
def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    chance: torch.Tensor,
) -> torch.Tensor:
    """Weights relative to the maximum in fp32, sums in fp64, one sort."""
    vocab = logits.shape[1]
    peak = logits.amax(dim=-1, keepdim=True)
    is_greedy = temperature <= 0
    divisor = torch.where(is_greedy, 1.0, temperature)[:, None]
    weights = torch.exp((logits - peak) / divisor).nan_to_num(0.0)
    descending = weights.sort(dim=-1, descending=True).values
    kth = descending.gather(1, (top_k.long() - 1).clamp(0, vocab - 1)[:, None])
    kth = torch.where((top_k > 0)[:, None], kth, 0.0)
    mass = descending.double().cumsum(dim=-1)
    last_kept = ((descending >= kth).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    nucleus = top_p.double()[:, None] * mass.gather(1, last_kept)
    place = (mass < nucleus).sum(dim=-1, keepdim=True).clamp_max(vocab - 1)
    least_p = torch.where((top_p < 1)[:, None], descending.gather(1, place), 0.0)
    least = torch.maximum(torch.maximum(kth, least_p), min_p[:, None])
    kept = torch.where(weights < least, 0.0, weights)
    reached = kept.double().cumsum(dim=-1)
    target = chance[:, None] * reached[:, -1:]
    token = (reached <= target).sum(dim=-1)
    # Rounding may carry the target past the last weight it may fall on.
    last = (vocab - 1) - (kept.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    highest = (logits == peak).to(torch.uint8).argmax(dim=-1)
    chosen = torch.where(is_greedy, highest, torch.minimum(token, last))
    return torch.where(torch.isfinite(peak[:, 0]), chosen, -1).to(torch.int32)
