# SPDX-License-Identifier: Apache-2.0
"""Rotate-half rope and the KV store in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


def rotate_half(x_TND: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
    """Return x rotated: the pair (i, i + D/2) by the angle whose cos and sin the row holds."""
    cos, sin = cos_sin_TD.float()[:, None, :].chunk(2, dim=-1)
    low, high = x_TND.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@register_kernel("rope_kv_write", "reference", priority=Priority.REFERENCE)
def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """fp32 inside, rounded once to each destination's dtype."""
    cos_sin_TD = cos_sin[positions.long()]
    q.copy_(rotate_half(q, cos_sin_TD))
    k.copy_(rotate_half(k, cos_sin_TD))
    page_size = kv_pool_layer.shape[2]
    pages = slot_mapping.long() // page_size
    offsets = slot_mapping.long() % page_size
    kv_pool_layer[pages, 0, offsets] = k.to(kv_pool_layer.dtype)
    kv_pool_layer[pages, 1, offsets] = v.to(kv_pool_layer.dtype)
