# SPDX-License-Identifier: Apache-2.0
"""Public op: ragged causal grouped-query attention over the paged KV pool.

Does not know: implementations, who owns a page.
"""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def paged_attention(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Return [T, Hq, D] in q.dtype; prefill and decode rows may be mixed in one call.

    Row r owns the query tokens [row_indptr[r], row_indptr[r + 1]). They are the last tokens of its
    sequence, whose seq_lens[r] keys and values already lie in the pool; each query sees the keys up
    to its own position. Query head h reads KV head h // (Hq / Hkv).

    Args:
        q: [T, Hq, D] fp32 or bf16; the last axis contiguous.
        kv_pool_layer: [num_pages, 2, page_size, Hkv, D] fp32 or bf16: kv_pool[:, layer], a view.
        page_table: int32 [M, P], the pages of each slot's sequence in order.
        row_slots: int32 [R], row of the page table.
        row_indptr: int32 [R + 1], ascending, from 0 to T.
        seq_lens: int32 [R], KV tokens after this step, at least the row's query tokens.
        page_size: tokens per page.
        scale: factor on q . k, usually D ** -0.5.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows = row_slots.shape[0]
    expect_shape("kv_pool_layer", kv_pool_layer, (None, 2, page_size, None, head_dim))
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
    num_kv_heads = kv_pool_layer.shape[3]
    if num_heads % num_kv_heads:
        raise KernelInputError("q.shape[1]", num_heads, f"a multiple of {num_kv_heads} KV heads")
    formats = (("q", format_of(q.dtype)), ("kv", format_of(kv_pool_layer.dtype)))
    traits = (
        ("head_dim", head_dim),
        ("page_size", page_size),
        ("group", num_heads // num_kv_heads),
        ("decode_only", num_tokens == num_rows),
    )
    kernel = select_kernel(CallSignature("paged_attention", q.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(
        q, kv_pool_layer, page_table, row_slots, row_indptr, seq_lens, page_size, scale
    )
    return out
