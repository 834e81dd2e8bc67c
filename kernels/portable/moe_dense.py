# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts with dense weights as two grouped GEMMs: no host, so graphs may hold it.

Does not know: dispatch. Source: torch's grouped matrix product (CUTLASS on compute capability 9).
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Priority, register_kernel


def _refuse(call: Any) -> str | None:
    return None if hasattr(torch, "_grouped_mm") else "this torch has no grouped matrix product"


@register_kernel(
    "moe_dense",
    "grouped",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(9, 0),
    formats={"x": {"bf16"}, "weight": {"bf16"}},
    refuses=_refuse,
)
def moe_dense(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Pairs sorted by expert; a token's experts are summed in fp32, in the order of its choices."""
    num_tokens, top_k = ids.shape
    grouped_mm: Any = torch._grouped_mm
    pairs = ids.flatten().sort(stable=True)
    order = pairs.indices
    experts = torch.arange(gate_up.shape[0], device=x.device, dtype=ids.dtype)
    ends = torch.searchsorted(pairs.values, experts, right=True).to(torch.int32)
    rows = x[order // top_k]
    both = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
    parts = grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    unsorted = torch.empty_like(parts)
    unsorted[order] = parts
    by_choice = unsorted.view(num_tokens, top_k, -1).float() * weights[..., None]
    out = by_choice.sum(dim=1)
    if shared is not None:
        out = out + shared.float()
    return out.to(x.dtype)
