# SPDX-License-Identifier: Apache-2.0
"""Ragged causal GQA over paged KV in plain torch, the ground truth. Does not know: dispatch.

Legend: T tokens of the step, R rows, N query tokens of one row, L tokens of its KV, H query heads,
G KV heads, D head_dim.
"""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


def gather_kv(
    kv_pool_layer: torch.Tensor, pages: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of one row as dense fp32 [L, G, D]."""
    kv = kv_pool_layer[pages.long()].float()  # [pages, 2, page_size, G, D]
    k_LGD = kv[:, 0].flatten(0, 1)[:seq_len]
    v_LGD = kv[:, 1].flatten(0, 1)[:seq_len]
    return k_LGD, v_LGD


def attend_row(
    q_NHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return fp32 [N, H, D]; query i is the token at position L - N + i and sees all up to it."""
    num_new, num_heads, _ = q_NHD.shape
    seq_len, num_kv_heads, _ = k_LGD.shape
    group = num_heads // num_kv_heads
    k_HLD = k_LGD.permute(1, 0, 2).repeat_interleave(group, dim=0)
    v_HLD = v_LGD.permute(1, 0, 2).repeat_interleave(group, dim=0)
    scores_HNL = q_NHD.float().permute(1, 0, 2) @ k_HLD.transpose(1, 2) * scale
    query_position = torch.arange(seq_len - num_new, seq_len, device=q_NHD.device)[:, None]
    hidden_NL = torch.arange(seq_len, device=q_NHD.device)[None, :] > query_position
    scores_HNL = scores_HNL.masked_fill(hidden_NL, float("-inf"))
    return (torch.softmax(scores_HNL, dim=-1) @ v_HLD).permute(1, 0, 2)


@register_kernel("paged_attention", "reference", priority=Priority.REFERENCE)
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
    """One dense softmax per row, fp32 inside."""
    out = torch.empty_like(q)
    starts = row_indptr.tolist()
    for row, (slot, seq_len) in enumerate(zip(row_slots.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        pages = page_table[slot, : -(-seq_len // page_size)]
        k_LGD, v_LGD = gather_kv(kv_pool_layer, pages, seq_len)
        out[begin:end] = attend_row(q[begin:end], k_LGD, v_LGD, scale).to(q.dtype)
    return out
