# SPDX-License-Identifier: Apache-2.0
"""One draw a row under temperature, top-k, top-p and min-p, without a sort.

Owns: logits -> peaks by piece of the vocabulary -> weights relative to the likeliest token's ->
cuts -> masses by piece -> one token. A cut is the largest number whose tail is long or heavy
enough. A positive float orders as its bits do, so it is found five bits a pass: each program sums
what its piece has above 32 numbers at once, and the next pass's programs narrow the interval from
all pieces' sums. No pass depends on how flat a row is. Sums run in an order that the row alone
decides. Does not know: launches, seeds, masks.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
TRIALS = tl.constexpr(32)  # numbers a pass
TRIAL_BITS = tl.constexpr(5)
PASSES = tl.constexpr(6)
BITS = tl.constexpr(30)  # of numbers up to 1


@triton.jit
def draw_peaks_kernel(
    logits,
    peaks,
    places,
    vocab,
    row_stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, piece): its maximum and where; +inf where a logit is NaN or +inf."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    bad = tl.zeros([BLOCK], tl.int32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for step in range(STEPS):
        v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * row_stride + v, mask=v < vocab, other=float("-inf"))
        bad = bad | ((x != x) | (x == float("inf"))).to(tl.int32)
        take = x > best
        best = tl.where(take, x, best)
        at = tl.where(take, v, at)
    top = tl.max(best, axis=0)
    place = tl.min(tl.where(best == top, at, NO_TOKEN), axis=0)
    tl.store(peaks + row * PIECES + piece, tl.where(tl.max(bad, axis=0) > 0, float("inf"), top))
    tl.store(places + row * PIECES + piece, place)


@triton.jit
def _is_drawn(peak, temperature):
    return (temperature > 0) & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def draw_weights_kernel(
    logits,
    temperatures,
    peaks,
    weights,
    vocab,
    row_stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, piece). weights fp32 [S, PIECES * STEPS * BLOCK]; 0 behind the vocabulary."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(temperatures + row)
    peak = tl.max(tl.load(peaks + row * PIECES + tl.arange(0, PIECES)), axis=0)
    if _is_drawn(peak, temperature):
        for step in range(STEPS):
            v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            at = logits + row.to(tl.int64) * row_stride + v
            x = tl.load(at, mask=v < vocab, other=float("-inf"))
            w = tl.exp((x - peak) / temperature)
            tl.store(weights + row.to(tl.int64) * (PIECES * STEPS * BLOCK) + v, w)


@triton.jit
def _sums_of(sums, row, number, PIECES: tl.constexpr):
    """All pieces' sums of a pass -> of the row, [TRIALS]."""
    p = tl.arange(0, PIECES)
    t = tl.arange(0, TRIALS)
    base = sums + (row * PASSES + number).to(tl.int64) * (PIECES * TRIALS)
    return tl.sum(tl.load(base + p[:, None] * TRIALS + t[None, :]), axis=0)


@triton.jit
def _narrowed(sums, lows, row, number, share, PIECES: tl.constexpr):
    """Where the interval of pass `number` begins: bits of the largest trial of the pass before that
    has its goal. `share`: of the whole row's sum in the first pass, or at 1 and more a count."""
    low = 0
    if number > 0:
        t = tl.arange(0, TRIALS)
        whole = tl.max(_sums_of(sums, row, 0, PIECES), axis=0)  # of the trial 0
        goal = tl.where(share < 1.0, share * whole, share)
        found = _sums_of(sums, row, number - 1, PIECES)
        best = tl.max(tl.where((found >= goal) & (found > 0), t, 0), axis=0)
        step = tl.full((), 1, tl.int32) << (BITS - TRIAL_BITS * number)
        low = tl.load(lows + row * (PASSES + 1) + number - 1) + best * step
    return low


@triton.jit
def _shares(top_ks, top_ps, row, vocab):
    """(count that top-k keeps, share that top-p keeps); 0 where they cut nothing."""
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0).to(tl.float64)
    return k, tl.where(top_p < 1.0, top_p, 0.0)


@triton.jit(do_not_specialize=["number"])
def draw_search_kernel(
    temperatures,
    top_ks,
    top_ps,
    peaks,
    weights,
    k_sums,
    k_lows,
    p_sums,
    p_lows,
    vocab,
    number,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, piece), pass `number`. sums fp64 [S, PASSES, PIECES, TRIALS]: how many (of k)
    or how heavy (of p) the weights from each trial on are; lows int32 [S, PASSES + 1]: bits."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    peak = tl.max(tl.load(peaks + row * PIECES + tl.arange(0, PIECES)), axis=0)
    k, p = _shares(top_ks, top_ps, row, vocab)
    share = k if BY_COUNT else p
    if _is_drawn(peak, tl.load(temperatures + row)) & (share > 0):
        sums = k_sums if BY_COUNT else p_sums
        lows = k_lows if BY_COUNT else p_lows
        low = _narrowed(sums, lows, row, number, share, PIECES)
        if piece == 0:
            tl.store(lows + row * (PASSES + 1) + number, low)
        step = tl.full((), 1, tl.int32) << (BITS - TRIAL_BITS * (number + 1))
        trials = (low + tl.arange(0, TRIALS) * step).to(tl.float32, bitcast=True)
        # Top-p counts what top-k left.
        if (not BY_COUNT) & (k > 0):
            trials = tl.maximum(trials, _cut(k_sums, k_lows, row, k, PIECES))
        CHUNK: tl.constexpr = 128
        heavy = tl.zeros([CHUNK, TRIALS], tl.float64)
        many = tl.zeros([CHUNK, TRIALS], tl.int32)
        base = weights + (row * PIECES + piece).to(tl.int64) * (STEPS * BLOCK)
        for chunk in range(STEPS * BLOCK // CHUNK):
            w = tl.load(base + chunk * CHUNK + tl.arange(0, CHUNK))
            inside = (w[:, None] >= trials[None, :]) & (w[:, None] > 0)
            if BY_COUNT:
                many += inside.to(tl.int32)
            else:
                heavy += tl.where(inside, w.to(tl.float64)[:, None], 0.0)
        total = tl.sum(many, axis=0).to(tl.float64) if BY_COUNT else tl.sum(heavy, axis=0)
        at = (row * PASSES + number).to(tl.int64) * PIECES + piece
        tl.store(sums + at * TRIALS + tl.arange(0, TRIALS), total)


@triton.jit
def _cut(sums, lows, row, share, PIECES: tl.constexpr):
    """The weight that a finished search found."""
    return _narrowed(sums, lows, row, PASSES, share, PIECES).to(tl.float32, bitcast=True)


@triton.jit
def draw_masses_kernel(
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    peaks,
    weights,
    k_sums,
    k_lows,
    p_sums,
    p_lows,
    least_of,
    masses,
    vocab,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, piece). least_of fp32 [S]: the least weight kept; masses fp64 [S, PIECES]."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    peak = tl.max(tl.load(peaks + row * PIECES + tl.arange(0, PIECES)), axis=0)
    if _is_drawn(peak, tl.load(temperatures + row)):
        k, p = _shares(top_ks, top_ps, row, vocab)
        least = tl.load(min_ps + row)
        if k > 0:
            least = tl.maximum(least, _cut(k_sums, k_lows, row, k, PIECES))
        if p > 0:
            least = tl.maximum(least, _cut(p_sums, p_lows, row, p, PIECES))
        mass = tl.zeros([BLOCK], tl.float64)
        base = weights + (row * PIECES + piece).to(tl.int64) * (STEPS * BLOCK)
        for step in range(STEPS):
            w = tl.load(base + step * BLOCK + tl.arange(0, BLOCK))
            mass += tl.where(w >= least, w, 0.0).to(tl.float64)
        tl.store(masses + row * PIECES + piece, tl.sum(mass, axis=0))
        if piece == 0:
            tl.store(least_of + row, least)


@triton.jit
def draw_choose_kernel(
    temperatures,
    chances,
    peaks,
    places,
    weights,
    least_of,
    masses,
    out,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row): the token that `chances` falls on, -1 without a finite maximum."""
    row = tl.program_id(0)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.arange(0, PIECES)
    tops = tl.load(peaks + row * PIECES + p)
    peak = tl.max(tops, axis=0)
    at = tl.load(places + row * PIECES + p)
    token = tl.min(tl.where(tops == peak, at, NO_TOKEN), axis=0)
    if _is_drawn(peak, tl.load(temperatures + row)):
        least = tl.load(least_of + row)
        kept_of = tl.load(masses + row * PIECES + p)
        target = tl.load(chances + row) * tl.sum(kept_of, axis=0)
        reached_of = tl.cumsum(kept_of, axis=0)
        first = tl.min(tl.where((kept_of > 0) & (reached_of > target), p, NO_TOKEN), axis=0)
        last = tl.max(tl.where(kept_of > 0, p, -1), axis=0)
        piece = tl.minimum(first, last)
        before = tl.sum(tl.where(p < piece, kept_of, 0.0), axis=0)
        found = NO_TOKEN
        final = -1
        base = weights + (row * PIECES + piece).to(tl.int64) * (STEPS * BLOCK)
        for step in range(STEPS):
            v = step * BLOCK + tl.arange(0, BLOCK)
            w = tl.load(base + v)
            kept = tl.where(w >= least, w, 0.0).to(tl.float64)
            passed = before + tl.cumsum(kept, axis=0)
            hit = (kept > 0) & (passed > target)
            found = tl.minimum(found, tl.min(tl.where(hit, v, NO_TOKEN), axis=0))
            final = tl.maximum(final, tl.max(tl.where(kept > 0, v, -1), axis=0))
            before += tl.sum(kept, axis=0)
        token = piece * (STEPS * BLOCK) + tl.minimum(found, final)
    is_sound = (peak > float("-inf")) & (peak < float("inf"))
    tl.store(out + row, tl.where(is_sound, token, -1))
