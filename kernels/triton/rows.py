# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of the row-wise kernels. Does not know: their insides.

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.mla import pool_views, use_pdl
from kernels.triton.row_kernels import mla_kv_write_kernel, rms_norm_kernel, silu_and_mul_kernel

_FLOATS = {"fp32", "bf16", "fp16"}


def _pdl(enabled: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if enabled else {}


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    wide: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(residual)
    pdl = use_pdl(x.device)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            total,
            out if wide is None else wide,
            x.stride(0),
            eps,
            H=width,
            BLOCK=next_power_of_2(width),
            ADDS=residual is not None,
            WIDENS=wide is not None,
            USE_PDL=pdl,
            num_warps=_warps(width),
            **_pdl(pdl),
        )
    return out, total


@register_kernel(
    "rms_norm",
    "triton",
    priority=Priority.PORTABLE,
    device="cuda",
    formats={"x": _FLOATS, "weight": _FLOATS},
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One program a row."""
    return _norm(x, None, weight, eps)[0]


def rms_norm_twice(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm, and the same rounded numbers in fp32."""
    wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return _norm(x, None, weight, eps, wide)[0], wide


@register_kernel(
    "add_rms_norm",
    "triton",
    priority=Priority.PORTABLE,
    device="cuda",
    formats={"x": _FLOATS, "weight": _FLOATS},
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a row."""
    return _norm(x, residual, weight, eps)


@register_kernel(
    "silu_and_mul", "triton", priority=Priority.PORTABLE, device="cuda", formats={"x": _FLOATS}
)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Rows by blocks of columns."""
    num_rows, doubled = x.shape
    width = doubled // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    pdl = use_pdl(x.device)
    block = min(1024, next_power_of_2(width))
    if num_rows:
        silu_and_mul_kernel[(num_rows, cdiv(width, block))](
            x, out, F=width, BLOCK=block, USE_PDL=pdl, num_warps=4, **_pdl(pdl)
        )
    return out


@register_kernel(
    "mla_kv_write",
    "triton",
    priority=Priority.PORTABLE,
    device="cuda",
    formats={"q": _FLOATS, "kv": {*_FLOATS, "u8"}},
)
def mla_kv_write(
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Two programs a token."""
    num_tokens, num_heads, rope_dim = q_rope.shape
    latent_dim = norm_weight.shape[0]
    pdl = use_pdl(q_rope.device)
    if not num_tokens:
        return
    views = pool_views(kv_pool_layer, latent_dim, rope_dim)
    (latents, latent_stride), (scales, scale_stride), (ropes, rope_stride) = views
    mla_kv_write_kernel[(num_tokens, 2)](
        q_rope,
        kv,
        norm_weight,
        positions,
        cos_sin,
        latents,
        ropes,
        scales,
        slot_mapping,
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        latent_stride,
        rope_stride,
        scale_stride,
        eps,
        H=num_heads,
        H_PAD=next_power_of_2(num_heads),
        C=latent_dim,
        C_PAD=next_power_of_2(latent_dim),
        R=rope_dim,
        R_PAD=next_power_of_2(rope_dim),
        PAGE=ropes.shape[1],
        FP8=kv_pool_layer.dtype == torch.uint8,
        USE_PDL=pdl,
        num_warps=4,
        **_pdl(pdl),
    )
