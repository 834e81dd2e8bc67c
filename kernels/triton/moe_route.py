# SPDX-License-Identifier: Apache-2.0
"""Expert routing: top-k per token, work items per expert, the sum over a token's experts.

Owns: scores -> (experts, weights), the sort of (token, choice) pairs by expert, and the combine.
Does not know: expert weights. A pair is `token * top_k + choice`; an item is a run of at most
TOKENS pairs of one expert. Ties go to the lower expert index; sums run in a fixed order, so
results do not depend on the batch.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.quick_launch import quick_launch


@triton.jit
def _ranks(score, SIZE: tl.constexpr):
    """How many are better than each of score [SIZE]; of equals the lower index is. No NaN."""
    i = tl.arange(0, SIZE)
    mine = score[:, None]
    others = score[None, :]
    better = (others > mine) | ((others == mine) & (i[None, :] < i[:, None]))
    return tl.sum(better.to(tl.int32), axis=1)


@triton.jit
def _choose(
    x,
    bias,
    topk_ids,
    topk_weights,
    row,
    scale,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """One token's scores x [E_PAD] (-inf behind E) -> its experts and weights. Shared experts
    follow: numbers E on, weight 1. The bias moves the choice, never the weight."""
    e = tl.arange(0, E_PAD)
    real = e < E
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        z = tl.exp(x - tl.max(x, axis=0))
        scores = z / tl.sum(z, axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + e, mask=real, other=0.0)
    # A NaN stays in the weights; in the choice it would name experts that are not there.
    choice = tl.where(real & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = E // GROUPS
        grid = tl.reshape(choice, (GROUPS, SIZE))
        group_score = tl.max(grid, axis=1)
        if GROUP_TOP2:
            m = tl.arange(0, SIZE)[None, :]
            first = tl.min(tl.where(grid == group_score[:, None], m, SIZE), axis=1)
            rest = tl.where(m == first[:, None], float("-inf"), grid)
            group_score += tl.max(rest, axis=1)
        kept = _ranks(group_score, GROUPS) < GROUPS_KEPT
        choice = tl.reshape(tl.where(kept[:, None], grid, float("-inf")), (E_PAD,))
    slot = tl.arange(0, 16)
    if E_PAD > 256:  # comparing all with all takes kilobytes of each thread, and minutes to compile
        ids = tl.zeros([16], tl.int32)
        weights = tl.zeros([16], tl.float32)
        free = real
        for k in tl.static_range(TOP_K):
            best = tl.max(tl.where(free, choice, float("-inf")), axis=0)
            at = tl.min(tl.where(free & (choice == best), e, E_PAD), axis=0)
            ids = tl.where(slot == k, at, ids)
            weights = tl.where(slot == k, tl.sum(tl.where(e == at, scores, 0.0), axis=0), weights)
            free = free & (e != at)
        ids = tl.where(slot < TOP_K, ids, E + slot - TOP_K)
    else:
        taken = _ranks(choice, E_PAD)[None, :] == slot[:, None]
        ids = tl.sum(tl.where(taken, e[None, :], 0), axis=1)
        ids = tl.where(slot < TOP_K, ids, E + slot - TOP_K)
        weights = tl.sum(tl.where(taken, scores[None, :], 0.0), axis=1)
    if RENORMALISE:
        total = tl.sum(tl.where(slot < TOP_K, weights, 0.0), axis=0)
        weights = weights / (total + 1e-20)
    weights = tl.where(slot < TOP_K, weights * scale, 1.0)
    WIDTH: tl.constexpr = TOP_K + NUM_SHARED
    keep = slot < WIDTH
    tl.store(topk_ids + row * WIDTH + slot, ids, mask=keep)
    tl.store(topk_weights + row * WIDTH + slot, weights, mask=keep)


@quick_launch
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
    NUM_SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TERMS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program per token, whose scores are sums of TERMS: logits [T, TERMS, E]."""
    if USE_PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    at = logits + row * (TERMS * E) + e
    x = tl.load(at + (TERMS - 1) * E, mask=e < E, other=float("-inf")).to(tl.float32)
    for term in tl.static_range(TERMS - 1):  # the smallest first
        x += tl.load(at + (TERMS - 2 - term) * E, mask=e < E, other=0.0).to(tl.float32)
    _choose(
        x,
        bias,
        topk_ids,
        topk_weights,
        row,
        scale,
        E,
        E_PAD,
        TOP_K,
        NUM_SHARED,
        GROUPS,
        GROUPS_KEPT,
        SIGMOID,
        HAS_BIAS,
        GROUP_TOP2,
        RENORMALISE,
    )
    if USE_PDL:
        gdc_launch_dependents()


@quick_launch
@triton.jit
def moe_norm_route_kernel(
    x,
    norm_weight,
    router,
    bias,
    normed,
    logits,
    arrivals,
    topk_ids,
    topk_weights,
    eps,
    scale,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (token, PER_PROGRAM experts): norm, that many scores; a token's last program to end
    chooses. `arrivals` int32 [T] holds zeros before and after."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    k = tl.arange(0, BLOCK)
    real = k < K
    mine = piece * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    both = (mine < E)[:, None] & real[None, :]
    w = tl.load(router + mine[:, None] * K + k[None, :], mask=both, other=0.0)
    gain = tl.load(norm_weight + k, mask=real, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * K + k, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / K
    rounded = (value * (1.0 / tl.sqrt(mean + eps)) * gain).to(normed.dtype.element_ty)
    if piece == 0:
        tl.store(normed + row * K + k, rounded, mask=real)
    scores = tl.sum(w * rounded.to(tl.float32)[None, :], axis=1)
    tl.store(logits + row * E + mine, scores, mask=mine < E)
    tl.debug_barrier()  # all of the program's scores before its arrival
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
    if arrived == tl.num_programs(1) - 1:
        tl.store(arrivals + row, 0)
        e = tl.arange(0, E_PAD)
        at = logits + row * E + e
        all_scores = tl.load(at, mask=e < E, other=float("-inf"), cache_modifier=".cg")
        _choose(
            all_scores,
            bias,
            topk_ids,
            topk_weights,
            row,
            scale,
            E,
            E_PAD,
            TOP_K,
            NUM_SHARED,
            GROUPS,
            GROUPS_KEPT,
            SIGMOID,
            HAS_BIAS,
            GROUP_TOP2,
            RENORMALISE,
        )


@quick_launch
@triton.jit(do_not_specialize=["num_pairs", "max_items"])
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


@quick_launch
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
        gdc_launch_dependents()  # they wait for this kernel's end before they read
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
