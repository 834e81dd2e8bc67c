# SPDX-License-Identifier: Apache-2.0
"""Public ops: expert routing and the mixture of experts with 4-bit weights.

Does not know: implementations.
"""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.moe_routing import MoeRouting
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of
from kernels.w4_layout import TiledW4

# From so many tokens an expert (in the mean) on, expanding a weight once for all of an expert's
# tokens is worth sorting and gathering them: a shape class of its own.
MANY_TOKENS = 24


def _routing_traits(routing: MoeRouting) -> tuple[tuple[str, int], ...]:
    return (("num_experts", routing.num_experts), ("num_groups", routing.num_groups))


def moe_route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: MoeRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts int32 [T, top_k], weights fp32 [T, top_k]), best first.

    Args:
        logits: [T, num_experts] fp32 or bf16, contiguous.
        bias: fp32 [num_experts] added to the scores for the choice alone, or None.
        routing: the model's rule.

    Raises:
        KernelInputError: if shapes disagree.
    """
    expect_shape("logits", logits, (None, routing.num_experts))
    if bias is not None:
        expect_shape("bias", bias, (routing.num_experts,))
        expect_dtype("bias", bias, torch.float32)
    formats = (("logits", format_of(logits.dtype)),)
    traits = _routing_traits(routing)
    kernel = select_kernel(CallSignature("moe_route", logits.device.type, formats, traits))
    ids, weights = kernel.fn(logits, bias, routing)
    return ids, weights


def moe_norm_route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: MoeRouting,
    num_shared: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x) [T, hidden] in x.dtype, experts int32 [T, top_k + num_shared], weights
    fp32 of the same shape): `moe_route` of the normed rows' scores, then each shared expert, as
    experts `num_experts` on with weight 1.

    Args:
        x: [T, hidden], contiguous.
        norm_weight: [hidden].
        router: fp32 [num_experts, hidden].
        bias: fp32 [num_experts] added to the scores for the choice alone, or None.
        routing: the model's rule.
        num_shared: experts that every token takes.

    Raises:
        KernelInputError: if shapes disagree.
    """
    expect_shape("x", x, (None, router.shape[1]))
    expect_shape("norm_weight", norm_weight, (router.shape[1],))
    expect_shape("router", router, (routing.num_experts, None))
    expect_dtype("router", router, torch.float32)
    if bias is not None:
        expect_shape("bias", bias, (routing.num_experts,))
        expect_dtype("bias", bias, torch.float32)
    formats = (("x", format_of(x.dtype)), ("norm_weight", format_of(norm_weight.dtype)))
    traits = (
        ("num_tokens_up_to_64", x.shape[0] <= 64),
        ("hidden", x.shape[1]),
        *_routing_traits(routing),
        ("chosen", routing.top_k + num_shared),
    )
    kernel = select_kernel(CallSignature("moe_norm_route", x.device.type, formats, traits))
    normed, ids, weights = kernel.fn(x, norm_weight, eps, router, bias, routing, num_shared)
    return normed, ids, weights


def moe_w4_signature(
    x: torch.Tensor, ids: torch.Tensor, gate_up: TiledW4, down: TiledW4
) -> CallSignature:
    """How a call of `moe_w4` looks to the selector."""
    formats = (("x", format_of(x.dtype)), ("weight", gate_up.format))
    traits = (
        ("num_experts", gate_up.num_experts),
        ("top_k", ids.shape[1]),
        ("hidden", x.shape[1]),
        ("intermediate", down.num_cols),
        ("many_tokens", ids.numel() >= MANY_TOKENS * gate_up.num_experts),
    )
    return CallSignature("moe_w4", x.device.type, formats, traits)


def moe_w4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: TiledW4,
    down: TiledW4,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T, hidden] in x.dtype: sum over a token's experts of
    weight * down(silu(gate(x)) * up(x)), plus `shared`.

    Args:
        x: [T, hidden], contiguous.
        ids: int32 [T, top_k], experts of each token.
        weights: fp32 [T, top_k].
        gate_up: [E, 2 * intermediate, hidden], interleaved (`tile_w4_gate_up`).
        down: [E, hidden, intermediate] (`tile_w4`).
        shared: [T, hidden], added in fp32 before rounding, or None.

    Raises:
        KernelInputError: if shapes or formats disagree.
    """
    num_tokens, hidden = x.shape
    expect_shape("ids", ids, (num_tokens, None))
    expect_shape("weights", weights, tuple(ids.shape))
    expect_dtype("ids", ids, torch.int32)
    expect_dtype("weights", weights, torch.float32)
    if gate_up.num_cols != hidden:
        raise KernelInputError("gate_up.num_cols", gate_up.num_cols, f"hidden size {hidden}")
    if (down.num_rows, down.num_cols * 2) != (hidden, gate_up.num_rows):
        got = (down.num_rows, down.num_cols)
        raise KernelInputError("down", got, f"({hidden}, {gate_up.num_rows // 2})")
    if (down.format, down.num_experts) != (gate_up.format, gate_up.num_experts):
        raise KernelInputError(
            "down", (down.format, down.num_experts), f"({gate_up.format}, {gate_up.num_experts})"
        )
    if shared is not None:
        expect_shape("shared", shared, (num_tokens, hidden))
    kernel = select_kernel(moe_w4_signature(x, ids, gate_up, down))
    out: torch.Tensor = kernel.fn(x, ids, weights, gate_up, down, shared)
    return out
