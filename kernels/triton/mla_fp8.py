# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of MLA decode over fp8 planes on Hopper. Does not know: the insides.

Everything a launch needs beside tensors follows from shapes alone, so a launch may be captured in
a CUDA graph.
"""

from __future__ import annotations

import torch

from kernels._triton import HAS_GLUON_HOPPER
from kernels.latent_planes import latent_planes
from kernels.mla_workspace import TILE_ROWS, MlaWorkspace
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.triton.boxes import boxes
from kernels.triton.mla import LOG2_E, TILE, merge, refuse_shapes

# Up to so many folded rows scores come straight from codes: 63 us where a tile in bf16 for them
# takes 68, at 8 x 32K (H200).
TERMS_ROWS = 16


def refuse_fp8(call: CallSignature) -> str | None:
    if call.trait("query_rows") not in range(1, 33):
        return f"a row has {call.trait('query_rows')} query tokens times heads, it takes up to 32"
    if not HAS_GLUON_HOPPER:
        return "this triton has no Gluon"
    if torch.cuda.get_device_capability()[0] != 9:
        return "wgmma exists on compute capability 9.x only"
    if (call.trait("latent_dim"), call.trait("rope_dim")) != (512, 64):
        return "it takes latent_dim 512 and rope_dim 64"
    return refuse_shapes(call)


@register_kernel(
    "mla_decode",
    "gluon_hopper_fp8",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"fp8_planes"}},
    refuses=refuse_fp8,
)
def decode_fp8(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """Warp-specialised kernel of swapped operands, then the merge."""
    out = attend_fp8(
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, latent_dim, workspace
    )
    merge(out, workspace, row_slots.shape[0], True)
    return out


def attend_fp8(
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
    rows = workspace.q_len * workspace.num_heads
    width = q.shape[-1]
    planes = latent_planes(kv_pool_layer, latent_dim, width - latent_dim)
    last_page = kv_pool_layer.shape[0] - 1
    page_rows = kv_pool_layer.stride(0) // latent_dim
    rope_page_rows = planes.rope.stride(0) // 64
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    arguments = (
        q,
        boxes(kv_pool_layer, last_page * page_rows + TILE, latent_dim, TILE, 128, 8),
        boxes(planes.rope, last_page * rope_page_rows + TILE, 64, TILE, 64, 16),
        planes.scales,
        page_table,
        row_slots,
        seq_lens,
        workspace.plan,
        out,
        workspace.partial_out,
        workspace.partial_lse,
        page_table.stride(0),
        page_rows,
        rope_page_rows,
        planes.scales.stride(0),
        softmax_scale * LOG2_E,
    )
    sizes = {
        "H": workspace.num_heads,
        "Q_LEN": workspace.q_len,
        "D": latent_dim,
        "NUM_PARTS": workspace.num_parts,
        "ROWS_PAD": workspace.num_blocks * TILE_ROWS,
        "TILE": TILE,
        "num_warps": 4,
        "launch_pdl": workspace.may_start_early and not workspace.plan_is_fresh,  # attend_hopper
    }
    workspace.plan_is_fresh = False
    if rows <= TERMS_ROWS:
        from kernels.triton.mla_decode_fp8_terms import mla_decode_fp8_terms_kernel

        mla_decode_fp8_terms_kernel[(workspace.num_parts,)](*arguments, **sizes)
        return out
    from kernels.triton.mla_decode_fp8 import mla_decode_fp8_kernel

    mla_decode_fp8_kernel[(workspace.num_parts,)](*arguments, N=32, **sizes)
    return out
