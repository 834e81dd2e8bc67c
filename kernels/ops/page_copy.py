# SPDX-License-Identifier: Apache-2.0
"""Public ops: copies between pages of the KV pool, and between them and host memory.

Does not know: implementations, tiers.
"""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def copy_pages(kv_pool: torch.Tensor, copies: torch.Tensor) -> None:
    """Copy the first tokens of a page, all of their KV in every layer, into another page.

    Args:
        kv_pool: [num_pages, num_layers, 2, page_size, Hkv, D], or latents
            [num_pages, num_layers, page_size, D]; contiguous. Pages of bytes, uint8
            [num_pages, num_layers, bytes], are copied whole.
        copies: int32 [C, 3]: source page, target page, tokens. No target is another's source.

    Raises:
        KernelInputError: if a shape is wrong or copies is not int32.
    """
    families = {3: "copy_byte_pages", 4: "copy_latent_pages"}
    family = families.get(kv_pool.dim(), "copy_pages")
    if family == "copy_pages":
        expect_shape("kv_pool", kv_pool, (None, None, 2, None, None, None))
    expect_shape("copies", copies, (None, 3))
    expect_dtype("copies", copies, torch.int32)
    if copies.shape[0] == 0:
        return
    formats = (("kv", format_of(kv_pool.dtype)),)
    select_kernel(CallSignature(family, kv_pool.device.type, formats)).fn(kv_pool, copies)


def move_pages(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blob: torch.Tensor,
    *,
    is_out: bool,
    slots: torch.Tensor | None = None,
) -> None:
    """Copy pages of the pool to a blob (`is_out`), or a blob to pages; on the current stream.

    Args:
        pool: uint8 [num_pages, page_bytes], page_bytes a multiple of 8; pages contiguous.
        pages: int32 [n], on the pool's device; distinct.
        blob: uint8 [n, page_bytes]: page after page; the bytes of a row are contiguous, from one
            row to the next are a multiple of 8. On the pool's device, or pinned host memory, whose
            bytes are there once the stream has come so far.
        slots: int32 [n], on the pool's device; distinct. Page i goes with row slots[i] of a blob
            [num_slots, page_bytes]. None: row i.

    Raises:
        KernelInputError: if shapes, dtypes or the blob's memory are others.
    """
    for name, tensor in (("pool", pool), ("blob", blob)):
        expect_shape(name, tensor, (None, None))
        expect_dtype(name, tensor, torch.uint8)
    expect_dtype("pages", pages, torch.int32)
    if slots is None:
        expect_shape("blob", blob, (pages.shape[0], pool.shape[1]))
        slots = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device)
    expect_shape("blob", blob, (None, pool.shape[1]))
    expect_shape("slots", slots, (pages.shape[0],))
    expect_dtype("slots", slots, torch.int32)
    if blob.stride(1) != 1 or blob.stride(0) % 8 or blob.data_ptr() % 8:
        allowed = "rows of contiguous bytes, each at a multiple of 8"
        raise KernelInputError("blob", tuple(blob.stride()), allowed)
    if pool.shape[1] % 8:
        raise KernelInputError("pool.shape[1]", pool.shape[1], "a multiple of 8")
    if blob.device != pool.device and not blob.is_pinned():
        raise KernelInputError("blob", blob.device, f"pinned host memory, or {pool.device}")
    if pages.shape[0] == 0:
        return
    kernel = select_kernel(CallSignature("move_pages", pool.device.type, ()))
    kernel.fn(pool, pages, blob, slots, is_out)
