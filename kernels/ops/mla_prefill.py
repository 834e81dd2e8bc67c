# SPDX-License-Identifier: Apache-2.0
"""Public op: MLA attention of new tokens over a paged prefix. Does not know: implementations.

Queries and results are those of the full heads: whether keys and values are expanded from the
latents, or the up-projections are absorbed into queries and results, is the kernel's choice.
"""

from __future__ import annotations

import torch

from kernels.latent_planes import latent_planes
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of
from kernels.step_work import StepWork


def _is_dense(q: torch.Tensor) -> bool:
    """A token's heads lie one behind the other, tokens start at multiples of 16 bytes."""
    if q.stride()[1:] != (q.shape[2], 1):
        return False
    return (q.stride(0) * q.element_size()) % 16 == 0 and q.data_ptr() % 16 == 0


def mla_prefill(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    work: StepWork | None = None,
) -> torch.Tensor:
    """Return [T, H, v_dim] in q.dtype: causal attention of ragged rows, prefix included.

    Row r owns the query tokens [row_indptr[r], row_indptr[r + 1]), the last of its seq_lens[r]
    tokens, whose latents already lie in the pool. Lengths are read on the host: not for graphs.

    Args:
        q: [T, H, nope_dim + rope_dim], rope applied; the last axis contiguous.
        w_uk: [H, nope_dim, latent_dim], a head's key of a latent is w_uk @ latent.
        w_uv: [H, v_dim, latent_dim], a head's value of a latent is w_uv @ latent.
        kv_pool_layer: [num_pages, page_size, latent_dim + rope_dim], kv_pool[:, layer], a view; or
            fp8 planes, uint8 [num_pages, page bytes] (kernels/latent_planes.py).
        page_table: int32 [M, P], the pages of each slot's sequence in order.
        row_slots: int32 [R], row of the page table.
        row_indptr: int32 [R + 1], ascending, from 0 to T; on the host or the device.
        seq_lens: int32 [R], tokens of KV after this step; on the host or the device.
        softmax_scale: factor on q . k.
        work: one for all layers of a step, whose rows are the same; None keeps nothing.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    num_heads, nope_dim, latent_dim = w_uk.shape
    num_rows = row_slots.shape[0]
    expect_shape("q", q, (None, num_heads, None))
    rope_dim = q.shape[2] - nope_dim
    expect_shape("w_uv", w_uv, (num_heads, None, latent_dim))
    expect_shape("page_table", page_table, (None, None))
    expect_shape("row_indptr", row_indptr, (num_rows + 1,))
    expect_shape("seq_lens", seq_lens, (num_rows,))
    for name, index in (
        ("page_table", page_table),
        ("row_slots", row_slots),
        ("row_indptr", row_indptr),
        ("seq_lens", seq_lens),
    ):
        expect_dtype(name, index, torch.int32)
    has_planes = kv_pool_layer.dtype == torch.uint8
    if has_planes:
        page_size = latent_planes(kv_pool_layer, latent_dim, rope_dim).page_size
        is_dense = True
    else:
        expect_shape("kv_pool_layer", kv_pool_layer, (None, None, latent_dim + rope_dim))
        page_size = kv_pool_layer.shape[1]
        is_dense = kv_pool_layer.stride()[1:] == (kv_pool_layer.shape[2], 1)
    kv = "fp8_planes" if has_planes else format_of(kv_pool_layer.dtype)
    traits = (
        ("head_dim", nope_dim + rope_dim),
        ("v_dim", w_uv.shape[1]),
        ("latent_dim", latent_dim),
        ("rope_dim", rope_dim),
        ("page_size", page_size),
        ("page_is_dense", is_dense),
        ("q_is_dense", _is_dense(q)),
    )
    family = "mla_prefill_planes" if has_planes else "mla_prefill"
    formats = (("q", format_of(q.dtype)), ("kv", kv))
    kernel = select_kernel(CallSignature(family, q.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(
        q,
        w_uk,
        w_uv,
        kv_pool_layer,
        page_table,
        row_slots,
        row_indptr,
        seq_lens,
        softmax_scale,
        work,
    )
    return out
