# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA decode over paged latents in plain torch, the ground truth. Does not know: dispatch.

Legend: R rows, Q query tokens of a row, H heads, C latent_dim + rope_dim, L tokens of a row's KV.
"""

from __future__ import annotations

import torch

from kernels.latent_planes import LatentPlanes, decode_rows, latent_planes
from kernels.mla_workspace import MlaWorkspace
from kernels.registry import Priority, register_kernel
from kernels.step_work import StepWork


@register_kernel("mla_decode", "reference", priority=Priority.REFERENCE)
def mla_decode(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """One dense softmax per row, fp32 inside. A row without KV yields zeros."""
    num_rows = row_slots.shape[0]
    q_len = q.shape[0] // num_rows
    planes = None
    if kv_pool_layer.dtype == torch.uint8:
        planes = latent_planes(kv_pool_layer, latent_dim, q.shape[-1] - latent_dim)
    page_size = kv_pool_layer.shape[1] if planes is None else planes.page_size
    out = torch.zeros(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    for row, (slot, seq_len) in enumerate(zip(row_slots.tolist(), seq_lens.tolist(), strict=True)):
        if seq_len == 0:
            continue
        pages = page_table[slot, : -(-seq_len // page_size)].long()
        rows = kv_pool_layer[pages] if planes is None else decode_rows(planes, pages, torch.float32)
        kv_LC = rows.flatten(0, 1)[:seq_len].float()
        q_QHC = q[row * q_len : (row + 1) * q_len].float()
        scores_QHL = torch.einsum("qhc,lc->qhl", q_QHC, kv_LC) * softmax_scale
        last_Q = torch.arange(seq_len - q_len, seq_len, device=q.device)
        hidden_QL = torch.arange(seq_len, device=q.device)[None, :] > last_Q[:, None]
        scores_QHL = scores_QHL.masked_fill(hidden_QL[:, None, :], float("-inf"))
        p_QHL = torch.softmax(scores_QHL, dim=-1).nan_to_num(0.0)
        o_QHC = torch.einsum("qhl,lc->qhc", p_QHL, kv_LC[:, :latent_dim])
        out[row * q_len : (row + 1) * q_len] = o_QHC.to(q.dtype)
    return out


@register_kernel("mla_plan", "reference", priority=Priority.REFERENCE)
def plan_mla_decode(
    workspace: MlaWorkspace,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    """The plain form needs no plan."""


@register_kernel("mla_expand_pages", "reference", priority=Priority.REFERENCE)
def mla_expand_pages(
    planes: LatentPlanes,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    pages_of_rows: list[int],
    dtype: torch.dtype,
    work: StepWork | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather, decode; the new table counts up."""
    most = max(pages_of_rows)
    table = torch.zeros(len(pages_of_rows), most, dtype=torch.int32, device=page_table.device)
    parts, at = [], 0
    for row, (slot, num) in enumerate(zip(row_slots.tolist(), pages_of_rows, strict=True)):
        parts.append(decode_rows(planes, page_table[slot, :num].long(), dtype))
        table[row, :num] = torch.arange(at, at + num, dtype=torch.int32, device=table.device)
        at += num
    return torch.cat(parts), table
