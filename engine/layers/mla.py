# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of one layer: projections, paged latents, absorbed decode.

Does not know: files, tensor names, requests. Legend: T tokens, H heads, N nope_dim, R rope_dim,
V v_dim, C latent_dim, D = N + R.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.model import StepRows
from kernels.mla_workspace import MlaWorkspace
from kernels.ops.linear import linear
from kernels.ops.mla import mla_decode
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.mla_prefill import mla_prefill
from kernels.ops.norm import rms_norm
from kernels.packed_weight import Weight

# The two inner norms are built without the model's eps in the released code.
INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """One layer. Rows of rope parts are in rotate-half order."""

    # [q_rank + C + R, hidden], or [H * D + C + R, hidden] where queries have no low rank
    q_kv_down: Weight
    q_norm: torch.Tensor | None  # [q_rank]
    q_up: Weight | None  # [H * D, q_rank]
    kv_norm: torch.Tensor  # [C]
    w_uk: torch.Tensor  # [H, N, C]
    w_uv: torch.Tensor  # [H, V, C]
    out: Weight  # [hidden, H * V]


def mla_attention(
    x_TX: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """Write the step's latents and return the layer's attention output [T, hidden].

    Args:
        kv_pool_layer: [num_pages, page_size, C + R], a view of the pool.
        workspace: planned for the step's decode rows.
    """
    num_heads, nope_dim, latent_dim = weights.w_uk.shape
    kv_width = kv_pool_layer.shape[-1]
    down_T = linear(x_TX, weights.q_kv_down)
    q, kv_TC = down_T[:, :-kv_width], down_T[:, -kv_width:]
    if weights.q_up is not None and weights.q_norm is not None:
        q = linear(rms_norm(q.contiguous(), weights.q_norm, INNER_EPS), weights.q_up)
    q_THD = q.view(q.shape[0], num_heads, nope_dim + kv_width - latent_dim)
    mla_kv_write(
        q_THD[..., nope_dim:],
        kv_TC,
        weights.kv_norm,
        INNER_EPS,
        rows.positions,
        cos_sin,
        kv_pool_layer,
        rows.slot_mapping,
    )
    cut = rows.num_prefill_tokens
    parts = []
    if cut:
        parts.append(_prefill(q_THD[:cut], weights, rows, kv_pool_layer, softmax_scale))
    if cut < q_THD.shape[0]:
        parts.append(_decode(q_THD[cut:], weights, rows, kv_pool_layer, softmax_scale, workspace))
    o_THV = parts[0] if len(parts) == 1 else torch.cat(parts)
    return linear(o_THV.reshape(o_THV.shape[0], -1), weights.out)


def _prefill(
    q_THD: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    cut = rows.num_prefill_rows
    slots, indptr, lens = rows.prefill_on_host or (
        rows.row_slots[:cut],
        rows.row_indptr[: cut + 1],
        rows.seq_lens[:cut],
    )
    return mla_prefill(
        q_THD,
        weights.w_uk,
        weights.w_uv,
        kv_pool_layer,
        rows.page_table,
        slots,
        indptr,
        lens,
        softmax_scale,
    )


def _decode(
    q_THD: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    num_heads, nope_dim, latent_dim = weights.w_uk.shape
    q_HTN = q_THD[..., :nope_dim].transpose(0, 1)
    absorbed = q_THD.new_empty(q_THD.shape[0], num_heads, kv_pool_layer.shape[-1])
    torch.bmm(q_HTN, weights.w_uk, out=absorbed[..., :latent_dim].transpose(0, 1))
    absorbed[..., latent_dim:] = q_THD[..., nope_dim:]
    cut = rows.num_prefill_rows
    o_THC = mla_decode(
        absorbed,
        kv_pool_layer,
        rows.page_table,
        rows.row_slots[cut:],
        rows.seq_lens[cut:],
        softmax_scale,
        workspace,
    )
    o_THV = q_THD.new_empty(q_THD.shape[0], num_heads, weights.w_uv.shape[1])
    torch.bmm(o_THC.transpose(0, 1), weights.w_uv.transpose(1, 2), out=o_THV.transpose(0, 1))
    return o_THV
