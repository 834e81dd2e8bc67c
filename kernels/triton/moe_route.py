# SPDX-License-Identifier: Apache-2.0
"""Expert routing: top-k per token, work items per expert, the sum over a token's experts.

Owns: scores -> (experts, weights), the sort of (token, choice) pairs by expert, and the combine.
Does not know: expert weights. A pair is `token * top_k + choice`; an item is a run of at most
TOKENS pairs of one expert. Ties go to the lower expert index; sums run in a fixed order, so
results do not depend on the batch.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _take_best(s, index, SIZE: tl.constexpr):
    """Return (best value, its lowest index, s without it)."""
    best = tl.max(s, axis=0)
    at = tl.min(tl.where(s == best, index, SIZE - 1), axis=0)
    return best, at, tl.where(index == at, float("-inf"), s)


@triton.jit
def moe_topk_kernel(
    logits,
    bias,
    topk_ids,
    topk_weights,
    scale,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program per token. The bias moves the choice, never the weight."""
    if USE_PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    real = e < E
    x = tl.load(logits + row * E + e, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        z = tl.exp(x - tl.max(x, axis=0))
        scores = z / tl.sum(z, axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + e, mask=real, other=0.0)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = E // GROUPS
        g = tl.arange(0, GROUPS)
        grid = tl.reshape(choice, (GROUPS, SIZE))
        group_score = tl.max(grid, axis=1)
        if GROUP_TOP2:
            m = tl.arange(0, SIZE)[None, :]
            first = tl.min(tl.where(grid == group_score[:, None], m, SIZE), axis=1)
            rest = tl.where(m == first[:, None], float("-inf"), grid)
            group_score += tl.max(rest, axis=1)
        kept = g < 0
        for _ in tl.static_range(GROUPS_KEPT):
            _best, at, group_score = _take_best(group_score, g, GROUPS)
            kept = kept | (g == at)
        choice = tl.reshape(tl.where(kept[:, None], grid, float("-inf")), (E_PAD,))
    total = 0.0
    slot = tl.arange(0, 16)
    ids = tl.zeros([16], tl.int32)
    weights = tl.zeros([16], tl.float32)
    for j in tl.static_range(TOP_K):
        _best, at, choice = _take_best(choice, e, E)
        weight = tl.sum(tl.where(e == at, scores, 0.0), axis=0)
        total += weight
        ids = tl.where(slot == j, at, ids)
        weights = tl.where(slot == j, weight, weights)
    if RENORMALISE:
        weights = weights / (total + 1e-20)
    keep = slot < TOP_K
    tl.store(topk_ids + row * TOP_K + slot, ids, mask=keep)
    tl.store(topk_weights + row * TOP_K + slot, weights * scale, mask=keep)
    if USE_PDL:
        gdc_launch_dependents()


@triton.jit
def moe_align_kernel(
    topk_ids,
    pairs,
    item_expert,
    item_begin,
    item_count,
    num_pairs,
    max_items,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program per expert: its pairs in ascending order, and its items. Every program counts all
    pairs again, so none waits for another; the last one also empties the unused items."""
    if USE_PDL:
        gdc_wait()
    expert = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    counts = tl.zeros([E_PAD], tl.int32)
    for p0 in range(0, num_pairs, BLOCK):
        p = p0 + tl.arange(0, BLOCK)
        ids = tl.load(topk_ids + p, mask=p < num_pairs, other=0)
        counts += tl.histogram(ids, E_PAD, mask=p < num_pairs)
    items = (counts + TOKENS - 1) // TOKENS
    begin = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    item0 = tl.sum(tl.where(e < expert, items, 0), axis=0)
    count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
    running = begin
    if count > 0:
        for p0 in range(0, num_pairs, BLOCK):
            p = p0 + tl.arange(0, BLOCK)
            mine = tl.load(topk_ids + p, mask=p < num_pairs, other=E_PAD) == expert
            rank = tl.cumsum(mine.to(tl.int32), axis=0) - 1
            tl.store(pairs + running + rank, p, mask=mine)
            running += tl.sum(mine.to(tl.int32), axis=0)
        for j in range((count + TOKENS - 1) // TOKENS):
            tl.store(item_expert + item0 + j, expert)
            tl.store(item_begin + item0 + j, begin + j * TOKENS)
            tl.store(item_count + item0 + j, tl.minimum(count - j * TOKENS, TOKENS))
    if expert == E - 1:
        used = tl.sum(items, axis=0)
        for i0 in range(0, max_items, BLOCK):
            i = i0 + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], tl.int32)
            tl.store(item_count + i, zero, mask=(i >= used) & (i < max_items))
    if USE_PDL:
        gdc_launch_dependents()


@triton.jit
def moe_combine_kernel(
    parts,
    shared,
    out,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (token, columns): out = sum of the token's TOP_K rows of parts (+ shared)."""
    if USE_PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = n < N
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        acc += tl.load(parts + (row * TOP_K + j) * N + n, mask=keep, other=0.0)
    if HAS_SHARED:
        acc += tl.load(shared + row * N + n, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, acc.to(out.dtype.element_ty), mask=keep)
    if USE_PDL:
        gdc_launch_dependents()
