# SPDX-License-Identifier: Apache-2.0
"""W4 matrices times a few tokens: 16 weight rows a program, columns dealt out to its warps.

Owns: one (slice of 16 rows, work item): a linear layer, a linear layer with SwiGLU, or either GEMM
of a mixture of experts. Does not know: routing, packing (kernels/w4_layout.py), launches.

A program asks for all its weights at once (18 KB at 2048 columns) and keeps them in registers: many
bytes in flight without a pipeline, and, where they do not hang on the kernel before, they are
asked for before that kernel has ended (programmatic dependent launch). Each warp multiplies every
WAYS-th block of 64 columns (a batched dot, one batch a warp); the sums meet at the end in a
fixed order. RMSNorm in front costs no launch: the activation is multiplied by the norm's weight
as it is loaded, and the sums by 1 / rms when they are done.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.moe_combine import combine_token, combine_tokens
from kernels.triton.moe_w4 import decode_words, word_pair
from kernels.triton.quick_launch import quick_launch


@triton.jit
def load_weights(codes, scales, first, KB: tl.constexpr, WAYS: tl.constexpr, KC: tl.constexpr):
    """Words [WAYS * KC, 128] and scale words [WAYS * KC, 64] of blocks `first` on; a row slice's
    lane holds four words and two scale words of each block."""
    block = first + tl.arange(0, WAYS * KC)
    real = (block < KB)[:, None]
    word = tl.arange(0, 128)
    half = tl.arange(0, 64)
    c = tl.load(codes + block[:, None] * 512 + word[None, :], mask=real, other=0)
    at = half // 8 * 2 + half % 2
    s = tl.load(scales + block[:, None] * 64 + at[None, :], mask=real, other=0)
    return c, s


@triton.jit
def expand_ways(
    c,
    s,
    WAYS: tl.constexpr,
    KC: tl.constexpr,
    INT4: tl.constexpr,
    SCALE_MUL: tl.constexpr,
    SCALE_ADD: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """What `load_weights` gave -> [WAYS, 16, 64 * KC] bf16 (fp32 in the portable form)."""
    c = tl.reshape(c, (KC, WAYS, 8, 4, 4))
    s = tl.reshape(s, (KC, WAYS, 8, 4, 2))
    shift = (tl.arange(0, 2) * 8)[None, None, None, None, None, :]
    e = ((s[:, :, :, :, :, None] >> shift) & 0x00FF00FF) * SCALE_MUL + SCALE_ADD
    e = tl.reshape(e, (KC, WAYS, 8, 4, 4))
    a0, a1, a2, a3 = decode_words(c, e, INT4, PORTABLE)
    p0 = word_pair(a0, e, False, INT4, PORTABLE)
    p1 = word_pair(a1, e, True, INT4, PORTABLE)
    p2 = word_pair(a2, e, False, INT4, PORTABLE)
    p3 = word_pair(a3, e, True, INT4, PORTABLE)
    w = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    # kc way g c k16 pair row8 k2 -> way, rows (row8 g), columns (kc k16 c k2 pair)
    w = tl.permute(w, (1, 6, 2, 0, 4, 3, 7, 5))
    return tl.reshape(w, (WAYS, 16, KC * 64))


@quick_launch
@triton.jit
def w4_rows_kernel(
    x,
    norm_weight,
    codes,
    scales,
    factors,
    residual,
    pairs,
    item_expert,
    item_begin,
    item_count,
    pair_weights,
    out,
    combined,
    behind,
    counters,
    num_tokens,
    x_stride,
    part_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
    KC: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS: tl.constexpr,
    SWIGLU: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNSORTED: tl.constexpr,
    COMBINES: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    INT4: tl.constexpr,
    SCALE_MUL: tl.constexpr,
    SCALE_ADD: tl.constexpr,
    PORTABLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (slice of 16 rows, item).

    LOADS tokens an item; one token fills all TOKENS columns of the product, more are TOKENS.
    Without EXPERTS: item i is tokens [i * LOADS, ...) of x [T, K], or of fp32 [PARTS, T, K], which
    is summed; factors fp32 [N / 16, 2] (rows
    below 8 of a slice, and the others); out [T, N] (+ residual), or [T, N / 2] = SwiGLU of rows
    that come as 8 gate, 8 up.
    With EXPERTS: as moe_w4_kernel; SWIGLU is the first GEMM (x gathered by token, out by
    position), else the second (x by position, out fp32 by pair, times the router weight);
    factors [E, 2]. COMBINES (of the second): moe_combine.py.
    """
    pid = tl.program_id(0)
    item = tl.program_id(1)
    KB: tl.constexpr = K // 64
    STEP: tl.constexpr = WAYS * KC
    t = tl.arange(0, LOADS)
    if EXPERTS:
        if USE_PDL:
            gdc_wait()
        expert = tl.load(item_expert + item)
        if UNSORTED:
            begin = item
            live = t < 1
            pair = begin + t
        else:
            count = tl.load(item_count + item)
            if count == 0:
                return
            begin = tl.load(item_begin + item)
            live = t < count
            pair = tl.load(pairs + begin + t, mask=live, other=0)
        position = begin + t
        x_row = pair // TOP_K if SWIGLU else position
        tile = expert.to(tl.int64) * (N // 64) * KB
        factor_at = factors + expert * 2
    else:
        position = item * LOADS + t
        live = position < num_tokens
        x_row = position
        pair = position
        tile = (item * 0).to(tl.int64)
        factor_at = factors + pid * 2
    tile += pid // 4 * KB
    codes += tile * 512 + pid % 4 * 128
    scales += tile * 64 + pid % 4 * 16
    c, s = load_weights(codes, scales, 0, KB, WAYS, KC)
    if USE_PDL and not EXPERTS:
        gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, STEP * 64)
    x_ptr = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([WAYS, 16, TOKENS], tl.float32)
    squares = tl.zeros([LOADS], tl.float32)
    for first in range(0, KB, STEP):
        real = live[:, None] & (first * 64 + k < K)[None, :]
        xt = tl.load(x_ptr + first * 64, mask=real, other=0.0)
        if PARTS:
            for part in tl.static_range(1, PARTS):
                xt += tl.load(x_ptr + part * part_stride + first * 64, mask=real, other=0.0)
            xt = xt.to(out.dtype.element_ty)
        if NORMS:
            value = xt.to(tl.float32)
            squares += tl.sum(value * value, axis=1)
            weight = tl.load(norm_weight + first * 64 + k, mask=first * 64 + k < K, other=0.0)
            xt = (value * weight.to(tl.float32)[None, :]).to(xt.dtype)
        xt = tl.permute(tl.reshape(xt, (LOADS, KC, WAYS, 64)), (2, 1, 3, 0))
        xt = tl.reshape(xt, (WAYS, KC * 64, LOADS))
        if LOADS < TOKENS:
            xt = tl.broadcast_to(xt, (WAYS, KC * 64, TOKENS))
        w = expand_ways(c, s, WAYS, KC, INT4, SCALE_MUL, SCALE_ADD, PORTABLE)
        if first + STEP < KB:
            c, s = load_weights(codes, scales, first + STEP, KB, WAYS, KC)
        acc = tl.dot(w, xt, acc)
    if USE_PDL and EXPERTS:
        gdc_launch_dependents()
    y = tl.sum(acc, axis=0)
    if LOADS < TOKENS:  # all columns are the same
        y = tl.sum(tl.where((tl.arange(0, TOKENS) == 0)[None, :], y, 0.0), axis=1)[:, None]
    if NORMS:
        y = y * (1.0 / tl.sqrt(squares / K + eps))[None, :]
    # Rows as (gate or low half, other half): a factor for each.
    halves = tl.permute(tl.reshape(y, (2, 8, LOADS)), (1, 2, 0))
    low, high = tl.split(halves)
    low = low * tl.load(factor_at)
    high = high * tl.load(factor_at + 1)
    g = tl.arange(0, 8)
    keep = live[None, :]
    if SWIGLU:
        value = low / (1.0 + tl.exp(-low)) * high
        at = position.to(tl.int64)[None, :] * (N // 2) + pid * 8 + g[:, None]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=keep)
    else:
        at = pair.to(tl.int64)[None, :] * N + pid * 16 + g[:, None]
        if EXPERTS:
            share = tl.load(pair_weights + pair, mask=live, other=0.0)[None, :]
            low = low * share
            high = high * share
        if ADDS:
            low += tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)
            high += tl.load(residual + at + 8, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + at, low.to(out.dtype.element_ty), mask=keep)
        tl.store(out + at + 8, high.to(out.dtype.element_ty), mask=keep)
        if COMBINES:
            n = pid * 16 + tl.arange(0, 16)
            if UNSORTED:
                combine_token(
                    out, behind, combined, counters, begin // TOP_K, n, N, TOP_K, HAS_BEHIND
                )
            else:
                combine_tokens(
                    out, behind, combined, counters, pair // TOP_K, live, n, N, TOP_K, HAS_BEHIND
                )
