# SPDX-License-Identifier: Apache-2.0
"""W4 matrices back to dense rows, for products with many tokens. Does not know: packing, launches.

Owns: one slice of 16 rows, some of its columns.
"""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.triton.quick_launch import quick_launch
from kernels.triton.w4_rows import expand_ways, load_weights


@quick_launch
@triton.jit
def w4_expand_kernel(
    codes,
    scales,
    factors,
    out,
    K: tl.constexpr,
    N: tl.constexpr,
    KC: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INT4: tl.constexpr,
    SCALE_MUL: tl.constexpr,
    SCALE_ADD: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """Program (slice of 16 rows, KC * 4 blocks of 64 columns) -> out [N, K]. INTERLEAVED rows come
    as 8 gate, 8 up; they leave as all gate rows, then all up rows."""
    pid = tl.program_id(0)
    KB: tl.constexpr = K // 64
    first = tl.program_id(1) * KC * 4
    tile = (pid // 4).to(tl.int64) * KB
    codes += tile * 512 + pid % 4 * 128
    scales += tile * 64 + pid % 4 * 16
    c, s = load_weights(codes, scales, first, KB, 4, KC)
    w = expand_ways(c, s, 4, KC, INT4, SCALE_MUL, SCALE_ADD, PORTABLE)
    r = tl.arange(0, 16)
    factor = tl.load(factors + pid * 2 + r // 8)
    j = tl.arange(0, KC * 64)
    way = tl.arange(0, 4)
    k = (first + j[None, :] // 64 * 4 + way[:, None]) * 64 + j[None, :] % 64
    row = pid * 16 + r
    if INTERLEAVED:
        row = pid * 8 + r % 8 + r // 8 * (N // 2)
    at = row.to(tl.int64)[None, :, None] * K + k[:, None, :]
    value = w.to(tl.float32) * factor[None, :, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(k < K)[:, None, :])
