# SPDX-License-Identifier: Apache-2.0
"""The sort of (token, choice) pairs by expert where there are many: a counting sort by blocks.

Owns: the order of pairs and the work items, as moe_align_kernel (moe_route.py) makes them, which
reads all pairs once for each expert: too long from some thousand pairs on. Does not know: tokens.
"""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit(do_not_specialize=["num_pairs"])
def moe_count_kernel(topk_ids, counts, num_pairs, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block of pairs): counts[block, expert] = how many of its pairs are the expert's."""
    block = tl.program_id(0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(topk_ids + p, mask=p < num_pairs, other=0)
    tl.store(
        counts + block * E_PAD + tl.arange(0, E_PAD), tl.histogram(ids, E_PAD, mask=p < num_pairs)
    )


@quick_launch
@triton.jit(do_not_specialize=["num_pairs", "max_items"])
def moe_place_kernel(
    topk_ids,
    counts,
    pairs,
    item_expert,
    item_begin,
    item_count,
    num_pairs,
    max_items,
    E_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (BLOCK pairs): where they go, ascending within an expert. COUNTED: the pairs of a row
    of counts. The first program also writes the items and empties the unused ones."""
    block = tl.program_id(0)
    num_counts = (num_pairs + COUNTED - 1) // COUNTED
    counted = block * BLOCK // COUNTED
    e = tl.arange(0, E_PAD)
    # Pairs of the same row of counts that lie before mine.
    lead = tl.arange(0, COUNTED)
    inside = lead < block * BLOCK - counted * COUNTED
    ids = tl.load(topk_ids + counted * COUNTED + lead, mask=inside, other=0)
    before = tl.histogram(ids, E_PAD, mask=inside)
    total = tl.zeros([E_PAD], tl.int32)
    for first in range(0, num_counts, ROWS):
        row = first + tl.arange(0, ROWS)
        some = tl.load(
            counts + row[:, None] * E_PAD + e[None, :], mask=(row < num_counts)[:, None], other=0
        )
        total += tl.sum(some, axis=0)
        before += tl.sum(tl.where((row < counted)[:, None], some, 0), axis=0)
    begin = tl.cumsum(total, axis=0) - total
    i = tl.arange(0, BLOCK)
    p = block * BLOCK + i
    ids = tl.load(topk_ids + p, mask=p < num_pairs, other=E_PAD)
    earlier = (ids[None, :] == ids[:, None]) & (i[None, :] < i[:, None])
    place = tl.sum(earlier.to(tl.int32), axis=1)
    if E_PAD <= 256:
        place += tl.sum(tl.where(ids[:, None] == e[None, :], (begin + before)[None, :], 0), axis=1)
    else:  # a comparison with so many would not fit into the registers
        place += tl.gather(begin + before, tl.where(p < num_pairs, ids, 0), 0)
    tl.store(pairs + place, p, mask=p < num_pairs)
    if block == 0:
        items = (total + TOKENS - 1) // TOKENS
        item0 = tl.cumsum(items, axis=0) - items
        for j in range(tl.max(items, axis=0)):
            mine = j < items
            tl.store(item_expert + item0 + j, e, mask=mine)
            tl.store(item_begin + item0 + j, begin + j * TOKENS, mask=mine)
            tl.store(item_count + item0 + j, tl.minimum(total - j * TOKENS, TOKENS), mask=mine)
        used = tl.sum(items, axis=0)
        for i0 in range(0, max_items, E_PAD):
            unused = i0 + e
            zero = tl.zeros([E_PAD], tl.int32)
            tl.store(item_count + unused, zero, mask=(unused >= used) & (unused < max_items))
