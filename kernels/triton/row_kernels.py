# SPDX-License-Identifier: Apache-2.0
"""One pass over each row: RMSNorm with and without the residual add, SwiGLU's product, and MLA's
norm + rope + store.

Does not know: launches (rows.py). fp32 inside, rounded once to each destination's type, as in the
references. Under programmatic dependent launch a kernel waits before its first read of what the
kernel before it wrote.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    wide,
    x_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    WIDENS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program per row: out = norm(x [+ residual]) * weight; total keeps the sum, wide the rounded
    result in fp32."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    real = h < H
    w = tl.load(weight + h, mask=real, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + h, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + row * H + h, mask=real, other=0.0).to(tl.float32)
        kept = value.to(total.dtype.element_ty)
        tl.store(total + row * H + h, kept, mask=real)
        value = kept.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / H
    normed = (value * (1.0 / tl.sqrt(mean + eps)) * w).to(out.dtype.element_ty)
    tl.store(out + row * H + h, normed, mask=real)
    if WIDENS:
        tl.store(wide + row * H + h, normed.to(tl.float32), mask=real)


@quick_launch
@triton.jit
def silu_and_mul_kernel(x, out, F: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """Program (row, block of F): out = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = f < F
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(x + row * 2 * F + f, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + f, mask=real, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * F + f, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def store_latent(
    row,
    weight,
    angle,
    slot,
    pool,
    rope_pool,
    scale_pool,
    page_stride,
    rope_page_stride,
    scale_page_stride,
    eps,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
):
    """One token: normed latent and rotated key part to their place in the pool. Plain: one row of
    C + R in `pool`. FP8: C e4m3 in `pool`, R in `rope_pool`, and in `scale_pool` C / 128 fp32
    factors, the least power of two under which 128 neighbours fit."""
    half: tl.constexpr = R // 2
    i = tl.arange(0, R_PAD // 2)
    real = i < half
    c = tl.arange(0, C_PAD)
    latent = tl.load(row + c, mask=c < C, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    mean = tl.sum(latent * latent, axis=0) / C
    latent = latent * (1.0 / tl.sqrt(mean + eps)) * w
    page = slot // PAGE
    offset = slot % PAGE
    cos = tl.load(angle + i, mask=real, other=0.0)
    sin = tl.load(angle + half + i, mask=real, other=0.0)
    low = tl.load(row + C + i, mask=real, other=0.0).to(tl.float32)
    high = tl.load(row + C + half + i, mask=real, other=0.0).to(tl.float32)
    if FP8:
        groups = tl.reshape(latent, (C // 128, 128))
        top = tl.max(tl.abs(groups), axis=1)
        # 2^ceil(log2(top / 448)) from the bits; NaN stays NaN, which the row's logits then show.
        bits = (top * (1.0 / 448.0)).to(tl.int32, bitcast=True)
        power = ((bits + 0x007FFFFF) >> 23 << 23).to(tl.float32, bitcast=True)
        scale = tl.where(top > 1e-30, power, 1.0)
        scale = tl.where(top != top, top, scale)
        coded = (groups / scale[:, None]).to(pool.dtype.element_ty)
        tl.store(pool + page * page_stride + offset * C + c, tl.reshape(coded, (C,)))
        g = tl.arange(0, C // 128)
        tl.store(scale_pool + page * scale_page_stride + offset * (C // 128) + g, scale)
        place = rope_pool + page * rope_page_stride + offset * R
    else:
        place = pool + page * page_stride + offset * (C + R)
        tl.store(place + c, latent.to(pool.dtype.element_ty), mask=c < C)
        place += C
    kind = rope_pool.dtype.element_ty
    tl.store(place + i, (low * cos - high * sin).to(kind), mask=real)
    tl.store(place + half + i, (high * cos + low * sin).to(kind), mask=real)


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def mla_kv_write_kernel(
    q_rope,
    kv,
    weight,
    positions,
    cos_sin,
    pool,
    rope_pool,
    scale_pool,
    slot_mapping,
    q_stride,
    q_head_stride,
    kv_stride,
    page_stride,
    rope_page_stride,
    scale_page_stride,
    eps,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (token, 0) stores the latent and the key part, (token, 1) rotates the queries."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = R // 2
    i = tl.arange(0, R_PAD // 2)
    real = i < half
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * R
    if tl.program_id(1) == 0:
        store_latent(
            kv + token * kv_stride,
            weight,
            angle,
            tl.load(slot_mapping + token).to(tl.int64),
            pool,
            rope_pool,
            scale_pool,
            page_stride,
            rope_page_stride,
            scale_page_stride,
            eps,
            C,
            C_PAD,
            R,
            R_PAD,
            PAGE,
            FP8,
        )
    else:
        cos = tl.load(angle + i, mask=real, other=0.0)
        sin = tl.load(angle + half + i, mask=real, other=0.0)
        head = tl.arange(0, H_PAD)
        at = q_rope + token * q_stride + head[:, None] * q_head_stride + i[None, :]
        both = (head < H)[:, None] & real[None, :]
        first = tl.load(at, mask=both, other=0.0).to(tl.float32)
        second = tl.load(at + half, mask=both, other=0.0).to(tl.float32)
        turned = first * cos[None, :] - second * sin[None, :]
        other = second * cos[None, :] + first * sin[None, :]
        tl.store(at, turned.to(q_rope.dtype.element_ty), mask=both)
        tl.store(at + half, other.to(q_rope.dtype.element_ty), mask=both)
