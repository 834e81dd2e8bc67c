# SPDX-License-Identifier: Apache-2.0
"""A decoder layer whose every sum runs in one order: what `engine.deterministic` runs on a GPU.

Registers a kernel "fixed" for each family whose usual ones choose tiles, splits or parts by what
else is in a step (see docs/gpu-kernels.md), in the band that only an override chooses;
`kernels.fixed_order` sets those. Prompts and decoded tokens take the same way through attention, so
a token has the same bits however it came. Does not know: models, configurations.
"""

from __future__ import annotations

import torch

from kernels._triton import INTERPRETED
from kernels.mla_workspace import MlaWorkspace
from kernels.moe_routing import MoeRouting
from kernels.ops.linear import LinearWeight, linear, linear_add
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.moe import moe_route
from kernels.ops.norm import rms_norm
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.step_work import StepWork
from kernels.triton.fixed_attention import fixed_attention
from kernels.triton.fixed_linear import BLOCK_M, fixed_experts, fixed_product

FLOATS = {"fp32", "bf16"}
DEVICE = "any" if INTERPRETED else "cuda"


@register_kernel(
    "linear",
    "fixed",
    priority=Priority.TRIAL,
    device=DEVICE,
    formats={"x": FLOATS, "weight": FLOATS},
)
def fixed_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One launch."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    fixed_product(x[None], weight[None].to(x.dtype), out[None])
    return out


@register_kernel("moe_norm_route", "fixed", priority=Priority.TRIAL, device=DEVICE)
def fixed_norm_route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: MoeRouting,
    num_shared: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, scores in fp32, choice; shared experts behind it."""
    normed = rms_norm(x.contiguous(), norm_weight, eps)
    ids, weights = moe_route(linear(normed.float(), router), bias, routing)
    if num_shared:
        shape = (x.shape[0], num_shared)
        shared = torch.arange(num_shared, dtype=torch.int32, device=x.device) + routing.num_experts
        ids = torch.cat((ids, shared.expand(shape)), dim=1)
        weights = torch.cat((weights, weights.new_ones(shape)), dim=1)
    return normed, ids, weights


@register_kernel(
    "moe_dense",
    "fixed",
    priority=Priority.TRIAL,
    device=DEVICE,
    formats={"x": FLOATS, "weight": FLOATS},
)
def fixed_moe_dense(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Pairs sorted by expert, tiles of one expert each; a token's experts are added in the order of
    its choices."""
    num_tokens, top_k = ids.shape
    order = ids.flatten().sort(stable=True).indices
    experts = torch.arange(gate_up.shape[0], device=x.device, dtype=ids.dtype)
    counts = (ids.flatten()[:, None] == experts).sum(dim=0)
    pair_ends = counts.cumsum(dim=0).to(torch.int32)
    tile_ends = ((counts + BLOCK_M - 1) // BLOCK_M).cumsum(dim=0).to(torch.int32)
    both = fixed_experts(x[order // top_k], gate_up, pair_ends, tile_ends)
    gate, up = both.chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
    parts = torch.empty_like(x[:1]).expand(num_tokens * top_k, -1).clone()
    parts[order] = fixed_experts(hidden, down, pair_ends, tile_ends)
    by_choice = parts.view(num_tokens, top_k, -1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(top_k):
        out += by_choice[:, choice].float() * weights[:, choice, None]
    if shared is not None:
        out += shared.float()
    return out.to(x.dtype)


def _refuse_places(call: CallSignature) -> str | None:
    one_each = not call.trait("has_places", False) and call.trait("q_len", 1) == 1
    return None if one_each else "it takes one token a row"


@register_kernel(
    "mla_absorb",
    "fixed",
    priority=Priority.TRIAL,
    device=DEVICE,
    formats={"q": FLOATS, "kv": FLOATS},
    refuses=_refuse_places,
)
def fixed_absorb(
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
) -> torch.Tensor:
    """Rope and store, then the product a head."""
    rope = q[..., w_uk.shape[1] :]
    mla_kv_write(rope, kv, norm_weight, eps, positions, cos_sin, kv_pool_layer, slot_mapping)
    return _absorbed(q, w_uk, out)


@register_kernel(
    "mla_output",
    "fixed",
    priority=Priority.TRIAL,
    device=DEVICE,
    formats={"q": FLOATS, "kv": FLOATS},
    refuses=_refuse_places,
)
def fixed_output(
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
) -> torch.Tensor:
    """Attention of one token a row, values a head, output projection."""
    most_tokens = page_table.shape[1] * kv_pool_layer.shape[1]
    o_THC = fixed_attention(
        q,
        kv_pool_layer,
        page_table,
        row_slots,
        seq_lens,
        most_tokens,
        softmax_scale,
        workspace.latent_dim,
    )
    o_THV = _values(o_THC, w_uv)
    return linear_add(o_THV.view(o_THV.shape[0], -1), out_weight, residual)


@register_kernel(
    "mla_prefill",
    "fixed",
    priority=Priority.TRIAL,
    device=DEVICE,
    formats={"q": FLOATS, "kv": FLOATS},
)
def fixed_prefill(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    work: StepWork | None = None,
) -> torch.Tensor:
    """Absorbed, each token by itself: as it would be decoded."""
    lens = row_indptr.diff()
    ends, starts = seq_lens.repeat_interleave(lens), row_indptr[1:].repeat_interleave(lens)
    token_lens = ends - starts + 1 + torch.arange(len(ends), dtype=torch.int32, device=ends.device)
    most_tokens = int(seq_lens.max())
    device = q.device
    o_THC = fixed_attention(
        _absorbed(q, w_uk),
        kv_pool_layer,
        page_table,
        row_slots.repeat_interleave(lens).to(device),
        token_lens.to(device=device, dtype=torch.int32),
        most_tokens,
        softmax_scale,
        w_uk.shape[2],
    )
    return _values(o_THC, w_uv)


def _absorbed(
    q_THD: torch.Tensor, w_uk: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, H, C + R]: nope parts times W_UK, rope parts as they are."""
    num_heads, nope_dim, latent_dim = w_uk.shape
    width = latent_dim + q_THD.shape[2] - nope_dim
    absorbed = q_THD.new_empty(q_THD.shape[0], num_heads, width) if out is None else out
    fixed_product(
        q_THD[..., :nope_dim].transpose(0, 1),
        w_uk.transpose(1, 2),
        absorbed[..., :latent_dim].transpose(0, 1),
    )
    absorbed[..., latent_dim:] = q_THD[..., nope_dim:]
    return absorbed


def _values(o_THC: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """[T, H, V]: latents times W_UV."""
    out = torch.empty(*o_THC.shape[:2], w_uv.shape[1], dtype=o_THC.dtype, device=o_THC.device)
    fixed_product(o_THC.transpose(0, 1), w_uv, out.transpose(0, 1))
    return out
