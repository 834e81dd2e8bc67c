# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of expert routing. Does not know: the kernels' insides, experts.

Grids follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.errors import KernelInputError
from kernels.moe_routing import MoeRouting
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.mla import use_pdl
from kernels.triton.moe_route import moe_norm_route_kernel, moe_topk_kernel

MAX_ARRIVALS = 4096  # engine.max_slots goes no higher
_arrivals: dict[torch.device, torch.Tensor] = {}


def _pdl(enabled: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if enabled else {}


def refuse_groups(call: CallSignature) -> str | None:
    """Scores of groups are a matrix, and a kernel's have powers of two for sides."""
    num = int(call.trait("num_experts"))
    if int(call.trait("num_groups")) > 1 and num & (num - 1):
        return f"groups are of {num} experts, it takes groups of a power of two"
    return None


@register_kernel(
    "moe_route", "triton", priority=Priority.PORTABLE, device="cuda", refuses=refuse_groups
)
def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: MoeRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program per token."""
    num_tokens = logits.shape[0]
    shape = (num_tokens, routing.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    pdl = use_pdl(logits.device)
    moe_topk_kernel[(num_tokens,)](
        logits,
        bias if bias is not None else weights,
        ids,
        weights,
        routing.scale,
        E=routing.num_experts,
        E_PAD=next_power_of_2(routing.num_experts),
        TOP_K=routing.top_k,
        NUM_SHARED=0,
        GROUPS=routing.num_groups,
        GROUPS_KEPT=routing.groups_kept,
        SIGMOID=routing.score == "sigmoid",
        HAS_BIAS=bias is not None,
        GROUP_TOP2=routing.group_score == "top2",
        RENORMALISE=routing.renormalise,
        TERMS=1,
        USE_PDL=pdl,
        num_warps=1,
        **_pdl(pdl),
    )
    return ids, weights


def arrivals(device: torch.device, num: int) -> torch.Tensor:
    """int32 counters that every kernel leaves at zero; kernels of one stream share them. Captured
    graphs hold their address, so they never move."""
    if num > MAX_ARRIVALS:
        raise KernelInputError("num_rows", num, f"at most {MAX_ARRIVALS}")
    if device not in _arrivals:
        _arrivals[device] = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)
    return _arrivals[device]


def _refuse_norm_route(call: CallSignature) -> str | None:
    if not call.trait("num_tokens_up_to_64"):
        return "it takes up to 64 tokens"
    if int(call.trait("hidden")) > 8192:
        return "it takes a hidden size of up to 8192"
    if int(call.trait("chosen")) > 16:
        return "it takes up to 16 experts a token, shared ones included"
    return refuse_groups(call)


@register_kernel(
    "moe_norm_route",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"x": {"bf16", "fp16", "fp32"}},
    refuses=_refuse_norm_route,
)
def norm_route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: MoeRouting,
    num_shared: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One launch: programs of a token and four experts; the last of a token chooses."""
    num_tokens, hidden = x.shape
    shape = (num_tokens, routing.top_k + num_shared)
    ids = torch.empty(shape, dtype=torch.int32, device=x.device)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    normed = torch.empty_like(x)
    logits = torch.empty(num_tokens, routing.num_experts, dtype=torch.float32, device=x.device)
    block = next_power_of_2(hidden)
    pdl = use_pdl(x.device)
    moe_norm_route_kernel[(num_tokens, cdiv(routing.num_experts, 4))](
        x,
        norm_weight,
        router,
        bias if bias is not None else weights,
        normed,
        logits,
        arrivals(x.device, num_tokens),
        ids,
        weights,
        eps,
        routing.scale,
        K=hidden,
        BLOCK=block,
        PER_PROGRAM=4,
        E=routing.num_experts,
        E_PAD=next_power_of_2(routing.num_experts),
        TOP_K=routing.top_k,
        NUM_SHARED=num_shared,
        GROUPS=routing.num_groups,
        GROUPS_KEPT=routing.groups_kept,
        SIGMOID=routing.score == "sigmoid",
        HAS_BIAS=bias is not None,
        GROUP_TOP2=routing.group_score == "top2",
        RENORMALISE=routing.renormalise,
        USE_PDL=pdl,
        num_warps=4 if block <= 2048 else 8 if block <= 4096 else 16,
        **_pdl(pdl),
    )
    return normed, ids, weights
