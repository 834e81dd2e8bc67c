# SPDX-License-Identifier: Apache-2.0
"""Grouped W4 GEMM of a mixture of experts: out^T = W_expert x^T, weights expanded in registers.

Owns: one (row tile, work item) of one of the two GEMMs; SwiGLU is the first one's epilogue, the
router weight the second one's. Does not know: routing (moe_route.py), packing
(kernels/w4_layout.py). Operands are swapped: weight rows are the M axis, the item's tokens (at
most TOKENS) the N axis, so a handful of tokens pads to 16 columns and not to 64 rows. Weights
arrive in the order in which one thread feeds them to the tensor cores, 16 bytes a thread, so the
expanded tile needs no exchange between threads (layouts checked in the compiled code: no
shared-memory round trip).
Source: the register order is Marlin's idea (Frantar et al., arXiv 2408.11743).
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.moe_combine import combine_token, combine_tokens
from kernels.triton.quick_launch import quick_launch

# Eight e2m1 codes of one word: sign and magnitude bits moved to where bf16 has them (value
# times 2^-126), then times the scale, which carries 2^118. The products are exact: HMUL2 keeps
# subnormals.
_FP4_ASM = tl.constexpr("""
{
.reg .b32 t, u, p, q;
.reg .b16 g, h;
mov.b32 {g, h}, $5;
mov.b32 p, {g, g};
mov.b32 q, {h, h};
and.b32 t, $4, 0x81C081C0;
mul.bf16x2 $0, t, p;
shl.b32 t, $4, 3;
and.b32 t, t, 0x81C081C0;
mul.bf16x2 $1, t, q;
shl.b32 t, $4, 6;
and.b32 t, t, 0x81C081C0;
mul.bf16x2 $2, t, p;
shl.b32 t, $4, 1;
and.b32 t, t, 0x80008000;
shr.b32 u, $4, 3;
and.b32 u, u, 0x01800180;
or.b32 t, t, u;
shr.b32 u, $4, 7;
and.b32 u, u, 0x00400040;
or.b32 t, t, u;
mul.bf16x2 $3, t, q;
}
""")
# Eight offset-binary int4 codes: 0x4300 | code is bf16 128 + code; (v - 136) * scale in one fma,
# exact because -136 * 2^e is a bf16 number.
_INT4_ASM = tl.constexpr("""
{
.reg .b32 t, m, c, p, q, x, y;
.reg .b16 g, h;
mov.b32 {g, h}, $5;
mov.b32 p, {g, g};
mov.b32 q, {h, h};
mov.b32 c, 0x43004300;
mov.b32 m, 0xC308C308;
mul.bf16x2 x, p, m;
mul.bf16x2 y, q, m;
and.b32 t, $4, 0x000F000F;
or.b32 t, t, c;
fma.rn.bf16x2 $0, t, p, x;
shr.b32 t, $4, 4;
and.b32 t, t, 0x000F000F;
or.b32 t, t, c;
fma.rn.bf16x2 $1, t, q, y;
shr.b32 t, $4, 8;
and.b32 t, t, 0x000F000F;
or.b32 t, t, c;
fma.rn.bf16x2 $2, t, p, x;
shr.b32 t, $4, 12;
and.b32 t, t, 0x000F000F;
or.b32 t, t, c;
fma.rn.bf16x2 $3, t, q, y;
}
""")


@triton.jit
def _half(word, HIGH: tl.constexpr, PORTABLE: tl.constexpr):
    """One of the two bf16 numbers of a word; as fp32 in the portable form."""
    if HIGH:
        word = word >> 16
    if PORTABLE:
        return ((word & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    return word.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def word_pair(word, scale, HIGH: tl.constexpr, INT4: tl.constexpr, PORTABLE: tl.constexpr):
    """The two weights of a word; HIGH says which half of `scale` is theirs (portable form only)."""
    low = _half(word, False, PORTABLE)
    high = _half(word, True, PORTABLE)
    if PORTABLE:
        s = _half(scale, HIGH, True)
        if INT4:
            return tl.join((low - 136.0) * s, (high - 136.0) * s)
        return tl.join(low * s, high * s)
    return tl.join(low, high)


@triton.jit
def decode_words(codes, scale, INT4: tl.constexpr, PORTABLE: tl.constexpr):
    """The four pairs of each word of eight codes, scaled (in the portable form: not yet)."""
    if PORTABLE:
        if INT4:
            a0 = (codes & 0x000F000F) | 0x43004300
            a1 = ((codes >> 4) & 0x000F000F) | 0x43004300
            a2 = ((codes >> 8) & 0x000F000F) | 0x43004300
            a3 = ((codes >> 12) & 0x000F000F) | 0x43004300
        else:
            a0 = codes & 0x81C081C0
            a1 = (codes << 3) & 0x81C081C0
            a2 = (codes << 6) & 0x81C081C0
            a3 = (
                ((codes << 1) & 0x80008000)
                | ((codes >> 3) & 0x01800180)
                | ((codes >> 7) & 0x00400040)
            )
    else:
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            _INT4_ASM if INT4 else _FP4_ASM,
            "=r,=r,=r,=r,r,r",
            [codes, scale],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    return a0, a1, a2, a3


@triton.jit
def _expand(
    codes,
    scale,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INT4: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """u32 [kc, nm, 4, 8, 4, 4] each -> [ROWS, COLS], bf16 (fp32 in the portable form). A scale word
    holds the bf16 factors of rows g and g + 8."""
    a0, a1, a2, a3 = decode_words(codes, scale, INT4, PORTABLE)
    p0 = word_pair(a0, scale, False, INT4, PORTABLE)
    p1 = word_pair(a1, scale, True, INT4, PORTABLE)
    p2 = word_pair(a2, scale, False, INT4, PORTABLE)
    p3 = word_pair(a3, scale, True, INT4, PORTABLE)
    k_lo = tl.join(p0, p1)
    k_hi = tl.join(p2, p3)
    w = tl.join(k_lo, k_hi)
    # kc nm warp g c k16 pair row8 k2 -> rows (nm warp row8 g), columns (kc k16 c k2 pair)
    w = tl.permute(w, (1, 2, 7, 3, 0, 5, 4, 8, 6))
    return tl.reshape(w, (ROWS, COLS))


@quick_launch
@triton.jit
def moe_w4_kernel(
    x,
    codes,
    scales,
    globals_,
    pairs,
    item_expert,
    item_begin,
    item_count,
    pair_weights,
    out,
    combined,
    behind,
    counters,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    NM: tl.constexpr,
    SLICES: tl.constexpr,
    KC: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    UNSORTED: tl.constexpr,
    COMBINES: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    INT4: tl.constexpr,
    SCALE_MUL: tl.constexpr,
    SCALE_ADD: tl.constexpr,
    PORTABLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (16 * SLICES * NM weight rows, item); SLICES is 4, or 2 with NM 1.

    FIRST: x [T, K] gathered by token, out [pairs, N / 2] = SwiGLU. Else: x [pairs, K] in sorted
    order, out [pairs, N] fp32 by pair. UNSORTED: item i is pair i alone, and the sort's tensors
    are not read. COMBINES (of the second GEMM): moe_combine.py.
    """
    pid_n = tl.program_id(0)
    item = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
    t = tl.arange(0, TOKENS)
    expert = tl.load(item_expert + item)
    if UNSORTED:
        begin = item
        live = t < 1
        pair = begin + t
    else:
        count = tl.load(item_count + item)
        if count == 0:
            return
        begin = tl.load(item_begin + item)
        live = t < count
        pair = tl.load(pairs + begin + t, mask=live, other=0)
    KB: tl.constexpr = K // 64
    ROWS: tl.constexpr = 16 * SLICES * NM
    COLS: tl.constexpr = 64 * KC
    x_row = pair // TOP_K if FIRST else begin + t
    k = tl.arange(0, COLS)
    x_ptr = x + x_row.to(tl.int64)[:, None] * K + k[None, :]
    # Two-dimensional loads in memory order: the compiler gives each thread 16 bytes (its own
    # words), and shared memory keeps that order, without bank conflicts.
    PER_TILE: tl.constexpr = 4 // SLICES
    step = tl.arange(0, KC * NM)
    step = (step % NM) * KB + step // NM
    tile = (expert.to(tl.int64) * (N // 64) + pid_n // PER_TILE * NM) * KB
    first_slice = pid_n % PER_TILE * SLICES
    code_ptr = codes + tile * 512 + first_slice * 128
    code_ptr += step[:, None] * 512 + tl.arange(0, SLICES * 128)[None, :]
    scale_ptr = scales + tile * 64 + first_slice * 16
    scale_ptr += step[:, None] * 64 + tl.arange(0, SLICES * 16)[None, :]
    shift = (tl.arange(0, 2) * 8)[None, None, None, None, None, None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for kb in tl.range(0, KB, KC, num_stages=STAGES):
        c = tl.load(code_ptr + kb * 512)
        s = tl.load(scale_ptr + kb * 64)
        xt = tl.load(x_ptr + kb * 64, mask=live[:, None], other=0.0)
        c = tl.reshape(c, (KC, NM, SLICES, 8, 4, 4))
        s = tl.reshape(s, (KC, NM, SLICES, 8, 2))[:, :, :, :, None, :]
        s = tl.broadcast_to(s, (KC, NM, SLICES, 8, 4, 2))
        e = ((s[:, :, :, :, :, :, None] >> shift) & 0x00FF00FF) * SCALE_MUL + SCALE_ADD
        e = tl.reshape(e, (KC, NM, SLICES, 8, 4, 4))
        w = _expand(c, e, ROWS, COLS, INT4, PORTABLE)
        acc = tl.dot(w, xt.T, acc)
    if USE_PDL:
        gdc_launch_dependents()
    position = (begin + t).to(tl.int64)
    if FIRST:
        # Rows come as 8 gate, 8 up, ... : both halves of a SwiGLU lie in one thread.
        halves = tl.permute(tl.reshape(acc, (NM * SLICES, 2, 8, TOKENS)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        gate = tl.reshape(gate, (ROWS // 2, TOKENS)) * tl.load(globals_ + expert * 2)
        up = tl.reshape(up, (ROWS // 2, TOKENS)) * tl.load(globals_ + expert * 2 + 1)
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = pid_n * (ROWS // 2) + tl.arange(0, ROWS // 2)
        o = out + position[None, :] * (N // 2) + n[:, None]
        tl.store(o, y.to(out.dtype.element_ty), mask=live[None, :])
    else:
        weight = tl.load(pair_weights + pair, mask=live, other=0.0)
        y = acc * (tl.load(globals_ + expert * 2) * weight)[None, :]
        n = pid_n * ROWS + tl.arange(0, ROWS)
        tl.store(out + pair.to(tl.int64)[None, :] * N + n[:, None], y, mask=live[None, :])
        if COMBINES:
            if UNSORTED:
                combine_token(
                    out, behind, combined, counters, item // TOP_K, n, N, TOP_K, HAS_BEHIND
                )
            else:
                combine_tokens(
                    out, behind, combined, counters, pair // TOP_K, live, n, N, TOP_K, HAS_BEHIND
                )
