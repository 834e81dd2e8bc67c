# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts with 4-bit weights in plain torch, the ground truth. Does not know: dispatch.

Legend: T tokens, E experts, K choices per token, X hidden, I intermediate.
"""

from __future__ import annotations

import torch

from kernels.moe_routing import MoeRouting
from kernels.registry import Priority, register_kernel
from kernels.w4_layout import TiledW4, untile_w4


@register_kernel("moe_route", "reference", priority=Priority.REFERENCE)
def moe_route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: MoeRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int32 and weights fp32, [T, K] each, best first, ties to the lower index."""
    x_TE = logits.float()
    scores_TE = torch.sigmoid(x_TE) if routing.score == "sigmoid" else torch.softmax(x_TE, dim=-1)
    choice_TE = scores_TE if bias is None else scores_TE + bias.float()
    if routing.num_groups > 1:
        grid = choice_TE.reshape(choice_TE.shape[0], routing.num_groups, -1)
        counted = 2 if routing.group_score == "top2" else 1
        group_scores = grid.topk(counted, dim=-1).values.sum(dim=-1)
        kept = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices
        mask = torch.zeros_like(group_scores, dtype=torch.bool)
        mask.scatter_(1, kept[:, : routing.groups_kept], True)
        choice_TE = grid.masked_fill(~mask[..., None], float("-inf")).flatten(-2)
    order = torch.sort(choice_TE, dim=-1, descending=True, stable=True).indices
    ids_TK = order[:, : routing.top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.renormalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK.to(torch.int32), weights_TK * routing.scale


@register_kernel("moe_w4", "reference", priority=Priority.REFERENCE)
def moe_w4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """One expert after the other, fp32 weights, activations rounded to x.dtype between GEMMs."""
    gate_up_EIX = untile_w4(gate_up)
    down_EXI = untile_w4(down)
    out_TX = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.num_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        rows = x[token].float() @ gate_up_EIX[expert].T
        gate, up = rows.reshape(rows.shape[0], -1, 2, 8).unbind(dim=-2)
        h = (torch.nn.functional.silu(gate) * up).flatten(-2).to(x.dtype).float()
        out_TX.index_add_(0, token, h @ down_EXI[expert].T * weights[token, choice, None])
    if shared is not None:
        out_TX += shared.float()
    return out_TX.to(x.dtype)
