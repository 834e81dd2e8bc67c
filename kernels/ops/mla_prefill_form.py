# SPDX-License-Identifier: Apache-2.0
"""Public op: in which form a prefill row attends. Does not know: implementations.

Absorbed: new tokens attend as decoded ones do, to the latents themselves, which are read once for
every few query tokens. Expanded: keys and values are made of the whole cached prefix, once a step.
"""

from __future__ import annotations

import torch

from kernels.ops.mla import kv_format, pool_traits
from kernels.selection import select_kernel
from kernels.signature import CallSignature, format_of


def absorbs_prefill(
    new: list[int],
    cached: list[int],
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    w_uk: torch.Tensor,
) -> list[bool]:
    """Whether each row attends in absorbed form.

    Args:
        new: new tokens of each row.
        cached: tokens of each row whose latents were there before the step.
        q: [T, H, nope_dim + rope_dim], kv_pool_layer and w_uk [H, nope_dim, latent_dim]: as
            `mla_prefill` takes them. No number in them is looked at.
    """
    _, nope_dim, latent_dim = w_uk.shape
    rope_dim = q.shape[2] - nope_dim
    formats = (("q", format_of(q.dtype)), ("kv", kv_format(kv_pool_layer)))
    traits = (
        ("latent_dim", latent_dim),
        ("rope_dim", rope_dim),
        *pool_traits(kv_pool_layer, latent_dim, rope_dim),
    )
    kernel = select_kernel(CallSignature("mla_prefill_form", q.device.type, formats, traits))
    chosen: list[bool] = kernel.fn(new, cached)
    return chosen
