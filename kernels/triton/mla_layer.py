# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of what surrounds MLA decode in a layer. Does not know: the insides.

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from kernels._triton import triton
from kernels.mla_workspace import TILE_ROWS, MlaWorkspace
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.triton.linear import RowWeight, linear_of_parts
from kernels.triton.mla import attend_hopper, refuse_hopper, use_pdl
from kernels.triton.mla_decode_parts import mla_absorb_kernel, mla_merge_values_kernel

# Slices of the latent whose values the output projection sums: each costs it another read.
VALUE_PARTS = 4


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
    formats={"q": {"bf16", "fp16"}, "kv": {"bf16", "fp16"}},
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
) -> torch.Tensor:
    """One launch: programs of a head's slice, and of four tokens' latents."""
    num_heads, nope_dim, latent_dim = w_uk.shape
    num_tokens, rope_dim = q.shape[0], cos_sin.shape[1]
    out = torch.empty(num_tokens, num_heads, latent_dim + rope_dim, dtype=q.dtype, device=q.device)
    cols = max(16, latent_dim // 4)
    chunks = latent_dim // cols
    pdl = use_pdl(q.device)
    mla_absorb_kernel[(num_heads + triton.cdiv(num_tokens, chunks), chunks)](
        q,
        kv,
        norm_weight,
        positions,
        cos_sin,
        kv_pool_layer,
        kv_pool_layer,
        kv_pool_layer,
        slot_mapping,
        w_uk,
        out,
        num_tokens,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv_pool_layer.stride(0),
        0,
        0,
        eps,
        H=num_heads,
        NOPE=nope_dim,
        C=latent_dim,
        R=rope_dim,
        PAGE=kv_pool_layer.shape[1],
        TOKENS=16,
        COLS=cols,
        FP8=False,
        USE_PDL=pdl,
        num_warps=4,
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def merge_values(
    attended: torch.Tensor, workspace: MlaWorkspace, num_rows: int, w_uv: torch.Tensor
) -> torch.Tensor:
    """Partial results of the workspace -> fp32 [VALUE_PARTS, T, H * V], to be summed."""
    num_tokens, num_heads, latent_dim = attended.shape
    v_dim = w_uv.shape[1]
    out = torch.empty(
        VALUE_PARTS, num_tokens, num_heads * v_dim, dtype=torch.float32, device=attended.device
    )
    pdl = use_pdl(attended.device)
    block_p = triton.next_power_of_2(triton.cdiv(workspace.num_parts, num_rows))
    mla_merge_values_kernel[(num_tokens, num_heads, VALUE_PARTS)](
        attended,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.plan,
        w_uv,
        out,
        num_rows,
        num_tokens,
        H=num_heads,
        Q_LEN=workspace.q_len,
        ROWS_PAD=workspace.num_blocks * TILE_ROWS,
        D=latent_dim,
        V=v_dim,
        NUM_PARTS=workspace.num_parts,
        BLOCK_P=min(64, max(4, block_p)),
        BLOCK_D=latent_dim // VALUE_PARTS,
        USE_PDL=pdl,
        num_warps=8,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _refuse_output(call: CallSignature) -> str | None:
    if not call.trait("small_batch"):
        return "it takes few tokens only"
    if not _is_power_of_two(int(call.trait("v_dim"))):
        return f"v_dim is {call.trait('v_dim')}, it takes a power of two"
    if int(call.trait("num_rows")) % 16 or int(call.trait("num_cols")) % 32:
        return "it takes rows in sixteens and columns in thirty-twos"
    return refuse_hopper(call)


@register_kernel(
    "mla_output",
    "gluon_hopper",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={
        "q": {"bf16"},
        "kv": {"bf16"},
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
) -> torch.Tensor:
    """Attention; merge and up-projection; output projection and residual: three launches."""
    attended = attend_hopper(
        q,
        kv_pool_layer,
        page_table,
        row_slots,
        seq_lens,
        softmax_scale,
        workspace.latent_dim,
        workspace,
    )
    parts = merge_values(attended, workspace, row_slots.shape[0], w_uv)
    return linear_of_parts(parts, out_weight, residual)
