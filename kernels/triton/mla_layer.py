# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of what surrounds MLA decode in a layer. Does not know: the insides.

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from kernels.latent_planes import LatentPlanes
from kernels.mla_workspace import TILE_ROWS, MlaWorkspace
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.sizes import cdiv, next_power_of_2
from kernels.step_work import StepWork, keep
from kernels.triton.linear import RowWeight, linear_add, linear_of_parts, refuse_rows
from kernels.triton.mla import attend_hopper, pool_views, refuse_hopper, use_pdl
from kernels.triton.mla_decode_parts import (
    mla_absorb_kernel,
    mla_expand_pages_kernel,
    mla_merge_values_kernel,
)
from kernels.triton.mla_fp8 import attend_fp8, refuse_fp8

# Slices of the latent whose values the output projection sums: each costs it another read.
VALUE_PARTS = 4
_OUT = {"fp32", "bf16", "fp16"}


def _is_power_of_two(size: int) -> bool:
    return size > 0 and not size & (size - 1)


def _refuse_absorb(call: CallSignature) -> str | None:
    if not call.trait("num_tokens_up_to_64"):
        return "it takes up to 64 tokens"
    for name in ("nope_dim", "latent_dim", "rope_dim"):
        size = int(call.trait(name))
        if not _is_power_of_two(size) or size < 16:
            return f"{name} is {size}, it takes a power of two from 16 on"
    return None


@register_kernel(
    "mla_absorb",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"q": {"bf16", "fp16"}, "kv": {"bf16", "fp16", "fp8_planes"}},
    refuses=_refuse_absorb,
)
def mla_absorb(
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
    """One launch: programs of a head's slice, and of four tokens' latents."""
    num_heads, nope_dim, latent_dim = w_uk.shape
    num_tokens, rope_dim = q.shape[0], cos_sin.shape[1]
    if out is None:
        out = q.new_empty(num_tokens, num_heads, latent_dim + rope_dim)
    views = pool_views(kv_pool_layer, latent_dim, rope_dim)
    (latents, latent_stride), (scales, scale_stride), (ropes, rope_stride) = views
    cols = max(16, latent_dim // 4)
    chunks = latent_dim // cols
    pdl = use_pdl(q.device)
    mla_absorb_kernel[(num_heads + cdiv(num_tokens, chunks), chunks)](
        q,
        kv,
        norm_weight,
        positions,
        cos_sin,
        latents,
        ropes,
        scales,
        slot_mapping,
        w_uk,
        out,
        slot_mapping if places is None else places,
        num_tokens,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        latent_stride,
        rope_stride,
        scale_stride,
        eps,
        H=num_heads,
        NOPE=nope_dim,
        C=latent_dim,
        R=rope_dim,
        PAGE=ropes.shape[1],
        TOKENS=16,
        COLS=cols,
        FP8=kv_pool_layer.dtype == torch.uint8,
        PLACED=places is not None,
        USE_PDL=pdl,
        num_warps=4,
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def merge_values(
    attended: torch.Tensor,
    workspace: MlaWorkspace,
    num_rows: int,
    w_uv: torch.Tensor,
    groups: int,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Partial results of the workspace -> values [T, H * V]; or fp32 [groups, T, H * V], to be
    summed, which fills the GPU where there is one token. `places` int32 [T]: see `mla_output`."""
    num_tokens, num_heads, latent_dim = attended.shape
    if places is not None:
        num_tokens = places.shape[0]
    v_dim = w_uv.shape[1]
    out = torch.empty(
        groups,
        num_tokens,
        num_heads * v_dim,
        dtype=torch.float32 if groups > 1 else attended.dtype,
        device=attended.device,
    )
    pdl = use_pdl(attended.device)
    # All parts of a row at once where registers have room: another round waits for memory again.
    most = 128 if groups > 1 else 32
    # Of folded rows most are padding: they have one tile.
    real_rows = num_rows if places is None else cdiv(num_tokens, workspace.q_len)
    block_p = next_power_of_2(cdiv(workspace.num_parts, real_rows) + 1)
    mla_merge_values_kernel[(num_tokens, num_heads, groups)](
        attended,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.plan,
        w_uv,
        out,
        workspace.plan if places is None else places,
        num_rows,
        workspace.num_groups(num_rows),
        num_tokens,
        H=num_heads,
        Q_LEN=workspace.q_len,
        ROWS_PAD=workspace.num_blocks * TILE_ROWS,
        D=latent_dim,
        V=v_dim,
        GROUP=workspace.group,
        NUM_PARTS=workspace.num_parts,
        BLOCK_P=min(most, max(4, block_p)),
        BLOCK_D=latent_dim // groups,
        PLACED=places is not None,
        USE_PDL=pdl,
        num_warps=16,
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out if groups > 1 else out[0]


def _refuse_values(call: CallSignature) -> str | None:
    if not _is_power_of_two(int(call.trait("v_dim"))):
        return f"v_dim is {call.trait('v_dim')}, it takes a power of two"
    takes_planes = call.format("kv") == "fp8_planes"
    return refuse_fp8(call) if takes_planes else refuse_hopper(call)


def _refuse_output(call: CallSignature) -> str | None:
    return refuse_rows(call) or _refuse_values(call)


@register_kernel(
    "mla_values",
    "two_launches",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16", "fp8_planes"}},
    refuses=_refuse_values,
)
def mla_values(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    w_uv: torch.Tensor,
) -> torch.Tensor:
    """Attention; merge and up-projection: two launches."""
    attend = attend_fp8 if kv_pool_layer.dtype == torch.uint8 else attend_hopper
    attended = attend(
        q,
        kv_pool_layer,
        page_table,
        row_slots,
        seq_lens,
        softmax_scale,
        workspace.latent_dim,
        workspace,
    )
    return merge_values(attended, workspace, row_slots.shape[0], w_uv, 1)


@register_kernel(
    "mla_output",
    "three_launches",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={
        "q": {"bf16"},
        "kv": {"bf16", "fp8_planes"},
        "weight": {"bf16", "nvfp4", "mxfp4", "mxint4", "fp8_block"},
    },
    refuses=_refuse_output,
)
def mla_output(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    w_uv: torch.Tensor,
    out_weight: RowWeight,
    residual: torch.Tensor,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention; merge and up-projection; output projection and residual: three launches."""
    attend = attend_fp8 if kv_pool_layer.dtype == torch.uint8 else attend_hopper
    attended = attend(
        q,
        kv_pool_layer,
        page_table,
        row_slots,
        seq_lens,
        softmax_scale,
        workspace.latent_dim,
        workspace,
    )
    groups = VALUE_PARTS if residual.shape[0] == 1 else 1
    values = merge_values(attended, workspace, row_slots.shape[0], w_uv, groups, places)
    if values.dim() == 2:
        return linear_add(values, out_weight, residual)
    return linear_of_parts(values, out_weight, residual)


@register_kernel(
    "mla_expand_pages", "triton", priority=Priority.PORTABLE, device="cuda", formats={"out": _OUT}
)
def mla_expand_pages(
    planes: LatentPlanes,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    pages_of_rows: list[int],
    dtype: torch.dtype,
    work: StepWork | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch a row: a program decodes a page."""
    page_size, latent_dim = planes.values.shape[1:]
    width = latent_dim + planes.rope.shape[2]
    device = page_table.device

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(sum(pages_of_rows), page_size, width, dtype=dtype, device=device)
        ends = torch.tensor(pages_of_rows, dtype=torch.int32).cumsum(0)
        starts = (ends - torch.tensor(pages_of_rows)).to(torch.int32)
        # A launch differs by whether 16 divides a stride.
        table = starts[:, None] + torch.arange(16 * cdiv(max(pages_of_rows), 16), dtype=torch.int32)
        return out, table.to(device, non_blocking=True)

    out, table = keep(work, ("expanded pages", dtype, width), make)
    at = 0
    for slot, num in zip(row_slots.tolist(), pages_of_rows, strict=True):
        if num:
            mla_expand_pages_kernel[(num,)](
                page_table[slot],
                planes.values,
                planes.scales,
                planes.rope,
                out[at:],
                planes.values.stride(0),
                planes.scales.stride(0),
                planes.rope.stride(0),
                PAGE=page_size,
                C=latent_dim,
                R=width - latent_dim,
                num_warps=8,
            )
        at += num
    return out, table
