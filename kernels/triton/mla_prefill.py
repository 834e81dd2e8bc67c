# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of MLA prefill on a GPU. Does not know: the kernels' insides.

Latents of all rows are gathered, expanded into the keys and values of as many heads as the
workspace allows (two matrix products), and attended to. A step's plan is made once, on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from kernels._triton import HAS_GLUON_HOPPER
from kernels.latent_planes import latent_planes, row_bytes
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.sizes import next_power_of_2
from kernels.step_work import StepWork, keep
from kernels.triton.boxes import boxes_of
from kernels.triton.mla_prefill_kernels import (
    gather_latents_kernel,
    gather_planes_kernel,
    mla_prefill_kernel,
    mla_prefill_merge_kernel,
)
from kernels.triton.mla_prefill_plan import PrefillPlan, make_plan
from kernels.triton.mla_prefill_scratch import PrefillScratch, PrefillSizes

BLOCK_M = 128
HOPPER_TILE = 128
_LOG2_E = math.log2(math.e)

Attend = Callable[..., None]


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def gather(
    kv_pool_layer: torch.Tensor, page_table: torch.Tensor, plan: PrefillPlan, out: torch.Tensor
) -> None:
    """Write the latents of all rows [num_kv, latent_dim + rope_dim], zeros between rows."""
    page_size, width = kv_pool_layer.shape[1:]
    rows = min(16, page_size)
    gather_latents_kernel[(plan.pages.shape[0], page_size // rows)](
        kv_pool_layer,
        page_table,
        plan.pages,
        out,
        page_table.stride(0),
        kv_pool_layer.stride(0),
        WIDTH=width,
        WIDTH_PAD=next_power_of_2(width),
        PAGE=page_size,
        ROWS=rows,
        num_warps=4,
    )


def gather_planes(
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    latent_dim: int,
) -> None:
    """The same out of fp8 planes."""
    rope_dim = out.shape[1] - latent_dim
    planes = latent_planes(kv_pool_layer, latent_dim, rope_dim)
    rows = min(16, planes.page_size)
    gather_planes_kernel[(plan.pages.shape[0], planes.page_size // rows)](
        planes.values,
        planes.scales,
        planes.rope,
        page_table,
        plan.pages,
        out,
        page_table.stride(0),
        planes.values.stride(0),
        planes.scales.stride(0),
        planes.rope.stride(0),
        PAGE=planes.page_size,
        ROWS=rows,
        C=latent_dim,
        R=rope_dim,
        num_warps=4,
    )


def _scratch(
    q: torch.Tensor,
    sizes: PrefillSizes,
    page_size: int,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    work: StepWork | None,
) -> PrefillScratch:
    def make() -> PrefillScratch:
        plan = make_plan(
            tuple(row_slots.tolist()),
            tuple(row_indptr.tolist()),
            tuple(seq_lens.tolist()),
            num_heads=sizes.num_heads,
            page_size=page_size,
            block_m=sizes.block_m,
            tile=sizes.tile,
            num_processors=num_processors(q.device),
            device=q.device,
        )
        return PrefillScratch(plan, sizes, q)

    return keep(work, (PrefillScratch, sizes, page_size), make)


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
    work: StepWork | None,
    *,
    block_m: int,
    tile: int,
) -> torch.Tensor:
    num_heads, nope_dim, latent_dim = w_uk.shape
    sizes = PrefillSizes(
        num_heads=num_heads,
        nope_dim=nope_dim,
        v_dim=w_uv.shape[1],
        latent_dim=latent_dim,
        rope_dim=q.shape[2] - nope_dim,
        block_m=block_m,
        tile=tile,
    )
    has_planes = kv_pool_layer.dtype == torch.uint8
    page_size = kv_pool_layer.shape[1]
    if has_planes:
        page_size //= row_bytes(latent_dim, sizes.rope_dim)
    scratch = _scratch(q, sizes, page_size, row_slots, row_indptr, seq_lens, work)
    plan, latents = scratch.plan, scratch.latents
    if has_planes:
        gather_planes(kv_pool_layer, page_table, plan, latents, latent_dim)
    else:
        gather(kv_pool_layer, page_table, plan, latents)
    out = torch.empty(q.shape[0], num_heads, sizes.v_dim, dtype=q.dtype, device=q.device)
    for first in range(0, num_heads, scratch.group):
        count = min(scratch.group, num_heads - first)
        heads = slice(first, first + count)
        keys, values = scratch.expanded(count)
        torch.mm(latents[:, :latent_dim], w_uk[heads].flatten(0, 1).T, out=keys)
        torch.mm(latents[:, :latent_dim], w_uv[heads].flatten(0, 1).T, out=values)
        attend(q, scratch, out, first, count)
        if plan.num_merges:
            rows = min(16, block_m)
            mla_prefill_merge_kernel[(plan.num_merges * (block_m // rows), count)](
                scratch.partial_out,
                scratch.partial_lse,
                plan.merges,
                out,
                first,
                H=num_heads,
                V=sizes.v_dim,
                BLOCK_M=block_m,
                ROWS=rows,
                num_warps=4,
            )
    scratch.end_layer()
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
    work: StepWork | None = None,
    *,
    block_m: int = BLOCK_M,
    tile: int = 64,
) -> torch.Tensor:
    """Gather, expand, one Triton program per item and head, merge."""
    num_heads, nope_dim, latent_dim = w_uk.shape
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()

    def attend(
        q: torch.Tensor, scratch: PrefillScratch, out: torch.Tensor, first: int, count: int
    ) -> None:
        plan = scratch.plan
        keys, values = scratch.expanded(count)
        mla_prefill_kernel[(plan.num_items * count,)](
            q,
            keys,
            scratch.latents,
            values,
            plan.items,
            out,
            scratch.partial_out,
            scratch.partial_lse,
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
        work,
        block_m=block_m,
        tile=tile,
    )


@register_kernel(
    "mla_prefill_planes",
    "gluon_hopper",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"fp8_planes"}},
    refuses=_refuse_hopper,
)
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
    work: StepWork | None = None,
) -> torch.Tensor:
    """Gather, expand, the warp-specialised TMA + wgmma kernel, merge."""
    from kernels.triton.mla_prefill_hopper import mla_prefill_hopper_kernel

    num_heads, nope_dim, latent_dim = w_uk.shape
    v_dim, rope_dim = w_uv.shape[1], q.shape[2] - nope_dim
    flat = q.as_strided((q.shape[0], num_heads * q.shape[2]), (q.stride(0), 1))

    def attend(
        q: torch.Tensor, scratch: PrefillScratch, out: torch.Tensor, first: int, count: int
    ) -> None:
        plan = scratch.plan
        mla_prefill_hopper_kernel[(plan.num_items * count,)](
            boxes_of(flat, BLOCK_M // 2, nope_dim),
            boxes_of(flat, BLOCK_M // 2, rope_dim),
            *scratch.boxes(count),
            plan.items,
            out,
            scratch.partial_out,
            scratch.partial_lse,
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
        work,
        block_m=BLOCK_M,
        tile=HOPPER_TILE,
    )
