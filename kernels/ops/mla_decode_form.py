# SPDX-License-Identifier: Apache-2.0
"""Public op: how many tokens of a sequence `mla_decode` may be given as one row. Does not know:
implementations, where such tokens come from.

A sequence that decodes with drafts has several tokens in a step. As rows of one token each reads
the sequence's keys and values again; folded, those of a row share one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.mla import kv_format, pool_traits
from kernels.selection import select_kernel
from kernels.signature import CallSignature, format_of


@dataclass(frozen=True, slots=True)
class FoldForm:
    """A `q_len` that rows may have.

    `cost`: of one pass over keys and values at that q_len, in passes at q_len 1. `fixed`: what a
    step of such rows takes beside its passes, in tokens of one pass at q_len 1.
    """

    q_len: int
    cost: float
    fixed: int = 0


def fold_forms(
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    q_dtype: torch.dtype,
    kv_pool_layer: torch.Tensor,
) -> tuple[FoldForm, ...]:
    """The forms besides rows of one token, by ascending q_len; none: tokens are not folded.

    Args:
        num_heads: of a token's queries.
        kv_pool_layer: as `mla_decode` takes it. No number in it is looked at.
    """
    formats = (("q", format_of(q_dtype)), ("kv", kv_format(kv_pool_layer)))
    traits = (
        ("num_heads", num_heads),
        ("latent_dim", latent_dim),
        ("rope_dim", rope_dim),
        *pool_traits(kv_pool_layer, latent_dim, rope_dim),
    )
    signature = CallSignature("mla_decode_form", kv_pool_layer.device.type, formats, traits)
    forms: tuple[FoldForm, ...] = select_kernel(signature).fn(num_heads, dict(formats)["kv"])
    return forms
