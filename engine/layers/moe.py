# SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a layer: a dense SwiGLU, or routed experts beside shared ones.

Does not know: files, tensor names. Legend: T tokens, X hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.moe_routing import MoeRouting
from kernels.ops.linear import LinearWeight, linear_add, swiglu_linear
from kernels.ops.moe import moe_norm_route, moe_w4
from kernels.ops.moe_dense import moe_dense
from kernels.w4_layout import TiledW4


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnWeights:
    gate_up: LinearWeight  # [2F, X]: gate rows, then up rows
    down: LinearWeight  # [X, F]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseExperts:
    gate_up: torch.Tensor  # [E, 2I, X]: gate rows, then up rows
    down: torch.Tensor  # [E, X, I]


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Experts:
    """Routed experts; behind them, where the format is the same, the shared ones."""

    gate_up: TiledW4
    down: TiledW4


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    router: torch.Tensor  # fp32 [E, X]
    bias: torch.Tensor | None  # fp32 [E], corrects the choice
    routing: MoeRouting
    experts: DenseExperts | W4Experts
    shared: FfnWeights | None  # where they are not among `experts`
    num_shared_in_experts: int = 0


def feed_forward(
    residual_TX: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weights: FfnWeights | MoeWeights,
) -> torch.Tensor:
    """Return the residual stream [T, X] behind the feed-forward part.

    Args:
        norm: weight and eps of the RMSNorm in front.
    """
    if isinstance(weights, FfnWeights):
        h_TF = swiglu_linear(residual_TX, *norm, weights.gate_up)
        return linear_add(h_TF, weights.down, residual_TX)
    x_TX, ids, scales = moe_norm_route(
        residual_TX,
        *norm,
        weights.router,
        weights.bias,
        weights.routing,
        weights.num_shared_in_experts,
    )
    behind_TX = residual_TX
    if weights.shared is not None:
        h_TF = swiglu_linear(x_TX, None, 0.0, weights.shared.gate_up)
        behind_TX = linear_add(h_TF, weights.shared.down, residual_TX)
    experts = weights.experts
    if isinstance(experts, W4Experts):
        return moe_w4(x_TX, ids, scales, experts.gate_up, experts.down, behind_TX)
    return moe_dense(x_TX, ids, scales, experts.gate_up, experts.down, behind_TX)
