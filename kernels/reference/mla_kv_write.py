# SPDX-License-Identifier: Apache-2.0
"""MLA's norm, rope and KV store in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.reference.norm import rms_norm
from kernels.reference.rope import rotate_half
from kernels.registry import Priority, register_kernel


@register_kernel("mla_kv_write", "reference", priority=Priority.REFERENCE)
def mla_kv_write(
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """fp32 inside, rounded once to each destination's dtype. No host synchronisation."""
    latent_dim = norm_weight.shape[0]
    cos_sin_TD = cos_sin[positions.long()]
    q_rope.copy_(rotate_half(q_rope, cos_sin_TD))
    latent_TD = rms_norm(kv[:, :latent_dim].float(), norm_weight, eps)
    key_TD = rotate_half(kv[:, None, latent_dim:], cos_sin_TD)[:, 0]
    page_size = kv_pool_layer.shape[1]
    pages = slot_mapping.long() // page_size
    offsets = slot_mapping.long() % page_size
    row_TD = torch.cat((latent_TD, key_TD), dim=-1)
    kv_pool_layer[pages, offsets] = row_TD.to(kv_pool_layer.dtype)
