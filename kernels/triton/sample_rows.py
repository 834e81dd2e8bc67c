# SPDX-License-Identifier: Apache-2.0
"""Greedy choice under a bitmask, and the first and last operations of a decode step.

Owns: logits + masks -> token ids, fed back; token ids -> rows of the embedding. Does not know:
launches, where parameters come from. Rows are split over programs; the last program of a row to
end folds what the others found (in the order of the pieces, so results do not depend on it).
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit
def greedy_rows_kernel(
    logits,
    rows,
    slots,
    masks,
    next_ids,
    token_ids,
    peaks,
    places,
    arrivals,
    vocab,
    row_stride,
    mask_stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (sample, piece of the vocabulary). rows, slots fp64 [S]: the sample's row of logits
    and its row of masks and next_ids. peaks fp32, places int32 [S, PIECES]; arrivals int32 [S],
    zeros before and after. A row with a NaN, or without a finite maximum, before or behind its
    mask, gives -1 (and 0 to next_ids)."""
    sample = tl.program_id(0)
    piece = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows + sample).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for step in range(STEPS):
        v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        real = v < vocab
        x = tl.load(logits + row * row_stride + v, mask=real, other=float("-inf"))
        word = tl.load(masks + slot * mask_stride + v // 32, mask=real, other=0)
        allowed = ((word >> (v % 32)) & 1) == 1
        bad = bad | ((x != x) | (x == float("inf"))).to(tl.int32)
        take = allowed & (x > best)
        best = tl.where(take, x, best)
        at = tl.where(take, v, at)
    top = tl.max(best, axis=0)
    place = tl.min(tl.where(best == top, at, 0x7FFFFFFF), axis=0)
    top = tl.where(tl.max(bad, axis=0) > 0, float("inf"), top)
    tl.store(peaks + sample * PIECES + piece, top)
    tl.store(places + sample * PIECES + piece, place)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + sample, 1, sem="acq_rel")
    if arrived == PIECES - 1:
        tl.store(arrivals + sample, 0)
        p = sample * PIECES + tl.arange(0, PIECES)
        tops = tl.load(peaks + p, cache_modifier=".cg")
        found = tl.load(places + p, cache_modifier=".cg")
        peak = tl.max(tops, axis=0)
        token = tl.min(tl.where(tops == peak, found, 0x7FFFFFFF), axis=0)
        is_sound = (peak > float("-inf")) & (peak < float("inf"))
        tl.store(token_ids + sample, tl.where(is_sound, token, -1))
        tl.store(next_ids + slot, tl.where(is_sound, token, 0))


@quick_launch
@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["ids", "slots"])
def feed_ids_kernel(ids, slots, next_ids, out, num, vocab, BLOCK: tl.constexpr):
    """Program (block of tokens): -1 becomes next_ids[slot]; no id leaves the vocabulary."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = t < num
    index = tl.load(ids + t, mask=real, other=0)
    slot = tl.load(slots + t, mask=real, other=0)
    fed = tl.load(next_ids + slot, mask=real & (index < 0), other=0)
    index = tl.where(index < 0, fed, index)
    tl.store(out + t, tl.minimum(tl.maximum(index, 0), vocab - 1), mask=real)


@quick_launch
@triton.jit
def embed_rows_kernel(ids, table, out, H: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """Program (token, block of columns): out = table[id]."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(ids + token).to(tl.int64)
    value = tl.load(table + index * H + h, mask=h < H)
    tl.store(out + token.to(tl.int64) * H + h, value.to(out.dtype.element_ty), mask=h < H)
    if USE_PDL:
        gdc_launch_dependents()
