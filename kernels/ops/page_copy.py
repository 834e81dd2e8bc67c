# SPDX-License-Identifier: Apache-2.0
"""Public op: copies between pages of the KV pool. Does not know: implementations."""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def copy_pages(kv_pool: torch.Tensor, copies: torch.Tensor) -> None:
    """Copy the first tokens of a page, all of their KV in every layer, into another page.

    Args:
        kv_pool: [num_pages, num_layers, 2, page_size, Hkv, D], or latents
            [num_pages, num_layers, page_size, D]; contiguous.
        copies: int32 [C, 3]: source page, target page, tokens. No target is another's source.

    Raises:
        KernelInputError: if a shape is wrong or copies is not int32.
    """
    holds_latents = kv_pool.dim() == 4
    if not holds_latents:
        expect_shape("kv_pool", kv_pool, (None, None, 2, None, None, None))
    expect_shape("copies", copies, (None, 3))
    expect_dtype("copies", copies, torch.int32)
    if copies.shape[0] == 0:
        return
    formats = (("kv", format_of(kv_pool.dtype)),)
    family = "copy_latent_pages" if holds_latents else "copy_pages"
    select_kernel(CallSignature(family, kv_pool.device.type, formats)).fn(kv_pool, copies)
