# SPDX-License-Identifier: Apache-2.0
"""What surrounds MLA decode in a layer, for a few tokens: absorption in front, the merge behind.

Owns: queries -> absorbed queries (with rope, and this step's latents stored), partial results ->
values of the heads, fp8 pages -> rows. Does not know: attention itself (mla_decode*.py), the plan's
making.
Weights are asked for before the kernel in front has ended (programmatic dependent launch).
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.mla_plan import parts_of_row
from kernels.triton.quick_launch import quick_launch
from kernels.triton.row_kernels import store_latent


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping", "places"])
def mla_absorb_kernel(
    q,
    kv,
    norm_weight,
    positions,
    cos_sin,
    pool,
    rope_pool,
    scale_pool,
    slot_mapping,
    w_uk,
    out,
    places,
    num_tokens,
    q_stride,
    q_head_stride,
    kv_stride,
    page_stride,
    rope_page_stride,
    scale_page_stride,
    eps,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    FP8: tl.constexpr,
    PLACED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (head, slice of COLS latent columns): out[:, head, slice] = q_nope w_uk; the first
    slice also rotates the head's rope part. Programs behind the heads store a token's latent each
    (see store_latent). q [T, H, NOPE + R], out [T, H, C + R], w_uk [H, NOPE, C]. PLACED: token t
    goes to row places[t] of `out`; else `places` is not read."""
    CHUNKS: tl.constexpr = C // COLS
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    half: tl.constexpr = R // 2
    i = tl.arange(0, half)
    if head < H:
        n = tl.arange(0, NOPE)
        c = chunk * COLS + tl.arange(0, COLS)
        w = tl.load(w_uk + head * NOPE * C + n[:, None] * C + c[None, :])
        if USE_PDL:
            gdc_launch_dependents()
            gdc_wait()
        for first in range(0, num_tokens, TOKENS):
            t = first + tl.arange(0, TOKENS)
            live = (t < num_tokens)[:, None]
            row = q + t.to(tl.int64)[:, None] * q_stride + head * q_head_stride
            to = t
            if PLACED:
                to = tl.load(places + t, mask=t < num_tokens, other=0)
            place = out + (to.to(tl.int64)[:, None] * H + head) * (C + R)
            values = tl.load(row + n[None, :], mask=live, other=0.0)
            absorbed = tl.dot(values, w)
            tl.store(place + c[None, :], absorbed.to(out.dtype.element_ty), mask=live)
            if chunk == 0:
                at = tl.load(positions + t, mask=t < num_tokens, other=0).to(tl.int64)
                angle = cos_sin + at[:, None] * R + i[None, :]
                cos = tl.load(angle)
                sin = tl.load(angle + half)
                low = tl.load(row + NOPE + i[None, :], mask=live, other=0.0).to(tl.float32)
                high = tl.load(row + NOPE + half + i[None, :], mask=live, other=0.0).to(tl.float32)
                turned = (low * cos - high * sin).to(out.dtype.element_ty)
                other = (high * cos + low * sin).to(out.dtype.element_ty)
                tl.store(place + C + i[None, :], turned, mask=live)
                tl.store(place + C + half + i[None, :], other, mask=live)
    else:
        if USE_PDL:
            gdc_launch_dependents()
            gdc_wait()
        token = (head - H) * CHUNKS + chunk
        if token < num_tokens:
            store_latent(
                kv + token.to(tl.int64) * kv_stride,
                norm_weight,
                cos_sin + tl.load(positions + token).to(tl.int64) * R,
                tl.load(slot_mapping + token).to(tl.int64),
                pool,
                rope_pool,
                scale_pool,
                page_stride,
                rope_page_stride,
                scale_page_stride,
                eps,
                C,
                C,
                R,
                R,
                PAGE,
                FP8,
            )


@quick_launch
@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "num_tokens"],
    do_not_specialize_on_alignment=["places"],
)
def mla_merge_values_kernel(
    attended,
    partial_out,
    partial_lse,
    plan,
    w_uv,
    out,
    places,
    num_rows,
    num_groups,
    num_tokens,
    H: tl.constexpr,
    Q_LEN: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PLACED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (token, head, slice of BLOCK_D latent columns): merges the slices of all parts as
    mla_merge_kernel does, rounds them, and multiplies them by their columns of w_uv [H, V, D]: out
    [D / BLOCK_D, T, H * V], to be summed by the reader where there are several. A row that one
    part held whole lies in `attended` [queries, H, D]. PLACED: token t is query places[t], which
    is older than the kernel in front; else `places` is not read."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    piece = tl.program_id(2)
    query = token
    if PLACED:
        query = tl.load(places + token)
    b = query // Q_LEN
    r = query % Q_LEN * H + head
    d = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    v = tl.arange(0, V)
    w = tl.load(w_uv + (head * V + v)[:, None] * D + d[None, :])
    shared_slot, num_shared, slot, num_own = parts_of_row(
        plan, b, num_rows, num_groups, NUM_PARTS, GROUP
    )
    num = num_shared + num_own
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    if num > 1:
        p = tl.arange(0, BLOCK_P)
        top = float("-inf")
        norm = 0.0
        merged = tl.zeros([BLOCK_D], tl.float32)
        for p0 in range(0, num, BLOCK_P):
            live = p0 + p < num
            at = (slot + p0 + p).to(tl.int64) * ROWS_PAD + r
            if GROUP > 1:
                among = (shared_slot + p0 + p).to(tl.int64) * ROWS_PAD + b % GROUP * H + r
                at = tl.where(p0 + p < num_shared, among, at - num_shared * ROWS_PAD)
            lse = tl.load(partial_lse + at, mask=live, other=float("-inf"))
            part_at = partial_out + at[:, None] * D + d[None, :]
            part = tl.load(part_at, mask=live[:, None], other=0.0)
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(lse - safe_top)
            shrink = tl.exp2(top - safe_top)
            norm = norm * shrink + tl.sum(weight, axis=0)
            merged = merged * shrink + tl.sum(part * weight[:, None], axis=0)
            top = new_top
        merged = merged * (1.0 / tl.where(norm > 0.0, norm, 1.0))
        merged = merged.to(attended.dtype.element_ty).to(tl.float32)
    else:
        row = attended + (query.to(tl.int64) * H + head) * D
        merged = tl.load(row + d).to(tl.float32)
    values = tl.sum(w.to(tl.float32) * merged[None, :], axis=1)
    place = out + (piece * num_tokens + token).to(tl.int64) * (H * V) + head * V + v
    tl.store(place, values.to(out.dtype.element_ty))


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["page_table"])
def mla_expand_pages_kernel(
    page_table,
    values,
    scales,
    rope,
    out,
    page_stride,
    scale_page_stride,
    rope_page_stride,
    PAGE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
):
    """Program i: page page_table[i] of fp8 planes -> out[i] [PAGE, C + R]."""
    i = tl.program_id(0).to(tl.int64)
    page = tl.load(page_table + i).to(tl.int64)
    t = tl.arange(0, PAGE)
    c = tl.arange(0, C)
    e = tl.arange(0, R)
    g = tl.arange(0, C // 128)
    kind: tl.constexpr = out.dtype.element_ty
    coded = tl.load(values + page * page_stride + t[:, None] * C + c[None, :])
    factor = tl.load(scales + page * scale_page_stride + t[:, None] * (C // 128) + g[None, :])
    groups = tl.reshape(coded.to(kind), (PAGE, C // 128, 128))
    latents = tl.reshape(groups * factor.to(kind)[:, :, None], (PAGE, C))
    place = out + (i * PAGE + t)[:, None] * (C + R)
    tl.store(place + c[None, :], latents)
    keys = tl.load(rope + page * rope_page_stride + t[:, None] * R + e[None, :])
    tl.store(place + C + e[None, :], keys.to(kind))
