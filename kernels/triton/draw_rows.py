# SPDX-License-Identifier: Apache-2.0
"""One draw a row under temperature, top-k, top-p and min-p, without a sort.

Owns: logits -> peaks by piece of the vocabulary -> candidates and masses by piece -> one token. A
weight is relative to the likeliest token's. Those above FLOOR are candidates, few as a rule, kept
in the order of their ids; a cut is the largest number whose tail is long or heavy enough, found bit
by bit among them (a positive float orders as its bits do). A cut below FLOOR, or a piece with more
candidates than there is room for, goes over the whole row instead: slower, the same token. Sums run
in an order that the row alone decides. Does not know: launches, seeds, masks.
"""

from __future__ import annotations

from kernels._triton import tl, triton

FLOOR = tl.constexpr(1e-4)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


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
):
    """Program (row, piece): its maximum and where; +inf where a logit is NaN or +inf."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
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
def _weights(logits_row, v, vocab, peak, temperature):
    x = tl.load(logits_row + v, mask=v < vocab, other=float("-inf"))
    return tl.exp((x - peak) / temperature)


@triton.jit
def draw_candidates_kernel(
    logits,
    temperatures,
    min_ps,
    peaks,
    masses,
    counts,
    weights,
    ids,
    vocab,
    row_stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Program (row, piece). masses fp64 [S, 2, PIECES]: of all, and of what min-p keeps; counts
    int32 [S, PIECES]; weights fp32, ids int32 [S, PIECES, ROOM]: the first ROOM candidates."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    peak = tl.max(tl.load(peaks + row * PIECES + tl.arange(0, PIECES)), axis=0)
    if (temperature > 0) & (peak > float("-inf")) & (peak < float("inf")):
        min_p = tl.load(min_ps + row)
        logits_row = logits + row.to(tl.int64) * row_stride
        slot = row * PIECES + piece
        mass = tl.zeros([BLOCK], tl.float64)
        kept = tl.zeros([BLOCK], tl.float64)
        num = 0
        for step in range(STEPS):
            v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            w = _weights(logits_row, v, vocab, peak, temperature)
            mass += w.to(tl.float64)
            kept += tl.where(w >= min_p, w, 0.0).to(tl.float64)
            is_candidate = w > FLOOR
            place = num + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
            fits = is_candidate & (place < ROOM)
            tl.store(weights + slot * ROOM + place, w, mask=fits)
            tl.store(ids + slot * ROOM + place, v, mask=fits)
            num += tl.sum(is_candidate.to(tl.int32), axis=0)
        tl.store(masses + row * 2 * PIECES + piece, tl.sum(mass, axis=0))
        tl.store(masses + row * 2 * PIECES + PIECES + piece, tl.sum(kept, axis=0))
        tl.store(counts + slot, num)


@triton.jit
def _tail(w, least):
    """(how many, how heavy) of the weights from `least` on."""
    inside = (w >= least) & (w > 0)
    num = tl.sum(inside.to(tl.int32), axis=0)
    return num, tl.sum(tl.where(inside, w, 0.0).to(tl.float64), axis=0)


@triton.jit
def _row_tail(
    logits_row, vocab, peak, temperature, least, BLOCK: tl.constexpr, TOTAL_STEPS: tl.constexpr
):
    """The same over a whole row."""
    num = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for step in range(TOTAL_STEPS):
        v = step * BLOCK + tl.arange(0, BLOCK)
        w = _weights(logits_row, v, vocab, peak, temperature)
        inside = (w >= least) & (w > 0)
        num += inside.to(tl.int32)
        mass += tl.where(inside, w, 0.0).to(tl.float64)
    return tl.sum(num, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def draw_choose_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    chances,
    peaks,
    places,
    masses,
    counts,
    weights,
    ids,
    out,
    vocab,
    row_stride,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Program (row): the token that `chances` falls on, -1 without a finite maximum."""
    row = tl.program_id(0)
    p = tl.arange(0, PIECES)
    tops = tl.load(peaks + row * PIECES + p)
    peak = tl.max(tops, axis=0)
    at = tl.load(places + row * PIECES + p)
    token = tl.min(tl.where(tops == peak, at, NO_TOKEN), axis=0)
    is_sound = (peak > float("-inf")) & (peak < float("inf"))
    temperature = tl.load(temperatures + row)
    if is_sound & (temperature > 0):
        logits_row = logits + row.to(tl.int64) * row_stride
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row).to(tl.float64)
        chance = tl.load(chances + row)
        cuts_k = (top_k > 0) & (top_k < vocab)
        cuts_p = top_p < 1.0
        mass_of = tl.load(masses + row * 2 * PIECES + p)
        num_of = tl.load(counts + row * PIECES + p)
        is_whole = tl.max(num_of, axis=0) <= ROOM
        total = tl.sum(mass_of, axis=0)
        least = tl.load(min_ps + row)
        is_found = False  # the cut lies among the candidates, so the draw does too
        c = tl.arange(0, PIECES * ROOM)
        if cuts_k | cuts_p:
            held = tl.load(counts + row * PIECES + c // ROOM)
            w = tl.load(
                weights + row.to(tl.int64) * (PIECES * ROOM) + c, mask=c % ROOM < held, other=0.0
            )
            num, mass = _tail(w, 0.0)
            kth = 0.0
            is_found = is_whole
            if cuts_k:
                is_found = is_found & (num >= top_k)
                bits = 0
                for i in range(30):
                    trial = bits | (1 << (29 - i))
                    if is_found:
                        n, _ = _tail(w, _as_float(trial))
                    else:
                        n, _ = _row_tail(
                            logits_row,
                            vocab,
                            peak,
                            temperature,
                            _as_float(trial),
                            BLOCK,
                            STEPS * PIECES,
                        )
                    bits = tl.where(n >= top_k, trial, bits)
                kth = _as_float(bits)
                if is_found:
                    _, total = _tail(w, kth)
                else:
                    _, total = _row_tail(
                        logits_row, vocab, peak, temperature, kth, BLOCK, STEPS * PIECES
                    )
                least = tl.maximum(least, kth)
            if cuts_p:
                goal = top_p * total
                is_found = is_found & (mass >= goal)
                bits = 0
                for i in range(30):
                    trial = bits | (1 << (29 - i))
                    from_here = tl.maximum(_as_float(trial), kth)
                    if is_found:
                        _, m = _tail(w, from_here)
                    else:
                        _, m = _row_tail(
                            logits_row, vocab, peak, temperature, from_here, BLOCK, STEPS * PIECES
                        )
                    bits = tl.where(m >= goal, trial, bits)
                least = tl.maximum(least, _as_float(bits))
            if is_found:
                kept = tl.where(w >= least, w, 0.0).to(tl.float64)
                reached = tl.cumsum(kept, axis=0)
                target = chance * tl.sum(kept, axis=0)
                first = tl.min(tl.where((kept > 0) & (reached > target), c, NO_TOKEN), axis=0)
                last = tl.max(tl.where(kept > 0, c, -1), axis=0)
                place = tl.minimum(first, last)
                token = tl.load(ids + row.to(tl.int64) * (PIECES * ROOM) + place)
        if is_found == 0:
            # Piece by piece: their masses as they are where only min-p cuts.
            kept_of = tl.load(masses + row * 2 * PIECES + PIECES + p)
            if cuts_k | cuts_p:
                kept_of = tl.zeros([PIECES], tl.float64)
                for piece in range(PIECES):
                    mass_here = tl.zeros([BLOCK], tl.float64)
                    for step in range(STEPS):
                        v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
                        w_here = _weights(logits_row, v, vocab, peak, temperature)
                        mass_here += tl.where(w_here >= least, w_here, 0.0).to(tl.float64)
                    kept_of = tl.where(p == piece, tl.sum(mass_here, axis=0), kept_of)
            reached_of = tl.cumsum(kept_of, axis=0)
            target = chance * tl.sum(kept_of, axis=0)
            first = tl.min(tl.where((kept_of > 0) & (reached_of > target), p, NO_TOKEN), axis=0)
            last = tl.max(tl.where(kept_of > 0, p, -1), axis=0)
            piece = tl.minimum(first, last)
            before = tl.sum(tl.where(p < piece, kept_of, 0.0), axis=0)
            found = NO_TOKEN
            final = -1
            for step in range(STEPS):
                v = (piece * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
                w_here = _weights(logits_row, v, vocab, peak, temperature)
                kept_here = tl.where(w_here >= least, w_here, 0.0).to(tl.float64)
                passed = before + tl.cumsum(kept_here, axis=0)
                hit = (kept_here > 0) & (passed > target)
                found = tl.minimum(found, tl.min(tl.where(hit, v, NO_TOKEN), axis=0))
                final = tl.maximum(final, tl.max(tl.where(kept_here > 0, v, -1), axis=0))
                before += tl.sum(kept_here, axis=0)
            token = tl.minimum(found, final)
    tl.store(out + row, tl.where(is_sound, token, -1))
