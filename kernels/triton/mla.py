# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of the MLA decode kernels. Does not know: the kernels' insides.

Everything a launch needs beside tensors (grid, constants) follows from shapes alone, so a launch
may be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import math

import torch

from kernels._triton import HAS_GLUON_HOPPER
from kernels.latent_planes import latent_planes
from kernels.mla_workspace import TILE_ROWS, MlaWorkspace
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.boxes import boxes
from kernels.triton.mla_decode import mla_decode_kernel
from kernels.triton.mla_plan import mla_merge_kernel, mla_plan_kernel, mla_shared_kernel

TILE = 64
# Fewer tiles that a group shares are read by each row.
LEAST_SHARED = 16
# So many tiles less to read pay for more partial results. H200, us a layer: 8 x 32K of which 4K are
# shared (384 tiles less) 78.4 -> 82.0, 8 x 8K of which 6K (576) 26.4 -> 21.6, 16 x 64K of which 4K
# (768) 280.2 -> 273.9.
LEAST_SPARED = 500
LOG2_E = math.log2(math.e)


@functools.cache
def use_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def refuse_shapes(call: CallSignature) -> str | None:
    if call.trait("page_size") != TILE:
        return f"page_size is {call.trait('page_size')}, it takes {TILE}"
    for name in ("latent_dim", "rope_dim"):
        size = int(call.trait(name))
        if size < 16 or size & (size - 1):
            return f"{name} is {size}, it takes a power of two from 16 on"
    return None


def refuse_hopper(call: CallSignature) -> str | None:
    if not HAS_GLUON_HOPPER:
        return "this triton has no Gluon"
    if torch.cuda.get_device_capability()[0] != 9:
        return "wgmma exists on compute capability 9.x only"
    if (call.trait("latent_dim"), call.trait("rope_dim")) != (512, 64):
        return "it takes latent_dim 512 and rope_dim 64"
    if not call.trait("page_stride_rows_exact", False):
        return "the page stride is not a whole number of rows"
    return refuse_shapes(call)


@register_kernel("mla_plan", "triton", priority=Priority.PORTABLE, device="cuda")
def plan(
    workspace: MlaWorkspace,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    """One tiny program, behind one a group where rows are grouped; see triton/mla_plan.py."""
    num_rows, shared = seq_lens.shape[0], workspace.shared
    num_groups = workspace.num_groups(num_rows)
    if shared is not None:
        mla_shared_kernel[(num_groups,)](
            seq_lens,
            page_table,
            row_slots,
            shared,
            num_rows,
            page_table.stride(0),
            TILE=TILE,
            GROUP=workspace.group,
            CHUNK=1024,
            LEAST=LEAST_SHARED,
            num_warps=4,
        )
    spans_pad = next_power_of_2(workspace.max_rows + workspace.num_groups(workspace.max_rows))
    mla_plan_kernel[(1,)](
        seq_lens,
        page_table,
        row_slots,
        workspace.plan if shared is None else shared,
        workspace.plan,
        num_rows,
        num_groups,
        page_table.stride(0),
        TILE=TILE,
        Q_LEN=workspace.q_len,
        GROUP=workspace.group,
        NUM_PARTS=workspace.num_parts,
        PARTS_PAD=next_power_of_2(workspace.num_parts),
        SPANS_PAD=spans_pad,
        CHUNK=min(32, spans_pad),
        LEAST=LEAST_SPARED,
        num_warps=8,
    )
    workspace.plan_is_fresh = True


def merge(out: torch.Tensor, workspace: MlaWorkspace, num_rows: int, pdl: bool) -> None:
    rows = workspace.q_len * workspace.num_heads
    # One program sees all parts of a row at once where they are as even as the plan makes them.
    block_p = next_power_of_2(cdiv(workspace.num_parts, num_rows))
    block_p = min(128, max(4, block_p))
    block_d = min(workspace.latent_dim, max(32, 4096 // block_p))
    grid = (num_rows, rows, workspace.latent_dim // block_d)
    mla_merge_kernel[grid](
        workspace.partial_out,
        workspace.partial_lse,
        out,
        workspace.plan,
        num_rows,
        workspace.num_groups(num_rows),
        ROWS=rows,
        ROWS_PAD=workspace.num_blocks * TILE_ROWS,
        D=workspace.latent_dim,
        GROUP=workspace.group,
        NUM_PARTS=workspace.num_parts,
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        USE_PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


@register_kernel(
    "mla_decode",
    "triton",
    priority=Priority.PORTABLE,
    device="cuda",
    formats={"q": {"bf16", "fp16", "fp32"}, "kv": {"bf16", "fp16", "fp32", "fp8_planes"}},
    refuses=refuse_shapes,
)
def decode_portable(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """Split-KV Triton kernel, then the merge."""
    out = attend_portable(
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, latent_dim, workspace
    )
    merge(out, workspace, row_slots.shape[0], use_pdl(q.device))
    return out


def attend_portable(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """As attend_hopper."""
    num_rows = row_slots.shape[0]
    kv = pool_views(kv_pool_layer, latent_dim, q.shape[-1] - latent_dim)
    is_fp8 = kv_pool_layer.dtype == torch.uint8
    rows = workspace.q_len * workspace.num_heads * workspace.group
    block_m = min(64, max(64 if is_fp8 else 16, next_power_of_2(rows)))
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    pdl = use_pdl(q.device)
    mla_decode_kernel[(cdiv(rows, block_m), workspace.num_parts)](
        q,
        *(view for view, _ in kv),
        page_table,
        row_slots,
        seq_lens,
        workspace.plan,
        out,
        workspace.partial_out,
        workspace.partial_lse,
        num_rows,
        workspace.num_groups(num_rows),
        page_table.stride(0),
        *(stride for _, stride in kv),
        softmax_scale * LOG2_E,
        H=workspace.num_heads,
        Q_LEN=workspace.q_len,
        D=latent_dim,
        R=q.shape[-1] - latent_dim,
        GROUP=workspace.group,
        NUM_PARTS=workspace.num_parts,
        ROWS_PAD=workspace.num_blocks * TILE_ROWS,
        BLOCK_M=block_m,
        TILE=TILE,
        STAGES=2,
        FP8=is_fp8,
        USE_PDL=pdl,
        num_warps=8 if block_m == 64 else 4,
    )
    return out


def pool_views(
    kv_pool_layer: torch.Tensor, latent_dim: int, rope_dim: int
) -> tuple[tuple[torch.Tensor, int], tuple[torch.Tensor, int], tuple[torch.Tensor, int]]:
    """(latents, stride of a page in its elements), the same of scales and of rope parts; thrice
    the pool itself where it has no planes."""
    if kv_pool_layer.dtype != torch.uint8:
        whole = (kv_pool_layer, kv_pool_layer.stride(0))
        return whole, whole, whole
    planes = latent_planes(kv_pool_layer, latent_dim, rope_dim)
    values, scales, rope = (
        (plane, plane.stride(0)) for plane in (planes.values, planes.scales, planes.rope)
    )
    return values, scales, rope


@register_kernel(
    "mla_decode",
    "gluon_hopper",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16"}},
    refuses=refuse_hopper,
)
def decode_hopper(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """Warp-specialised TMA + wgmma kernel, then the merge."""
    out = attend_hopper(
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, latent_dim, workspace
    )
    merge(out, workspace, row_slots.shape[0], True)
    return out


def attend_hopper(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """Partial results into the workspace; returned are the rows that one part held whole."""
    from kernels.triton.mla_decode_hopper import mla_decode_hopper_kernel

    width, num_rows = q.shape[-1], row_slots.shape[0]
    num_pages = kv_pool_layer.shape[0]
    page_rows = kv_pool_layer.stride(0) // width
    kv_rows = (num_pages - 1) * page_rows + TILE
    q_rows = q.shape[0] * q.shape[1]
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    # The kernel reads the plan before it waits for its predecessor, so not right behind the
    # plan's own kernel.
    pdl = workspace.may_start_early and not workspace.plan_is_fresh
    workspace.plan_is_fresh = False
    mla_decode_hopper_kernel[(workspace.num_blocks, workspace.num_parts)](
        boxes(q, q_rows, width, TILE, latent_dim // 2),
        boxes(q, q_rows, width, TILE, 64),
        boxes(kv_pool_layer, kv_rows, width, TILE, latent_dim // 2),
        boxes(kv_pool_layer, kv_rows, width, TILE, 64),
        page_table,
        row_slots,
        seq_lens,
        workspace.plan,
        out,
        workspace.partial_out,
        workspace.partial_lse,
        page_table.stride(0),
        page_rows,
        num_rows,
        workspace.num_groups(num_rows),
        softmax_scale * LOG2_E,
        H=workspace.num_heads,
        Q_LEN=workspace.q_len,
        D=latent_dim,
        GROUP=workspace.group,
        NUM_PARTS=workspace.num_parts,
        ROWS_PAD=workspace.num_blocks * TILE_ROWS,
        TILE=TILE,
        STAGES=2,
        USE_PDL=True,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
