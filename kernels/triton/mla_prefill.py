# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of MLA prefill on a GPU. Does not know: the kernels' insides.

Latents of all rows are gathered, expanded into the keys and values of as many heads as the
workspace allows (two matrix products), and attended to. A step's plan is made once, on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from kernels._triton import HAS_GLUON_HOPPER, TensorDescriptor, gl, triton
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.triton.mla_prefill_kernels import (
    gather_latents_kernel,
    mla_prefill_kernel,
    mla_prefill_merge_kernel,
)
from kernels.triton.mla_prefill_plan import PrefillPlan, make_plan

# Expanded keys and values of one group of heads stay below this.
EXPANDED_BYTES = 2 << 30
BLOCK_M = 128
HOPPER_TILE = 128
_LOG2_E = math.log2(math.e)

Attend = Callable[..., None]


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _gather(
    kv_pool_layer: torch.Tensor, page_table: torch.Tensor, plan: PrefillPlan
) -> torch.Tensor:
    """The latents of all rows [num_kv, latent_dim + rope_dim], zeros between rows."""
    page_size, width = kv_pool_layer.shape[1:]
    out = kv_pool_layer.new_empty(plan.num_kv, width)
    rows = min(16, page_size)
    gather_latents_kernel[(plan.pages.shape[0], page_size // rows)](
        kv_pool_layer,
        page_table,
        plan.pages,
        out,
        page_table.stride(0),
        kv_pool_layer.stride(0),
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        PAGE=page_size,
        ROWS=rows,
        num_warps=4,
    )
    return out


def _run(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    attend: Attend,
    *,
    block_m: int,
    tile: int,
) -> torch.Tensor:
    num_heads, nope_dim, latent_dim = w_uk.shape
    v_dim = w_uv.shape[1]
    plan = make_plan(
        tuple(row_slots.tolist()),
        tuple(row_indptr.tolist()),
        tuple(seq_lens.tolist()),
        num_heads=num_heads,
        page_size=kv_pool_layer.shape[1],
        block_m=block_m,
        tile=tile,
        num_processors=num_processors(q.device),
        device=q.device,
    )
    latents = _gather(kv_pool_layer, page_table, plan)
    out = q.new_empty(q.shape[0], num_heads, v_dim)
    slots = max(1, plan.num_partials)
    partial_out = q.new_empty(slots, num_heads, block_m, v_dim, dtype=torch.float32)
    partial_lse = q.new_empty(slots, num_heads, block_m, dtype=torch.float32)
    per_head = plan.num_kv * (nope_dim + v_dim) * q.element_size()
    group = min(num_heads, max(1, EXPANDED_BYTES // per_head))
    for first in range(0, num_heads, group):
        count = min(group, num_heads - first)
        heads = slice(first, first + count)
        keys = latents[:, :latent_dim] @ w_uk[heads].flatten(0, 1).T
        values = latents[:, :latent_dim] @ w_uv[heads].flatten(0, 1).T
        attend(q, keys, latents, values, plan, out, partial_out, partial_lse, first, count)
        if plan.num_merges:
            rows = min(16, block_m)
            mla_prefill_merge_kernel[(plan.num_merges * (block_m // rows), count)](
                partial_out,
                partial_lse,
                plan.merges,
                out,
                first,
                H=num_heads,
                V=v_dim,
                BLOCK_M=block_m,
                ROWS=rows,
                num_warps=4,
            )
    return out


def _refuse_shapes(call: CallSignature) -> str | None:
    rope_dim = int(call.trait("rope_dim"))
    sizes = (int(call.trait("head_dim")) - rope_dim, rope_dim, int(call.trait("v_dim")))
    if any(size < 16 or size & (size - 1) for size in sizes):
        return f"nope, rope and value sizes are {sizes}, it takes powers of two from 16 on"
    if 64 % int(call.trait("page_size")):
        return f"page_size is {call.trait('page_size')}, it takes powers of two up to 64"
    if not call.trait("page_is_dense", False):
        return "tokens of a page do not lie one behind the other"
    return None


def _refuse_portable(call: CallSignature) -> str | None:
    # 128 queries and three stages of 64 tokens of 192 / 128 take 168 KB of shared memory.
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "shared memory suffices on compute capability 9.x and 10.x only"
    sizes = (call.trait("head_dim"), call.trait("v_dim"))
    if int(sizes[0]) > 192 or int(sizes[1]) > 128:
        return f"head and value sizes are {sizes}, it takes up to (192, 128)"
    return _refuse_shapes(call)


def _refuse_hopper(call: CallSignature) -> str | None:
    if not HAS_GLUON_HOPPER:
        return "this triton has no Gluon"
    if torch.cuda.get_device_capability()[0] != 9:
        return "wgmma exists on compute capability 9.x only"
    dims = tuple(int(call.trait(name)) for name in ("head_dim", "v_dim", "rope_dim"))
    if dims != (192, 128, 64):
        return f"head, value and rope sizes are {dims}, it takes (192, 128, 64)"
    if not call.trait("q_is_dense", False):
        return "heads of a query do not lie one behind the other, or rows are not 16-byte aligned"
    return _refuse_shapes(call)


@register_kernel(
    "mla_prefill",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16"}},
    refuses=_refuse_portable,
)
def prefill_portable(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    *,
    block_m: int = BLOCK_M,
    tile: int = 64,
) -> torch.Tensor:
    """Gather, expand, one Triton program per item and head, merge."""
    num_heads, nope_dim, latent_dim = w_uk.shape
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()

    def attend(
        q: torch.Tensor,
        keys: torch.Tensor,
        latents: torch.Tensor,
        values: torch.Tensor,
        plan: PrefillPlan,
        out: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        first: int,
        count: int,
    ) -> None:
        mla_prefill_kernel[(plan.num_items * count,)](
            q,
            keys,
            latents,
            values,
            plan.items,
            out,
            partial_out,
            partial_lse,
            plan.num_items,
            first,
            q.stride(0),
            count,
            softmax_scale * _LOG2_E,
            H=num_heads,
            N=nope_dim,
            R=q.shape[2] - nope_dim,
            V=w_uv.shape[1],
            C=latent_dim,
            BLOCK_M=block_m,
            TILE=tile,
            STAGES=3,
            num_warps=8,
        )

    return _run(
        q,
        w_uk,
        w_uv,
        kv_pool_layer,
        page_table,
        row_slots,
        row_indptr,
        seq_lens,
        attend,
        block_m=block_m,
        tile=tile,
    )


@functools.cache
def _shared_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of a bf16 matrix for boxes of [rows, columns]."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], _shared_layout())


@register_kernel(
    "mla_prefill",
    "gluon_hopper",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16"}},
    refuses=_refuse_hopper,
)
def prefill_hopper(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Gather, expand, the warp-specialised TMA + wgmma kernel, merge."""
    from kernels.triton.mla_prefill_hopper import mla_prefill_hopper_kernel

    num_heads, nope_dim, latent_dim = w_uk.shape
    v_dim, rope_dim = w_uv.shape[1], q.shape[2] - nope_dim
    flat = q.as_strided((q.shape[0], num_heads * q.shape[2]), (q.stride(0), 1))

    def attend(
        q: torch.Tensor,
        keys: torch.Tensor,
        latents: torch.Tensor,
        values: torch.Tensor,
        plan: PrefillPlan,
        out: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        first: int,
        count: int,
    ) -> None:
        mla_prefill_hopper_kernel[(plan.num_items * count,)](
            descriptor(flat, BLOCK_M // 2, nope_dim),
            descriptor(flat, BLOCK_M // 2, rope_dim),
            descriptor(keys, HOPPER_TILE, nope_dim),
            descriptor(latents, HOPPER_TILE, rope_dim),
            descriptor(values, HOPPER_TILE, v_dim),
            plan.items,
            out,
            partial_out,
            partial_lse,
            plan.num_items,
            first,
            softmax_scale * _LOG2_E,
            H=num_heads,
            N=nope_dim,
            R=rope_dim,
            V=v_dim,
            C=latent_dim,
            TILE=HOPPER_TILE,
            STAGES=2,
            num_warps=4,
        )

    return _run(
        q,
        w_uk,
        w_uv,
        kv_pool_layer,
        page_table,
        row_slots,
        row_indptr,
        seq_lens,
        attend,
        block_m=BLOCK_M,
        tile=HOPPER_TILE,
    )
