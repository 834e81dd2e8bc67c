# SPDX-License-Identifier: Apache-2.0
"""Public op: MLA's norm of the latent, rope on queries and key, and the store into the paged pool.

Does not know: implementations, who owns a page.
"""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.latent_planes import latent_planes
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


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
    """Rotate q_rope in place; write the normed latent and the rotated key part into the pool.

    Args:
        q_rope: [T, H, rope_dim], a view of the queries; the last axis contiguous.
        kv: [T, latent_dim + rope_dim]: the latent before its norm, then the key's rope part; the
            last axis contiguous. Left as it is.
        norm_weight: [latent_dim] fp32 or bf16, RMSNorm weight of the latent.
        eps: of that norm.
        positions: int32 [T], below cos_sin's rows.
        cos_sin: fp32 [max_pos, rope_dim]: cos of the rope_dim / 2 angles, then their sin;
            pairs are (i, i + rope_dim / 2).
        kv_pool_layer: [num_pages, page_size, latent_dim + rope_dim], kv_pool[:, layer], a view;
            or fp8 planes, uint8 [num_pages, page bytes] (kernels/latent_planes.py).
        slot_mapping: int32 [T], page * page_size + offset.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    num_tokens, _, rope_dim = q_rope.shape
    width = norm_weight.shape[0] + rope_dim
    expect_shape("kv", kv, (num_tokens, width))
    expect_shape("positions", positions, (num_tokens,))
    expect_shape("slot_mapping", slot_mapping, (num_tokens,))
    expect_shape("cos_sin", cos_sin, (None, rope_dim))
    if kv_pool_layer.dtype == torch.uint8:
        latent_planes(kv_pool_layer, norm_weight.shape[0], rope_dim)  # refuses other sizes
    else:
        expect_shape("kv_pool_layer", kv_pool_layer, (None, None, width))
    expect_dtype("positions", positions, torch.int32)
    expect_dtype("slot_mapping", slot_mapping, torch.int32)
    if rope_dim % 2:
        raise KernelInputError("q_rope.shape[2]", rope_dim, "an even rope_dim")
    formats = (("q", format_of(q_rope.dtype)), ("kv", format_of(kv_pool_layer.dtype)))
    traits = (("latent_dim", norm_weight.shape[0]), ("rope_dim", rope_dim))
    kernel = select_kernel(CallSignature("mla_kv_write", q_rope.device.type, formats, traits))
    kernel.fn(q_rope, kv, norm_weight, eps, positions, cos_sin, kv_pool_layer, slot_mapping)
