# SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a layer: a dense SwiGLU, or routed experts beside shared ones.

Does not know: files, tensor names. Legend: T tokens, X hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.moe_routing import MoeRouting
from kernels.ops.activation import silu_and_mul
from kernels.ops.linear import linear
from kernels.ops.moe import moe_route, moe_w4
from kernels.ops.moe_dense import moe_dense
from kernels.packed_weight import Weight
from kernels.w4_layout import TiledW4


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnWeights:
    gate_up: Weight  # [2F, X]: gate rows, then up rows
    down: Weight  # [X, F]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseExperts:
    gate_up: torch.Tensor  # [E, 2I, X]: gate rows, then up rows
    down: torch.Tensor  # [E, X, I]


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Experts:
    gate_up: TiledW4
    down: TiledW4


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    router: torch.Tensor  # fp32 [E, X]
    bias: torch.Tensor | None  # fp32 [E], corrects the choice
    routing: MoeRouting
    experts: DenseExperts | W4Experts
    shared: FfnWeights | None


def feed_forward(x_TX: torch.Tensor, weights: FfnWeights | MoeWeights) -> torch.Tensor:
    """The layer's feed-forward output [T, X] in x's dtype."""
    if isinstance(weights, FfnWeights):
        return linear(silu_and_mul(linear(x_TX, weights.gate_up)), weights.down)
    shared = None if weights.shared is None else feed_forward(x_TX, weights.shared)
    # fp32: the choice of experts hangs on small differences.
    logits_TE = torch.nn.functional.linear(x_TX.float(), weights.router)
    ids, scales = moe_route(logits_TE, weights.bias, weights.routing)
    experts = weights.experts
    if isinstance(experts, W4Experts):
        return moe_w4(x_TX, ids, scales, experts.gate_up, experts.down, shared)
    return moe_dense(x_TX, ids, scales, experts.gate_up, experts.down, shared)
