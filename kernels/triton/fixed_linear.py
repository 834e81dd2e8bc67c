# SPDX-License-Identifier: Apache-2.0
"""Products whose sums run in one order, whatever else is in the batch.

Owns: x @ w.T by tiles of fixed size, plain, a batch of them, and one a routed expert. A row's
result follows from the row and the weights alone: a tile is always BLOCK_M rows, K is walked in
steps of BLOCK_K from the front, and an output is one element of each step's product. Slower than
what cuBLAS chooses for a shape, which is why it is for `engine.deterministic` alone. Does not know:
layers.
"""

from __future__ import annotations

import torch

from kernels._triton import tl, triton
from kernels.sizes import cdiv, next_power_of_2

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64


@triton.jit
def _tile_product(
    x,
    w,
    x_row_stride,
    x_k_stride,
    w_row_stride,
    w_k_stride,
    rows,
    real_rows,
    n,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_tile = tl.load(
            x + rows[:, None] * x_row_stride + k[None, :] * x_k_stride,
            mask=real_rows[:, None] & (k < K)[None, :],
            other=0.0,
        )
        w_tile = tl.load(
            w + n[:, None] * w_row_stride + k[None, :] * w_k_stride,
            mask=(n < N)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
    return acc


# One compiled form for every number of rows.
@triton.jit(do_not_specialize=["T", "x_batch_stride", "out_batch_stride"])
def fixed_linear_kernel(
    x,
    w,
    out,
    T,
    N,
    K,
    x_batch_stride,
    x_row_stride,
    x_k_stride,
    w_batch_stride,
    w_row_stride,
    w_k_stride,
    out_batch_stride,
    out_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of outputs, block of rows, batch)."""
    batch = tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = _tile_product(
        x + batch * x_batch_stride,
        w + batch * w_batch_stride,
        x_row_stride,
        x_k_stride,
        w_row_stride,
        w_k_stride,
        rows,
        rows < T,
        n,
        N,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    to = out + batch * out_batch_stride + rows[:, None] * out_row_stride + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(rows < T)[:, None] & (n < N)[None, :])


@triton.jit
def fixed_experts_kernel(
    x,
    w,
    out,
    pair_ends,
    tile_ends,
    N,
    K,
    E,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
):
    """Program (block of outputs, tile of pairs). x [P, K] and out [P, N] sorted by expert, w
    [E, N, K]; pair_ends, tile_ends int32 [E]: pairs, and tiles of them, up to each expert's end."""
    tile = tl.program_id(1)
    e = tl.arange(0, EXPERTS_PAD)
    ends = tl.load(tile_ends + e, mask=e < E, other=0x7FFFFFFF)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert < E:
        before = tl.where(expert > 0, expert - 1, 0)
        first_tile = tl.where(expert > 0, tl.load(tile_ends + before), 0)
        first_pair = tl.where(expert > 0, tl.load(pair_ends + before), 0)
        rows = first_pair + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        real = rows < tl.load(pair_ends + expert)
        rows = rows.to(tl.int64)
        n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        acc = _tile_product(
            x,
            w + expert.to(tl.int64) * N * K,
            K,
            1,
            K,
            1,
            rows,
            real,
            n,
            N,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        to = out + rows[:, None] * N + n[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


def _warps(x: torch.Tensor) -> int:
    """fp32 has no tensor cores that keep its bits: operands lie in registers."""
    return 8 if x.dtype == torch.float32 else 4


def fixed_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out [B, T, N] = x [B, T, K] @ w [B, N, K].T, any strides but out's last, which is 1."""
    batch, num, inner = x.shape
    width = w.shape[1]
    if num:
        grid = (cdiv(width, BLOCK_N), cdiv(num, BLOCK_M), batch)
        fixed_linear_kernel[grid](
            x,
            w,
            out,
            num,
            width,
            inner,
            *x.stride(),
            *w.stride(),
            out.stride(0),
            out.stride(1),
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=_warps(x),
        )


def fixed_experts(
    x: torch.Tensor, w: torch.Tensor, pair_ends: torch.Tensor, tile_ends: torch.Tensor
) -> torch.Tensor:
    """[P, N]: each pair's row times its expert's weights."""
    num, inner = x.shape
    num_experts, width, _ = w.shape
    out = torch.empty(num, width, dtype=x.dtype, device=x.device)
    most_tiles = cdiv(num, BLOCK_M) + min(num, num_experts)
    fixed_experts_kernel[(cdiv(width, BLOCK_N), most_tiles)](
        x,
        w,
        out,
        pair_ends,
        tile_ends,
        width,
        inner,
        num_experts,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        EXPERTS_PAD=next_power_of_2(num_experts),
        num_warps=_warps(x),
    )
    return out
