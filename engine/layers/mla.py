# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of one layer: projections, paged latents, absorbed decode.

Prefill rows: mla_prefill.py. Does not know: files, tensor names, requests. Legend: T tokens, H
heads, N nope_dim, R rope_dim, V v_dim, C latent_dim, D = N + R.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch

from engine.layers.mla_prefill import prefill_values
from engine.layers.mla_weights import INNER_EPS, MlaWeights
from engine.models.model import FoldedRows, StepRows
from kernels.mla_workspace import MlaWorkspace
from kernels.ops.linear import linear_add, norm_linear
from kernels.ops.mla import mla_absorb, mla_output, mla_values
from kernels.step_work import StepWork


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
        workspace: planned for the step's decode rows, folded ones where they are.
        work: what kernels keep for the step's other layers.
    """
    q_THD, kv_TC = mla_project(residual_TX, norm, weights, cos_sin.shape[1])
    cut, parts = rows.num_prefill_tokens, []
    if cut:
        o_TO = prefill_values(
            q_THD[:cut], kv_TC[:cut], weights, rows, kv_pool_layer, cos_sin, softmax_scale, work
        )
        parts.append(linear_add(o_TO, weights.out, residual_TX[:cut]))
    if rows.folded is not None:
        args = (q_THD, kv_TC, weights, rows, rows.folded, kv_pool_layer, cos_sin, softmax_scale)
        parts.append(folded_output(*args, workspace, work, residual_TX))
    elif cut < q_THD.shape[0]:
        absorbed_THC = _absorb(q_THD[cut:], kv_TC[cut:], weights, rows, kv_pool_layer, cos_sin)
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


def folded_output(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    folded: FoldedRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    work: StepWork,
    residual_TX: torch.Tensor,
) -> torch.Tensor:
    """As the unfolded rows of a step without prefill. Queries that are no token's stay zero: the
    places are the same in each layer."""
    num_heads, nope_dim, latent_dim = weights.w_uk.shape
    num_queries = folded.row_slots.shape[0] * folded.q_len
    width = latent_dim + q_THD.shape[2] - nope_dim
    queries = work.keep("folded", lambda: q_THD.new_zeros(num_queries, num_heads, width))
    mla_absorb(
        q_THD,
        kv_TC,
        weights.kv_norm,
        INNER_EPS,
        rows.positions,
        cos_sin,
        kv_pool_layer,
        rows.slot_mapping,
        weights.w_uk,
        queries,
        folded.places,
    )
    return mla_output(
        queries,
        kv_pool_layer,
        rows.page_table,
        folded.row_slots,
        folded.seq_lens,
        softmax_scale,
        workspace,
        weights.w_uv,
        weights.out,
        residual_TX,
        folded.places,
    )


def mla_project(
    residual_TX: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weights: MlaWeights,
    rope_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, D] and latents with their rope part [T, C + R], before rope: what a layer
    does to each token alone in front of its attention."""
    num_heads, nope_dim, latent_dim = weights.w_uk.shape
    kv_width = latent_dim + rope_dim
    down_T = norm_linear(residual_TX, *norm, weights.q_kv_down)
    q, kv_TC = down_T[:, :-kv_width], down_T[:, -kv_width:]
    if weights.q_up is not None and weights.q_norm is not None:
        q = norm_linear(q, weights.q_norm, INNER_EPS, weights.q_up)
    return q.view(q.shape[0], num_heads, nope_dim + rope_dim), kv_TC


def mla_attend(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    work: StepWork,
    out_TO: torch.Tensor,
) -> None:
    """What stands between `mla_project` and the output projection: write the step's latents, and
    to `out_TO` [T, H * V] each token's values. Queries may be overwritten."""
    cut = rows.num_prefill_tokens
    if cut:
        prefill_values(
            q_THD[:cut],
            kv_TC[:cut],
            weights,
            rows,
            kv_pool_layer,
            cos_sin,
            softmax_scale,
            work,
            out_TO[:cut],
        )
    if cut < q_THD.shape[0]:
        absorbed_THC = _absorb(q_THD[cut:], kv_TC[cut:], weights, rows, kv_pool_layer, cos_sin)
        o_TO = mla_values(
            absorbed_THC,
            kv_pool_layer,
            rows.page_table,
            rows.row_slots[rows.num_prefill_rows :],
            rows.seq_lens[rows.num_prefill_rows :],
            softmax_scale,
            workspace,
            weights.w_uv,
        )
        out_TO[cut:].copy_(o_TO)


def _absorb(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    cut = rows.num_prefill_tokens
    return mla_absorb(
        q_THD,
        kv_TC,
        weights.kv_norm,
        INNER_EPS,
        rows.positions[cut:],
        cos_sin,
        kv_pool_layer,
        rows.slot_mapping[cut:],
        weights.w_uk,
    )
