# SPDX-License-Identifier: Apache-2.0
"""Single ops of the compiled extension, for models that are composed of ops.

Does not know: models. Arithmetic: fp32 in and out of C++; 4- and 8-bit weights take 8-bit dot
products for up to 16 tokens and bf16 tiles (AMX) for more.
"""

from __future__ import annotations

import functools

import torch

import _cpu_kernels as ext
from kernels.cpu.levels import LEVELS, register_levels
from kernels.cpu.packing import packed_once
from kernels.errors import KernelInputError
from kernels.packed_weight import PackedWeight
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature


def linear(level: str, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x [T, K] @ weight.T in the level's arithmetic."""
    out = torch.empty(x.shape[0], weight.num_rows)
    ext.linear(packed_once(weight), x.float().contiguous().numpy(), out.numpy(), level)
    return out.to(x.dtype)


def paged_attention(
    level: str,
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """One query token at a time, threads over tokens; on AMX 32 of a row together."""
    query = q.float().contiguous()
    out = torch.empty_like(query)
    try:
        ext.paged_attention(
            query.numpy(),
            kv_pool_layer.view(torch.int16).numpy(),
            page_table.contiguous().numpy(),
            row_slots.contiguous().numpy(),
            row_indptr.contiguous().numpy(),
            seq_lens.contiguous().numpy(),
            scale,
            out.numpy(),
            level,
        )
    except ValueError as error:
        raise KernelInputError.of_extension(error) from error
    return out.to(q.dtype)


def argmax(level: str, logits: torch.Tensor) -> torch.Tensor:
    """Two passes over each row: the maximum (and any NaN), then its first index."""
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    ext.argmax(logits.contiguous().numpy(), out.numpy(), level)
    return out


def apply_bitmask(level: str, logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Words with all bits set are skipped."""
    ext.apply_bitmask(logits.numpy(), bitmask.contiguous().numpy(), level)


def _refuses_attention(signature: CallSignature) -> str | None:
    head_dim = int(signature.trait("head_dim"))
    if head_dim % 32 or head_dim > 256:
        return f"head_dim is {head_dim}, it takes multiples of 32 up to 256"
    return None


def _refuses_amx_attention(signature: CallSignature) -> str | None:
    if signature.trait("decode_only", False):
        return "one query token a row leaves the tiles empty"
    return _refuses_attention(signature)


def _register() -> None:
    # Argmax and masks use no AMX: two levels are enough.
    vector_levels = LEVELS[:2]
    register_levels(
        "linear",
        lambda level: functools.partial(linear, level),
        formats={"x": {"fp32", "bf16"}, "weight": {"q4_1", "q8_0"}},
    )
    register_levels(
        "paged_attention",
        lambda level: functools.partial(paged_attention, level),
        formats={"q": {"fp32", "bf16"}, "kv": {"bf16"}},
        refuses=_refuses_attention,
        levels=vector_levels,
    )
    register_levels(
        "paged_attention",
        lambda level: functools.partial(paged_attention, level),
        formats={"q": {"fp32", "bf16"}, "kv": {"bf16"}},
        refuses=_refuses_amx_attention,
        levels=LEVELS[2:],
    )
    register_levels(
        "argmax",
        lambda level: functools.partial(argmax, level),
        formats={"logits": {"fp32"}},
        levels=vector_levels,
    )
    register_levels(
        "apply_bitmask",
        lambda level: functools.partial(apply_bitmask, level),
        formats={"logits": {"fp32"}},
        levels=vector_levels,
    )


_register()


@register_kernel("copy_pages", "cpu_memcpy", priority=Priority.PORTABLE, device="cpu")
def copy_pages(kv_pool: torch.Tensor, copies: torch.Tensor) -> None:
    """One memcpy per page, layer and K / V; the caller's thread alone (a page is < 2 MB)."""
    num_pages, num_layers, _, page_size, num_kv_heads, head_dim = kv_pool.shape
    token_bytes = num_kv_heads * head_dim * kv_pool.element_size()
    flat = kv_pool.view(-1).view(torch.uint8)
    planes = flat.view(num_pages, 2 * num_layers, page_size, token_bytes)
    try:
        ext.copy_pages(planes.numpy(), copies.contiguous().numpy())
    except ValueError as error:
        raise KernelInputError.of_extension(error) from error
