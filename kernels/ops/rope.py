# SPDX-License-Identifier: Apache-2.0
"""Public op: rotate-half rope on q and k, and the store of k and v into the paged pool.

Does not know: implementations, who owns a page.
"""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q and k in place; write the rotated k, and v, into the pool.

    Args:
        q: [T, Hq, D] fp32 or bf16; the last axis contiguous, others may be strided (a qkv split).
        k, v: [T, Hkv, D], same dtype as q.
        positions: int32 [T], below cos_sin's rows.
        cos_sin: fp32 [max_pos, D]: cos of the D/2 angles, then their sin.
        kv_pool_layer: [num_pages, 2, page_size, Hkv, D] fp32 or bf16: kv_pool[:, layer], a view.
        slot_mapping: int32 [T], page * page_size + offset.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    expect_shape("q", q, (num_tokens, None, head_dim))
    expect_shape("v", v, (num_tokens, num_kv_heads, head_dim))
    expect_shape("positions", positions, (num_tokens,))
    expect_shape("slot_mapping", slot_mapping, (num_tokens,))
    expect_shape("cos_sin", cos_sin, (None, head_dim))
    expect_shape("kv_pool_layer", kv_pool_layer, (None, 2, None, num_kv_heads, head_dim))
    expect_dtype("positions", positions, torch.int32)
    expect_dtype("slot_mapping", slot_mapping, torch.int32)
    if head_dim % 2:
        raise KernelInputError("q.shape[2]", head_dim, "an even head_dim")
    formats = (("q", format_of(q.dtype)), ("kv", format_of(kv_pool_layer.dtype)))
    signature = CallSignature("rope_kv_write", q.device.type, formats, (("head_dim", head_dim),))
    select_kernel(signature).fn(q, k, v, positions, cos_sin, kv_pool_layer, slot_mapping)
