# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts with dense weights in plain torch, the ground truth. Does not know: dispatch.

Legend: T tokens, X hidden, I intermediate.
"""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("moe_dense", "reference", priority=Priority.REFERENCE)
def moe_dense(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Expert by expert, those that have tokens; GEMMs in x.dtype, the sum over experts in fp32."""
    out_TX = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        h_TI = torch.nn.functional.silu(gate.float()) * up.float()
        part_TX = h_TI.to(x.dtype) @ down[expert].T
        out_TX.index_add_(0, token, part_TX.float() * weights[token, choice, None])
    if shared is not None:
        out_TX += shared.float()
    return out_TX.to(x.dtype)
