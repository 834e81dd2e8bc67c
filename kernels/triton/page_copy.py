# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV pool to and from one blob of host memory, in one launch.

Owns: addresses; the bytes mean nothing here. The blob is pinned memory, which a GPU reads and
writes at its own address; a few programs fill the link (52 GB/s out, 51 in, of 55, H200, 2026-11),
and the rest of the GPU stays free.
"""

from __future__ import annotations

import torch

from kernels._triton import tl, triton
from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv

PROGRAMS = 32
BLOCK = 4096  # 8-byte words


@triton.jit
def move_pages_kernel(
    pool,
    blob,
    pages,
    slots,
    page_words,
    pool_stride,
    blob_stride,
    num_blocks,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program takes blocks in turn: pool[pages[i]] -> blob[slots[i]] (OUT), or back.

    Words and strides in i64.
    """
    per_page = tl.cdiv(page_words, BLOCK)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        i = block // per_page
        word = block % per_page * BLOCK + tl.arange(0, BLOCK)
        real = word < page_words
        page = tl.load(pages + i).to(tl.int64)
        here = pool + page * pool_stride + word
        there = blob + tl.load(slots + i).to(tl.int64) * blob_stride + word
        if OUT:
            tl.store(there, tl.load(here, mask=real), mask=real)
        else:
            tl.store(here, tl.load(there, mask=real), mask=real)


@register_kernel("move_pages", "triton", priority=Priority.PERFORMANT, device="cuda")
def move_pages(
    pool: torch.Tensor, pages: torch.Tensor, blob: torch.Tensor, slots: torch.Tensor, is_out: bool
) -> None:
    """One launch on the current stream."""
    words = pool.shape[1] // 8
    num_blocks = pages.shape[0] * cdiv(words, BLOCK)
    move_pages_kernel[(min(PROGRAMS, num_blocks),)](
        pool.view(torch.int64),
        blob.view(torch.int64),
        pages,
        slots,
        words,
        pool.stride(0) // 8,
        blob.stride(0) // 8,
        num_blocks,
        OUT=is_out,
        BLOCK=BLOCK,
        num_warps=8,
    )
