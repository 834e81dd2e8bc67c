# SPDX-License-Identifier: Apache-2.0
"""The fused ops of a decoder layer, composed of the plain ones: what runs where no kernel fuses.

Does not know: which kernels the plain ops choose.
"""

from __future__ import annotations

import torch

from kernels.mla_workspace import MlaWorkspace
from kernels.moe_routing import MoeRouting
from kernels.ops.activation import silu_and_mul
from kernels.ops.linear import LinearWeight, linear, linear_add
from kernels.ops.mla import mla_decode
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.moe import moe_route
from kernels.ops.norm import rms_norm
from kernels.registry import Priority, register_kernel


@register_kernel("norm_linear", "composed", priority=Priority.PORTABLE)
def norm_linear_of_two(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Norm, then product."""
    return linear(rms_norm(x.contiguous(), norm_weight, eps), weight).to(out_dtype)


@register_kernel("linear_add", "composed", priority=Priority.PORTABLE)
def linear_add_of_two(
    x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor
) -> torch.Tensor:
    """Product, then sum."""
    return linear(x, weight).add_(residual)


@register_kernel("swiglu_linear", "composed", priority=Priority.PORTABLE)
def swiglu_linear_of_three(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, gate_up: LinearWeight
) -> torch.Tensor:
    """Norm, product, activation."""
    y = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    return silu_and_mul(linear(y, gate_up))


@register_kernel("moe_norm_route", "composed", priority=Priority.PORTABLE)
def moe_norm_route_of_three(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: MoeRouting,
    num_shared: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, scores in fp32 (the choice of experts hangs on small differences), choice."""
    normed = rms_norm(x, norm_weight, eps)
    logits = torch.nn.functional.linear(normed.float(), router)
    ids, weights = moe_route(logits, bias, routing)
    if num_shared:
        shape = (x.shape[0], num_shared)
        shared = torch.arange(num_shared, dtype=torch.int32, device=x.device) + routing.num_experts
        ids = torch.cat((ids, shared.expand(shape)), dim=1)
        weights = torch.cat((weights, weights.new_ones(shape)), dim=1)
    return normed, ids, weights


@register_kernel("mla_absorb", "composed", priority=Priority.PORTABLE)
def mla_absorb_of_two(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    w_uk: torch.Tensor,
    out: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rope and store, then the product a head."""
    num_heads, nope_dim, latent_dim = w_uk.shape
    rope_dim = q.shape[-1] - nope_dim
    mla_kv_write(
        q[..., nope_dim:], kv, norm_weight, eps, positions, cos_sin, kv_pool_layer, slot_mapping
    )
    absorbed = out
    if absorbed is None or places is not None:
        absorbed = q.new_empty(q.shape[0], num_heads, latent_dim + rope_dim)
    q_HTN = q[..., :nope_dim].transpose(0, 1)
    torch.bmm(q_HTN, w_uk, out=absorbed[..., :latent_dim].transpose(0, 1))
    absorbed[..., latent_dim:] = q[..., nope_dim:]
    if out is None or places is None:
        return absorbed
    out[places.long()] = absorbed
    return out


@register_kernel("mla_values", "composed", priority=Priority.PORTABLE)
def mla_values_of_two(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    w_uv: torch.Tensor,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over latents, the values' up-projection a head."""
    o_THC = mla_decode(q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, workspace)
    if places is not None:
        o_THC = o_THC[places.long()]
    o_THV = q.new_empty(o_THC.shape[0], w_uv.shape[0], w_uv.shape[1])
    torch.bmm(o_THC.transpose(0, 1), w_uv.transpose(1, 2), out=o_THV.transpose(0, 1))
    return o_THV.view(o_THV.shape[0], -1)


@register_kernel("mla_output", "composed", priority=Priority.PORTABLE)
def mla_output_of_three(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    w_uv: torch.Tensor,
    out_weight: LinearWeight,
    residual: torch.Tensor,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention and the values' up-projection, the layer's output projection."""
    values = mla_values_of_two(
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, workspace, w_uv, places
    )
    return linear_add(values, out_weight, residual)
