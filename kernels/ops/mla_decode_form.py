# SPDX-License-Identifier: Apache-2.0
"""Public ops: how many tokens of a sequence `mla_decode` may be given as one row, and how many rows
read what they share once. Does not know: implementations, where such tokens and rows come from.

A sequence that decodes with drafts has several tokens in a step. As rows of one token each reads
the sequence's keys and values again; folded, those of a row share one pass. Sequences that begin
alike (forks, sub-agents, the same tools) have pages in common, which rows of a group read once.
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
    args = (num_heads, latent_dim, rope_dim, q_dtype, kv_pool_layer)
    signature = _signature("mla_decode_form", *args)
    forms: tuple[FoldForm, ...] = select_kernel(signature).fn(num_heads, signature.format("kv"))
    return forms


def rows_of_group(
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    q_dtype: torch.dtype,
    kv_pool_layer: torch.Tensor,
) -> int:
    """How many rows of one token `plan_mla_decode` may group, for `make_mla_workspace`; 1: none.

    Args:
        num_heads: of a row's queries.
        kv_pool_layer: as `mla_decode` takes it. No number in it is looked at.
    """
    args = (num_heads, latent_dim, rope_dim, q_dtype, kv_pool_layer)
    group: int = select_kernel(_signature("mla_decode_group", *args)).fn(num_heads)
    return group


def _signature(
    family: str,
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    q_dtype: torch.dtype,
    kv_pool_layer: torch.Tensor,
) -> CallSignature:
    formats = (("q", format_of(q_dtype)), ("kv", kv_format(kv_pool_layer)))
    traits = (
        ("num_heads", num_heads),
        ("latent_dim", latent_dim),
        ("rope_dim", rope_dim),
        *pool_traits(kv_pool_layer, latent_dim, rope_dim),
    )
    return CallSignature(family, kv_pool_layer.device.type, formats, traits)
