# SPDX-License-Identifier: Apache-2.0
"""Latent attention from its definition: each query alone, full heads, float64."""

from __future__ import annotations

import torch

from benchmarks.gpu.prefill_layer import PrefillLayers
from kernels.latent_planes import decode_rows, latent_planes


def attention_by_hand(step: PrefillLayers, layer: int = 0) -> torch.Tensor:
    """Values [T, H * V] of the step's tokens, over what the layer's pool holds now.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    sizes, pool = step.sizes, step.pools[layer]
    nope, latent, rope = sizes.nope_dim, sizes.latent_dim, sizes.rope_dim
    w_uk, w_uv = step.weights.w_uk.double(), step.weights.w_uv.double()
    out, first = [], 0
    for row, (past, new) in enumerate(step.specs):
        pages = step.table[row].long()
        if pool.dtype == torch.uint8:
            held = decode_rows(latent_planes(pool, latent, rope), pages, torch.float32)
        else:
            held = pool[pages]
        latents = held.flatten(0, 1)[: past + new].double()
        keys_HLN = torch.einsum("lc,hnc->hln", latents[:, :latent], w_uk)
        values_HLV = torch.einsum("lc,hvc->hlv", latents[:, :latent], w_uv)
        for at in range(new):
            q_HD = step.q[first + at].double()
            seen = past + at + 1
            cos, sin = step.cos_sin[past + at].double().chunk(2)
            low, high = q_HD[:, nope:].chunk(2, dim=-1)
            turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
            scores = torch.einsum("hln,hn->hl", keys_HLN[:, :seen], q_HD[:, :nope])
            scores += turned @ latents[:seen, latent:].T
            p_HL = (scores * step.scale).softmax(-1)
            out.append(torch.einsum("hl,hlv->hv", p_HL, values_HLV[:, :seen]).flatten())
        first += new
    return torch.stack(out)
