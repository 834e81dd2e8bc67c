# SPDX-License-Identifier: Apache-2.0
"""Split-KV work list and merge of partial results, shared by every MLA decode kernel.

Owns: cutting the concatenated KV tiles of a batch into equal runs, one per part (a resident
program), and folding the partial outputs of a row that several parts worked on. Does not know:
how a part computes its tiles.

Plan layout, int32, `[num_parts * 8 + 3 * max_rows + 1]`, written on the device, valid for every
layer of one step: per part (row, first tile in the row, tiles, tiles of the row, slot of the row,
page of the first tile, tiles of the row without this step's tokens, 0), so that a part reads its
start in one access; then `tile_indptr[num_rows + 1]`; then per row (its first part, its number of
parts). Part `p` works on global tiles `[p * quota, (p + 1) * quota)`; its partial result for row
`b` lies in slot `p + b`: along the list each step raises p or b by one, so slots never collide
and `num_parts + num_rows` of them are enough.
Source: the tile scheduler of FlashMLA (contiguous runs over requests) and LSE merging of split-KV
attention (FlashDecoding).
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["seq_lens", "row_slots"])
def mla_plan_kernel(
    seq_lens,
    page_table,
    row_slots,
    plan,
    num_rows,
    page_table_stride,
    TILE: tl.constexpr,
    Q_LEN: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: lengths -> plan. A row without KV still gets one (fully masked) tile."""
    rows = tl.arange(0, ROWS_PAD)
    all_lens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    all_tiles = tl.maximum((all_lens + TILE - 1) // TILE, 1)
    total = tl.sum(tl.where(rows < num_rows, all_tiles, 0), axis=0)
    quota = (total + NUM_PARTS - 1) // NUM_PARTS
    indptr = plan + NUM_PARTS * 8
    tl.store(indptr, 0)
    row_parts = indptr + num_rows + 1

    parts = tl.arange(0, PARTS_PAD)
    starts = parts * quota
    row = tl.zeros([PARTS_PAD], tl.int32)
    base = tl.zeros([PARTS_PAD], tl.int32)
    done = total * 0
    # A chunk of rows at a time: all at once would spill (256 parts x 256 rows in one program).
    for r0 in range(0, num_rows, CHUNK):
        some = r0 + tl.arange(0, CHUNK)
        lens = tl.load(seq_lens + some, mask=some < num_rows, other=0)
        tiles = tl.where(some < num_rows, tl.maximum((lens + TILE - 1) // TILE, 1), 0)
        ends = done + tl.cumsum(tiles, axis=0)
        tl.store(indptr + 1 + some, ends, mask=some < num_rows)
        first = (ends - tiles) // quota
        tl.store(row_parts + some * 2, first, mask=some < num_rows)
        tl.store(row_parts + some * 2 + 1, (ends - 1) // quota - first + 1, mask=some < num_rows)
        before = (ends[None, :] <= starts[:, None]) & (some < num_rows)[None, :]
        row += tl.sum(before.to(tl.int32), axis=1)
        base += tl.sum(tl.where(before, tiles[None, :], 0), axis=1)
        done += tl.sum(tiles, axis=0)
    count = tl.minimum(quota, tl.maximum(total - starts, 0))
    keep = parts < NUM_PARTS
    tl.store(plan + parts * 8, row, mask=keep)
    tl.store(plan + parts * 8 + 1, starts - base, mask=keep)
    tl.store(plan + parts * 8 + 2, count, mask=keep)
    busy = keep & (count > 0)
    row_len = tl.load(seq_lens + row, mask=busy, other=0)
    tl.store(plan + parts * 8 + 3, tl.maximum((row_len + TILE - 1) // TILE, 1), mask=keep)
    # Up to 15 rows before this one may write tokens of the same sequence in this step: drafts.
    settled = tl.maximum(row_len - Q_LEN - 15, 0) // TILE
    tl.store(plan + parts * 8 + 6, settled, mask=keep)
    slot = tl.load(row_slots + row, mask=busy, other=0)
    tl.store(plan + parts * 8 + 4, slot, mask=keep)
    at = slot.to(tl.int64) * page_table_stride + starts - base
    tl.store(plan + parts * 8 + 5, tl.load(page_table + at, mask=busy, other=0), mask=keep)


@quick_launch
@triton.jit
def mla_merge_kernel(
    partial_out,
    partial_lse,
    out,
    plan,
    num_rows,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    D: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, query row, slice of D): out = sum_p 2^(lse_p - lse) * partial_p."""
    b = tl.program_id(0)
    r = tl.program_id(1)
    indptr = plan + NUM_PARTS * 8
    first = tl.load(indptr + num_rows + 1 + b * 2)
    num = tl.load(indptr + num_rows + 1 + b * 2 + 1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()  # they wait for this kernel's end before they read its output
    if num > 1:
        slot = first + b
        d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
        top = float("-inf")
        norm = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for p0 in range(0, num, BLOCK_P):
            p = p0 + tl.arange(0, BLOCK_P)
            live = p < num
            lse = tl.load(partial_lse + (slot + p) * ROWS_PAD + r, mask=live, other=float("-inf"))
            offsets = ((slot + p).to(tl.int64) * ROWS_PAD + r)[:, None] * D + d[None, :]
            part = tl.load(partial_out + offsets, mask=live[:, None], other=0.0)
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
