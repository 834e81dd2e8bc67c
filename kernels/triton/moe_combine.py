# SPDX-License-Identifier: Apache-2.0
"""The sum over a token's experts inside the second GEMM: whoever ends last adds.

A program of that GEMM has stored its part of some tokens; it then counts itself in at a counter of
each (token, slice of rows). The last of a token's TOP_K programs reads all parts back and adds them
in the order of the token's experts, so the bits are those of moe_combine_kernel. Does not know: the
GEMM.
"""

from __future__ import annotations

from kernels._triton import tl, triton


@triton.jit
def combine_token(
    parts,
    behind,
    combined,
    counters,
    token,
    n,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
):
    """One token, a scalar: rows n of parts fp32 [T * TOP_K, N], and of behind, to combined [T, N].
    `counters` int32 [T, programs of axis 0] holds zeros before and after."""
    tl.debug_barrier()  # all of the program's part before its arrival
    counter = counters + token * tl.num_programs(0) + tl.program_id(0)
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == TOP_K - 1:
        tl.store(counter, 0)
        row = token.to(tl.int64)
        acc = tl.zeros(n.shape, tl.float32)
        for j in tl.static_range(TOP_K):
            # Not from L1: another program's half of a line may have been read there before.
            acc += tl.load(parts + (row * TOP_K + j) * N + n, cache_modifier=".cg")
        if HAS_BEHIND:
            acc += tl.load(behind + row * N + n).to(tl.float32)
        tl.store(combined + row * N + n, acc.to(combined.dtype.element_ty))


@triton.jit
def combine_tokens(
    parts,
    behind,
    combined,
    counters,
    token,
    live,
    n,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
):
    """The same of tokens [TOKENS], each once, where `live`."""
    tl.debug_barrier()
    counter = counters + token * tl.num_programs(0) + tl.program_id(0)
    arrived = tl.atomic_add(counter, 1, mask=live, sem="acq_rel")
    last = live & (arrived == TOP_K - 1)
    if tl.sum(last.to(tl.int32), axis=0) > 0:
        tl.store(counter, 0, mask=last)
        keep = last[None, :]
        row = token.to(tl.int64)[None, :]
        acc = tl.zeros((n.shape[0], token.shape[0]), tl.float32)
        for j in tl.static_range(TOP_K):
            at = parts + (row * TOP_K + j) * N + n[:, None]
            acc += tl.load(at, mask=keep, other=0.0, cache_modifier=".cg")
        at = row * N + n[:, None]
        if HAS_BEHIND:
            acc += tl.load(behind + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(combined + at, acc.to(combined.dtype.element_ty), mask=keep)
