# SPDX-License-Identifier: Apache-2.0
"""MLA's norm, rope and KV store in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.latent_planes import encode_latents, latent_planes
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
    if kv_pool_layer.dtype == torch.uint8:
        planes = latent_planes(kv_pool_layer, latent_dim, key_TD.shape[-1])
        values, scales = encode_latents(latent_TD)
        slots = slot_mapping.long()
        where = (slots // planes.page_size, slots % planes.page_size)
        planes.values.view(torch.uint8)[where] = values.view(torch.uint8)
        planes.scales[where] = scales
        planes.rope[where] = key_TD.to(torch.bfloat16)
        return
    page_size = kv_pool_layer.shape[1]
    pages = slot_mapping.long() // page_size
    offsets = slot_mapping.long() % page_size
    row_TD = torch.cat((latent_TD, key_TD), dim=-1)
    kv_pool_layer[pages, offsets] = row_TD.to(kv_pool_layer.dtype)
