# SPDX-License-Identifier: Apache-2.0
"""bf16 and fp8 matrices times a few tokens: 16 weight rows a program, columns dealt to its warps.

Owns: one slice of 16 rows of one linear layer. Does not know: launches. The twin of w4_rows.py
for weights that need no unpacking: a program keeps a step of its weights in registers, asks for
the first before the kernel in front has ended, and multiplies RMSNorm in. fp8 weights have one
fp32 scale per 128 x 128 block, which is multiplied into the activation.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.quick_launch import quick_launch


@triton.jit
def _load_tile(
    weight, first, K: tl.constexpr, WAYS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """Rows 0..15, columns `first` to `first` + COLS of a row-major matrix, in the order in which
    a warp's lanes feed them to the tensor core: [8 rows, column block * row half * way, 16 * WIDE
    columns]; a lane loads 4 * WIDE neighbouring columns."""
    outer = tl.arange(0, COLS // (16 * WIDE) * 2)
    block = outer // (2 * WAYS) * WAYS + outer % WAYS
    row = outer // WAYS % 2 * 8
    k = (first + block * (16 * WIDE))[None, :, None] + tl.arange(0, 16 * WIDE)[None, None, :]
    r = row[None, :, None] + tl.arange(0, 8)[:, None, None]
    return tl.load(weight + r * K + k, mask=k < K, other=0.0)


@triton.jit
def _gather_rows(tile, WAYS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """What `_load_tile` gave -> [WAYS, 16, COLS / WAYS]; columns in the order of `_deal`."""
    BLOCKS: tl.constexpr = COLS // WAYS // (16 * WIDE)
    tile = tl.reshape(tile, (8, BLOCKS, 2, WAYS, 4, WIDE, 2, 2))
    # row block rowhalf way lane step half pair -> way (rowhalf row) (block step half lane pair)
    tile = tl.permute(tile, (3, 2, 0, 1, 5, 6, 4, 7))
    return tl.reshape(tile, (WAYS, 16, COLS // WAYS))


@triton.jit
def _deal(tile, ROWS: tl.constexpr, WAYS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """[ROWS, COLS] -> [WAYS, ROWS, COLS / WAYS]. Neighbouring columns go where one thread loads
    them from: 4 * WIDE columns of a lane become its share of WIDE steps of the tensor core."""
    PARTS: tl.constexpr = COLS // WAYS // (16 * WIDE)
    tile = tl.reshape(tile, (ROWS, PARTS, WAYS, 4, WIDE, 2, 2))
    # row part way lane step half pair -> way row (part step half lane pair)
    tile = tl.permute(tile, (2, 0, 1, 4, 5, 3, 6))
    return tl.reshape(tile, (WAYS, ROWS, COLS // WAYS))


@quick_launch
@triton.jit
def dense_rows_kernel(
    x,
    norm_weight,
    weight,
    scales,
    residual,
    out,
    num_tokens,
    x_stride,
    part_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS: tl.constexpr,
    SCALED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (slice of 16 rows, block of LOADS tokens): x [T, K] (or fp32 [PARTS, T, K], summed)
    -> out [T, N]. scales fp32 [N / 128, K / 128] where SCALED."""
    pid = tl.program_id(0)
    position = tl.program_id(1) * LOADS + tl.arange(0, LOADS)
    live = position < num_tokens
    WIDE: tl.constexpr = 4 if SCALED else 2
    weight += pid.to(tl.int64) * 16 * K
    w = _load_tile(weight, 0, K, WAYS, COLS, WIDE)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, COLS)
    acc = tl.zeros([WAYS, 16, TOKENS], tl.float32)
    squares = tl.zeros([LOADS], tl.float32)
    for first in range(0, K, COLS):
        real = live[:, None] & (first + k < K)[None, :]
        at = position.to(tl.int64)[:, None] * x_stride + (first + k)[None, :]
        if PARTS:
            value = tl.load(x + at, mask=real, other=0.0)
            for part in tl.static_range(1, PARTS):
                value += tl.load(x + part * part_stride + at, mask=real, other=0.0)
            xt = value.to(out.dtype.element_ty)
        else:
            xt = tl.load(x + at, mask=real, other=0.0)
        if NORMS or SCALED:
            kind = xt.dtype
            value = xt.to(tl.float32)
            if NORMS:
                squares += tl.sum(value * value, axis=1)
                gain = tl.load(norm_weight + first + k, mask=first + k < K, other=0.0)
                value = value * gain.to(tl.float32)[None, :]
            if SCALED:
                block = pid // 8 * ((K + 127) // 128) + (first + k) // 128
                scale = tl.load(scales + block, mask=first + k < K, other=0.0)
                value = value * scale[None, :]
            xt = value.to(kind)
        xt = tl.permute(_deal(xt, LOADS, WAYS, COLS, WIDE), (0, 2, 1))
        if LOADS < TOKENS:
            xt = tl.broadcast_to(xt, (WAYS, COLS // WAYS, TOKENS))
        wt = _gather_rows(w, WAYS, COLS, WIDE).to(xt.dtype)
        if first + COLS < K:
            w = _load_tile(weight, first + COLS, K, WAYS, COLS, WIDE)
        acc = tl.dot(wt, xt, acc)
    y = tl.sum(acc, axis=0)
    if LOADS < TOKENS:  # all columns are the same
        y = tl.sum(tl.where((tl.arange(0, TOKENS) == 0)[None, :], y, 0.0), axis=1)[:, None]
    if NORMS:
        y = y * (1.0 / tl.sqrt(squares / K + eps))[None, :]
    at = position.to(tl.int64)[None, :] * N + pid * 16 + tl.arange(0, 16)[:, None]
    if ADDS:
        y += tl.load(residual + at, mask=live[None, :], other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[None, :])
