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
from kernels.ops.linear import LinearWeight, linear_add, norm_linear
from kernels.ops.mla import mla_absorb, mla_output
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.mla_prefill import mla_prefill
from kernels.step_work import StepWork

# The two inner norms are built without the model's eps in the released code.
INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """One layer. Rows of rope parts are in rotate-half order."""

    # [q_rank + C + R, hidden], or [H * D + C + R, hidden] where queries have no low rank
    q_kv_down: LinearWeight
    q_norm: torch.Tensor | None  # [q_rank]
    q_up: LinearWeight | None  # [H * D, q_rank]
    kv_norm: torch.Tensor  # [C]
    w_uk: torch.Tensor  # [H, N, C]
    w_uv: torch.Tensor  # [H, V, C]
    out: LinearWeight  # [hidden, H * V]


def mla_attention(
    residual_TX: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    work: StepWork,
) -> torch.Tensor:
    """Write the step's latents; return the residual stream [T, hidden] behind the attention.

    Args:
        norm: weight and eps of the RMSNorm in front.
        kv_pool_layer: one layer of the pool, a view.
        workspace: planned for the step's decode rows.
        work: what kernels keep for the step's other layers.
    """
    num_heads, nope_dim, latent_dim = weights.w_uk.shape
    kv_width = latent_dim + cos_sin.shape[1]
    down_T = norm_linear(residual_TX, *norm, weights.q_kv_down)
    q, kv_TC = down_T[:, :-kv_width], down_T[:, -kv_width:]
    if weights.q_up is not None and weights.q_norm is not None:
        q = norm_linear(q, weights.q_norm, INNER_EPS, weights.q_up)
    q_THD = q.view(q.shape[0], num_heads, nope_dim + kv_width - latent_dim)
    cut, parts = rows.num_prefill_tokens, []
    if cut:
        mla_kv_write(
            q_THD[:cut, :, nope_dim:],
            kv_TC[:cut],
            weights.kv_norm,
            INNER_EPS,
            rows.positions[:cut],
            cos_sin,
            kv_pool_layer,
            rows.slot_mapping[:cut],
        )
        slots, indptr, lens = rows.prefill_on_host or (
            rows.row_slots[: rows.num_prefill_rows],
            rows.row_indptr[: rows.num_prefill_rows + 1],
            rows.seq_lens[: rows.num_prefill_rows],
        )
        o_THV = mla_prefill(
            q_THD[:cut],
            weights.w_uk,
            weights.w_uv,
            kv_pool_layer,
            rows.page_table,
            slots,
            indptr,
            lens,
            softmax_scale,
            work,
        )
        parts.append(linear_add(o_THV.reshape(cut, -1), weights.out, residual_TX[:cut]))
    if cut < q_THD.shape[0]:
        absorbed_THC = mla_absorb(
            q_THD[cut:],
            kv_TC[cut:],
            weights.kv_norm,
            INNER_EPS,
            rows.positions[cut:],
            cos_sin,
            kv_pool_layer,
            rows.slot_mapping[cut:],
            weights.w_uk,
        )
        parts.append(
            mla_output(
                absorbed_THC,
                kv_pool_layer,
                rows.page_table,
                rows.row_slots[rows.num_prefill_rows :],
                rows.seq_lens[rows.num_prefill_rows :],
                softmax_scale,
                workspace,
                weights.w_uv,
                weights.out,
                residual_TX[cut:],
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)
