# SPDX-License-Identifier: Apache-2.0
"""Split-KV work list and merge of partial results, shared by every MLA decode kernel.

Owns: what rows share, cutting the concatenated KV tiles of a batch into equal runs, one per part (a
resident program), and folding the partial outputs of a row that several parts worked on. Does not
know: how a part computes its tiles.

The list is of spans: where rows are grouped, one a group of the tiles that its rows share, then one
a row of what is its own; else one a row. A span of a group has the queries of all its rows.

Plan layout, int32, `[num_parts * 8 + 11 * max_spans + 1]`, written on the device, valid for every
layer of one step: per part (span, first tile in the span, tiles, tiles of the span, slot of the
row, page of the first tile, tiles of the span without this step's tokens, the span's first tile in
its row), so that a part reads its start in one access; then `tile_indptr[num_spans + 1]`; then per
span (its first part, its number of parts); then, where rows are grouped, per span (slot, its first
tile in the row, tokens, first query token, query tokens, whether its result is one of several, 0,
0). Part `p` works on global tiles `[p * quota, (p + 1) * quota)`; its partial result for span `b`
lies in slot `p + b`: along the list each step raises p or b by one, so slots never collide and
`num_parts + num_spans` of them are enough.
Source: the tile scheduler of FlashMLA (contiguous runs over requests), LSE merging of split-KV
attention (FlashDecoding), shared prefixes read once (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens", "row_slots"]
)
def mla_shared_kernel(
    seq_lens,
    page_table,
    row_slots,
    shared,
    num_rows,
    page_table_stride,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Program g: shared[g] [2], how many leading tiles rows of group g have in common with its
    first one, and which rows, as bits: as many of both as spares most tiles. This step's own tokens
    are not among them; 0 where they are fewer than LEAST or no second row has them."""
    first = tl.program_id(0) * GROUP
    i = tl.arange(0, GROUP)
    is_row = first + i < num_rows
    lens = tl.load(seq_lens + first + i, mask=is_row, other=0)
    full = tl.maximum(lens - 1, 0) // TILE
    slots = tl.load(row_slots + first + i, mask=is_row, other=0).to(tl.int64)
    mine = tl.load(row_slots + first).to(tl.int64) * page_table_stride
    bound = tl.max(tl.where(i == 0, full, 0), axis=0)
    same = tl.minimum(full, bound)
    t = tl.arange(0, CHUNK)
    for start in range(0, bound, CHUNK):
        at = start + t
        page = tl.load(page_table + mine + at, mask=at < bound, other=0)
        keep = at[None, :] < same[:, None]
        where = page_table + slots[:, None] * page_table_stride + at[None, :]
        differs = keep & (tl.load(where, mask=keep, other=0) != page[None, :])
        same = tl.minimum(same, tl.min(tl.where(differs, at[None, :], 1 << 30), axis=1))
    # Of each row's tiles as the number that is shared: how many rows have them.
    num = tl.sum((same[None, :] >= same[:, None]).to(tl.int32), axis=1)
    spared = tl.where(same >= LEAST, same * (num - 1), 0)
    most = tl.max(spared, axis=0)
    chosen = tl.max(tl.where((spared == most) & (most > 0), same, 0), axis=0)
    rows = tl.sum(tl.where((same >= chosen) & (chosen > 0), 1 << i, 0), axis=0)
    tl.store(shared + tl.program_id(0) * 2, chosen)
    tl.store(shared + tl.program_id(0) * 2 + 1, rows)


@triton.jit
def _span(
    span, seq_lens, shared, uses, num_rows, num_groups, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """(tiles, first tile in the row, tokens, row) of spans; `uses` 0: as if nothing were shared. A
    row without KV still gets one (fully masked) tile."""
    if GROUP == 1:
        lens = tl.load(seq_lens + span, mask=span < num_rows, other=0)
        tiles = tl.maximum((lens + TILE - 1) // TILE, 1)
        return tl.where(span < num_rows, tiles, 0), lens * 0, lens, span
    is_group = span < num_groups
    is_row = (span >= num_groups) & (span < num_groups + num_rows)
    row = tl.where(is_group, span * GROUP, span - num_groups)
    lens = tl.load(seq_lens + row, mask=is_row, other=0)
    group = row // GROUP
    common = tl.load(shared + group * 2, mask=is_group | is_row, other=0) * uses
    rows = tl.load(shared + group * 2 + 1, mask=is_row, other=0)
    offset = tl.where(((rows >> (row % GROUP)) & 1) == 1, common, 0)
    own = tl.maximum((lens + TILE - 1) // TILE, 1) - offset
    tiles = tl.where(is_group, common, tl.where(is_row, own, 0))
    return tiles, offset, tl.where(is_group, common * TILE, lens - offset * TILE), row


@quick_launch
@triton.jit(
    do_not_specialize=["num_rows", "num_groups"],
    do_not_specialize_on_alignment=["seq_lens", "row_slots"],
)
def mla_plan_kernel(
    seq_lens,
    page_table,
    row_slots,
    shared,
    plan,
    num_rows,
    num_groups,
    page_table_stride,
    TILE: tl.constexpr,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    SPANS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program: lengths, and what groups share if it spares LEAST tiles or more -> plan."""
    num_spans = num_groups + num_rows
    every = tl.arange(0, SPANS_PAD)
    uses = 1
    all_tiles, skipped, _tokens, _row = _span(
        every, seq_lens, shared, uses, num_rows, num_groups, TILE, GROUP
    )
    if GROUP > 1:
        read = tl.where(every < num_groups, all_tiles, 0)
        uses = (tl.sum(skipped - read, axis=0) >= LEAST).to(tl.int32)
        all_tiles, skipped, _tokens, _row = _span(
            every, seq_lens, shared, uses, num_rows, num_groups, TILE, GROUP
        )
    total = tl.sum(all_tiles, axis=0)
    quota = (total + NUM_PARTS - 1) // NUM_PARTS
    indptr = plan + NUM_PARTS * 8
    tl.store(indptr, 0)
    span_parts = indptr + num_spans + 1
    spans = span_parts + num_spans * 2

    parts = tl.arange(0, PARTS_PAD)
    starts = parts * quota
    span = tl.zeros([PARTS_PAD], tl.int32)
    base = tl.zeros([PARTS_PAD], tl.int32)
    done = total * 0
    # A chunk of spans at a time: all at once would spill (256 parts x 256 rows in one program).
    for r0 in range(0, num_spans, CHUNK):
        some = r0 + tl.arange(0, CHUNK)
        real = some < num_spans
        tiles, offset, tokens, row = _span(
            some, seq_lens, shared, uses, num_rows, num_groups, TILE, GROUP
        )
        ends = done + tl.cumsum(tiles, axis=0)
        tl.store(indptr + 1 + some, ends, mask=real)
        first = (ends - tiles) // quota
        num = tl.where(tiles > 0, (ends - 1) // quota - first + 1, 0)
        tl.store(span_parts + some * 2, first, mask=real)
        tl.store(span_parts + some * 2 + 1, num, mask=real)
        if GROUP > 1:
            is_group = some < num_groups
            slots = tl.load(row_slots + row, mask=real, other=0)
            tl.store(spans + some * 8, slots, mask=real)
            tl.store(spans + some * 8 + 1, offset, mask=real)
            tl.store(spans + some * 8 + 2, tokens, mask=real)
            tl.store(spans + some * 8 + 3, row, mask=real)
            queries = tl.where(is_group, tl.minimum(GROUP, num_rows - row), 1)
            tl.store(spans + some * 8 + 4, queries, mask=real)
            is_part = (is_group | (offset > 0)).to(tl.int32)
            tl.store(spans + some * 8 + 5, is_part, mask=real)
        before = (ends[None, :] <= starts[:, None]) & real[None, :]
        span += tl.sum(before.to(tl.int32), axis=1)
        base += tl.sum(tl.where(before, tiles[None, :], 0), axis=1)
        done += tl.sum(tiles, axis=0)
    count = tl.minimum(quota, tl.maximum(total - starts, 0))
    keep = parts < NUM_PARTS
    busy = keep & (count > 0)
    live = tl.where(busy, span, 0)
    tiles, offset, tokens, row = _span(
        live, seq_lens, shared, uses, num_rows, num_groups, TILE, GROUP
    )
    tl.store(plan + parts * 8, span, mask=keep)
    tl.store(plan + parts * 8 + 1, starts - base, mask=keep)
    tl.store(plan + parts * 8 + 2, count, mask=keep)
    tl.store(plan + parts * 8 + 3, tiles, mask=keep)
    # Up to 15 rows before this one may write tokens of the same sequence in this step: drafts.
    settled = tl.maximum(tokens - Q_LEN - 15, 0) // TILE
    tl.store(plan + parts * 8 + 6, settled, mask=keep)
    slot = tl.load(row_slots + row, mask=busy, other=0)
    tl.store(plan + parts * 8 + 4, slot, mask=keep)
    at = slot.to(tl.int64) * page_table_stride + offset + starts - base
    tl.store(plan + parts * 8 + 5, tl.load(page_table + at, mask=busy, other=0), mask=keep)
    tl.store(plan + parts * 8 + 7, offset, mask=keep)


@triton.jit
def parts_of_row(plan, b, num_rows, num_groups, NUM_PARTS: tl.constexpr, GROUP: tl.constexpr):
    """Where the partial results of row b lie: (slot of the first of its group, their number, slot
    of the first of its own, their number). One in all: the row was held whole."""
    num_spans = num_groups + num_rows
    span_parts = plan + NUM_PARTS * 8 + num_spans + 1
    span = num_groups + b
    first = tl.load(span_parts + span * 2)
    num = tl.load(span_parts + span * 2 + 1)
    if GROUP == 1:
        return first * 0, first * 0, first + span, num
    group = b // GROUP
    is_in = tl.load(span_parts + num_spans * 2 + span * 8 + 5)
    group_first = tl.load(span_parts + group * 2)
    group_num = tl.load(span_parts + group * 2 + 1)
    return group_first + group, group_num * is_in, first + span, num


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def mla_merge_kernel(
    partial_out,
    partial_lse,
    out,
    plan,
    num_rows,
    num_groups,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, query row, slice of D): out = sum_p 2^(lse_p - lse) * partial_p."""
    b = tl.program_id(0)
    r = tl.program_id(1)
    shared_slot, num_shared, slot, num_own = parts_of_row(
        plan, b, num_rows, num_groups, NUM_PARTS, GROUP
    )
    num = num_shared + num_own
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()  # they wait for this kernel's end before they read its output
    if num > 1:
        d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
        top = float("-inf")
        norm = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for p0 in range(0, num, BLOCK_P):
            p = p0 + tl.arange(0, BLOCK_P)
            live = p < num
            at = (slot + p).to(tl.int64) * ROWS_PAD + r
            if GROUP > 1:
                among = (shared_slot + p).to(tl.int64) * ROWS_PAD + b % GROUP * ROWS + r
                at = tl.where(p < num_shared, among, at - num_shared * ROWS_PAD)
            lse = tl.load(partial_lse + at, mask=live, other=float("-inf"))
            part = tl.load(
                partial_out + at[:, None] * D + d[None, :], mask=live[:, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(lse - safe_top)
            shrink = tl.exp2(top - safe_top)
            norm = norm * shrink + tl.sum(weight, axis=0)
            acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
            top = new_top
        inv = 1.0 / tl.where(norm > 0.0, norm, 1.0)  # no KV: the sum is zero anyway
        o = (b.to(tl.int64) * ROWS + r) * D + d
        tl.store(out + o, (acc * inv).to(out.dtype.element_ty))
