# SPDX-License-Identifier: Apache-2.0
"""MLA latents in fp8: a page of one layer is bytes, cut into planes. Does not know: kernels, pools.

    values   e4m3 [page_size, latent_dim]
    scales   fp32 [page_size, latent_dim / 128]: a power of two for 128 neighbours
    rope     bf16 [page_size, rope_dim]: the rotated key part

A latent is value * scale, exact in bf16. 656 bytes a token at latent_dim 512 and rope_dim 64.
Source: the sizes are those of FlashMLA's fp8 cache (DeepSeek, 2025), there by token, not by plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.errors import KernelInputError

GROUP = 128
E4M3_MAX = 448.0
# Of the views that a step asks for several times; an entry goes with its view.
_planes_of: Any = WeakTensorKeyDictionary()


def row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Bytes of one token in one layer."""
    return latent_dim + 4 * (latent_dim // GROUP) + 2 * rope_dim


@dataclass(frozen=True, slots=True)
class LatentPlanes:
    """Views of one layer's bytes [num_pages, page bytes]."""

    values: torch.Tensor  # e4m3 [num_pages, page_size, latent_dim]
    scales: torch.Tensor  # fp32 [num_pages, page_size, latent_dim / 128]
    rope: torch.Tensor  # bf16 [num_pages, page_size, rope_dim]

    @property
    def page_size(self) -> int:
        return self.values.shape[1]


def latent_planes(kv_pool_layer: torch.Tensor, latent_dim: int, rope_dim: int) -> LatentPlanes:
    """Cut one layer of the pool, uint8 [num_pages, page bytes], into its planes.

    Raises:
        KernelInputError: the bytes are no whole number of tokens, or latent_dim of groups.
    """
    found: tuple[tuple[int, int], LatentPlanes] | None = _planes_of.get(kv_pool_layer)
    if found is None or found[0] != (latent_dim, rope_dim):
        found = (latent_dim, rope_dim), _cut(kv_pool_layer, latent_dim, rope_dim)
        _planes_of[kv_pool_layer] = found
    return found[1]


def _cut(kv_pool_layer: torch.Tensor, latent_dim: int, rope_dim: int) -> LatentPlanes:
    num_bytes, width = kv_pool_layer.shape[1], row_bytes(latent_dim, rope_dim)
    if latent_dim % GROUP:
        raise KernelInputError("latent_dim", latent_dim, f"a multiple of {GROUP}")
    if num_bytes % width:
        raise KernelInputError("kv_pool_layer.shape[1]", num_bytes, f"a multiple of {width}")
    page_size, groups = num_bytes // width, latent_dim // GROUP
    ends = (page_size * latent_dim, page_size * (latent_dim + 4 * groups))

    def plane(start: int, end: int, dtype: torch.dtype, columns: int) -> torch.Tensor:
        whole = kv_pool_layer[:, start:end].view(dtype)
        strides = (whole.stride(0), columns, 1)
        return whole.as_strided((whole.shape[0], page_size, columns), strides)

    return LatentPlanes(
        plane(0, ends[0], torch.float8_e4m3fn, latent_dim),
        plane(ends[0], ends[1], torch.float32, groups),
        plane(ends[1], num_bytes, torch.bfloat16, rope_dim),
    )


def encode_latents(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [..., C], fp32 [..., C / 128]) of fp32 latents [..., C]."""
    groups = latents.reshape(*latents.shape[:-1], -1, GROUP)
    top = groups.abs().amax(dim=-1)
    mantissa, exponent = torch.frexp(top / E4M3_MAX)
    power = torch.ldexp(torch.ones_like(top), torch.where(mantissa == 0.5, exponent - 1, exponent))
    scale = torch.where(top > 1e-30, power, 1.0)
    scale = torch.where(top.isnan(), top, scale)
    values = (groups / scale[..., None]).flatten(-2)
    return values.to(torch.float8_e4m3fn), scale


def decode_rows(planes: LatentPlanes, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows [n, page_size, latent_dim + rope_dim] of pages [n]."""
    as_bytes = planes.values.view(torch.uint8)[pages].view(torch.float8_e4m3fn)
    groups = as_bytes.to(dtype).reshape(*as_bytes.shape[:-1], -1, GROUP)
    latents = (groups * planes.scales[pages].to(dtype)[..., None]).flatten(-2)
    return torch.cat((latents, planes.rope[pages].to(dtype)), dim=-1)
