# SPDX-License-Identifier: Apache-2.0
"""MLA prefill in plain torch, the ground truth. Does not know: dispatch.

Legend: Q query tokens of a row, L tokens of its KV, H heads, N nope_dim, V v_dim, C latent_dim.
"""

from __future__ import annotations

import torch

from kernels.latent_planes import decode_rows, latent_planes
from kernels.registry import Priority, register_kernel
from kernels.step_work import StepWork


@register_kernel("mla_prefill", "reference", priority=Priority.REFERENCE)
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
    """Keys and values expanded from the latents, one dense softmax per row, fp32 inside."""
    _, nope_dim, latent_dim = w_uk.shape
    page_size = kv_pool_layer.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], w_uv.shape[1], dtype=q.dtype, device=q.device)
    starts = row_indptr.tolist()
    for row, (slot, seq_len) in enumerate(zip(row_slots.tolist(), seq_lens.tolist(), strict=True)):
        mine = slice(starts[row], starts[row + 1])
        q_QHD = q[mine].float()
        pages = page_table[slot, : -(-seq_len // page_size)].long()
        kv_LD = kv_pool_layer[pages].flatten(0, 1)[:seq_len].float()
        k_LHN = torch.einsum("lc,hnc->lhn", kv_LD[:, :latent_dim], w_uk.float())
        v_LHV = torch.einsum("lc,hvc->lhv", kv_LD[:, :latent_dim], w_uv.float())
        scores_QHL = torch.einsum("qhn,lhn->qhl", q_QHD[..., :nope_dim], k_LHN)
        scores_QHL += torch.einsum("qhr,lr->qhl", q_QHD[..., nope_dim:], kv_LD[:, latent_dim:])
        last_Q = torch.arange(seq_len - q_QHD.shape[0], seq_len, device=q.device)
        hidden_QL = torch.arange(seq_len, device=q.device)[None, :] > last_Q[:, None]
        scores_QHL = (scores_QHL * softmax_scale).masked_fill(hidden_QL[:, None], float("-inf"))
        out[mine] = torch.einsum("qhl,lhv->qhv", scores_QHL.softmax(dim=-1), v_LHV).to(q.dtype)
    return out


@register_kernel("mla_prefill_planes", "reference", priority=Priority.REFERENCE)
def mla_prefill_planes(
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
    """The whole pool decoded."""
    planes = latent_planes(kv_pool_layer, w_uk.shape[2], q.shape[2] - w_uk.shape[1])
    pages = torch.arange(kv_pool_layer.shape[0], device=kv_pool_layer.device)
    pool = decode_rows(planes, pages, q.dtype)
    return mla_prefill(
        q, w_uk, w_uv, pool, page_table, row_slots, row_indptr, seq_lens, softmax_scale
    )
