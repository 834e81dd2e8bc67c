# SPDX-License-Identifier: Apache-2.0
"""MLA prefill over fp8 planes: the rows' pages are decoded into rows of a pool of their own, which
the plain op then reads. Does not know: which kernels the ops choose.
"""

from __future__ import annotations

import torch

from kernels.ops.mla import mla_expand_pages
from kernels.ops.mla_prefill import mla_prefill
from kernels.registry import Priority, register_kernel
from kernels.step_work import StepWork, keep


@register_kernel("mla_prefill_planes", "expanded", priority=Priority.PORTABLE)
def prefill_of_expanded_pages(
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
    """Decode, then attend."""
    latent_dim, rope_dim = w_uk.shape[2], q.shape[2] - w_uk.shape[1]
    slots, lens = row_slots.cpu(), seq_lens.cpu()
    rows, table = mla_expand_pages(
        kv_pool_layer, latent_dim, rope_dim, page_table, slots, lens, q.dtype, work
    )
    counting = keep(
        work, "rows of expanded pages", lambda: torch.arange(len(slots), dtype=torch.int32)
    )
    return mla_prefill(
        q, w_uk, w_uv, rows, table, counting, row_indptr, seq_lens, softmax_scale, work
    )
