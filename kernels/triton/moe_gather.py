# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens in the order of their experts, for the large W4 path. Does not know: routing."""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit
def moe_gather_kernel(x, pairs, out, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (sorted pair, columns): its token's row. Of 16 columns, position (k2, c, pair) gets
    column (c, k2, pair): the order in which moe_w4_hopper.py multiplies them."""
    at = tl.program_id(0)
    token = (tl.load(pairs + at) // TOP_K).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position % 16
    column = position - inside + inside % 8 // 2 * 4 + inside // 8 * 2 + inside % 2
    keep = position < K
    row = tl.load(x + token * K + column, mask=keep)
    tl.store(out + at.to(tl.int64) * K + position, row, mask=keep)
