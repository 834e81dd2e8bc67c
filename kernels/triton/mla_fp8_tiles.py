# SPDX-License-Identifier: Apache-2.0
"""What Hopper's MLA decode kernels over fp8 planes share: the TMA producer, the converting
warpgroup, and how a part finds its rows and stores what it has of one.

Owns: a part's run of tiles (see mla_plan.py), from pages to codes, rope parts and bf16 tiles in
shared memory. Does not know: what is computed from them (mla_decode_fp8*.py).
A page is a tile of 64 KV tokens. Value and scale are exact in bf16.
"""

from __future__ import annotations

from kernels._triton import gdc_wait, gl, gluon, hopper

mbarrier = hopper.mbarrier
tma = hopper.tma

# Four e4m3 numbers to bf16 times 2^-120 (the sign spread over a byte above, then all moved by four
# bits and cleaned; subnormals too), then times the scale, which carries 2^120.
_CONVERT = gl.constexpr("""
{
.reg .b32 a, b;
prmt.b32 a, $2, 0, 0x9180;
prmt.b32 b, $2, 0, 0xB3A2;
shl.b32 a, a, 4;
shl.b32 b, b, 4;
and.b32 a, a, 0x87F087F0;
and.b32 b, b, 0x87F087F0;
mul.bf16x2 $0, a, $3;
mul.bf16x2 $1, b, $4;
}
""")


@gluon.constexpr_function
def code_layout():
    """Of a tile's codes [64, 128] in the registers of four warps: 16 of a row to a thread. Eight
    threads that access shared memory together hold two rows r and r ^ 5, which is without conflicts
    both for codes (16 bytes a thread) and for bf16 (twice 16), under the swizzle by row of each."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [32, 0]],
        lane_bases=[[0, 16], [0, 32], [5, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 128],
    )


@gluon.jit
def first_row(plan, part):
    """Of a part: its first row, the tile it begins with there, how many tiles it takes in all; of
    that row its tiles, its slot, the page of that first tile, and how many tiles are of earlier
    steps (mla_plan.py)."""
    record = plan + part * 8
    return (
        gl.load(record),
        gl.load(record + 1),
        gl.load(record + 2),
        gl.load(record + 3),
        gl.load(record + 4),
        gl.load(record + 5),
        gl.load(record + 6),
    )


@gluon.jit
def next_row(plan, b, remaining, NUM_PARTS: gl.constexpr):
    """Tiles of row b, and how many of them this part still takes from its start."""
    indptr = plan + NUM_PARTS * 8
    num_tiles = gl.load(indptr + b + 1) - gl.load(indptr + b)
    return num_tiles, gl.minimum(num_tiles, remaining)


@gluon.jit
def _load_tile(
    coded_desc,
    kv_rope_desc,
    coded,
    kv_rope,
    coded_full,
    coded_empty,
    rope_full,
    rope_empty,
    page,
    page_rows,
    rope_page_rows,
    step,
    D: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROPES: gl.constexpr,
):
    """Wait until the buffers of tile `step` are free and fill them from a page."""
    stage = step % STAGES
    full = coded_full.index(stage)
    mbarrier.wait(coded_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full, D * TILE)
    for g in gl.static_range(4):
        tma.async_copy_global_to_shared(
            coded_desc, [page * page_rows, g * 128], full, coded.index(stage * 4 + g)
        )
    at = step % ROPES
    mbarrier.wait(rope_empty.index(at), ((step // ROPES) & 1) ^ 1)
    mbarrier.expect(rope_full.index(at), 64 * TILE * 2)
    tma.async_copy_global_to_shared(
        kv_rope_desc, [page * rope_page_rows, 0], rope_full.index(at), kv_rope.index(at)
    )


@gluon.jit
def produce(
    coded_desc,
    kv_rope_desc,
    coded,
    kv_rope,
    coded_full,
    coded_empty,
    rope_full,
    rope_empty,
    page_table,
    row_slots,
    plan,
    page_table_stride,
    page_rows,
    rope_page_rows,
    part,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROPES: gl.constexpr,
):
    """Before the previous kernel's end (which writes this step's KV) only tiles of earlier steps
    are loaded; plan, lengths and page table are older than that kernel (see mla.py)."""
    b, tile, remaining, num_tiles, slot, page, settled = first_row(plan, part)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    num_early = gl.maximum(gl.minimum(gl.minimum(stop, tile + ROPES), settled) - tile, 0)
    if num_early == 0:
        gdc_wait()
    while remaining > 0:
        pages = page_table + slot.to(gl.int64) * page_table_stride
        for j in range(tile, stop):
            _load_tile(
                coded_desc,
                kv_rope_desc,
                coded,
                kv_rope,
                coded_full,
                coded_empty,
                rope_full,
                rope_empty,
                page,
                page_rows,
                rope_page_rows,
                step,
                D,
                TILE,
                STAGES,
                ROPES,
            )
            page = gl.load(pages + gl.minimum(j + 1, stop - 1))
            step += 1
            if step == num_early:
                gdc_wait()
        remaining -= stop - tile
        b += 1
        tile = 0
        if remaining > 0:
            num_tiles, stop = next_row(plan, b, remaining, NUM_PARTS)
            slot = gl.load(row_slots + b)
            page = gl.load(page_table + slot.to(gl.int64) * page_table_stride)


@gluon.jit
def scales_of(kv_scales, page, scale_page_stride, token):
    """Those of a page's tokens, by group."""
    at = kv_scales + page.to(gl.int64) * scale_page_stride + token * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def convert(
    coded,
    kv_lo,
    kv_hi,
    coded_full,
    coded_empty,
    kv_full,
    kv_empty,
    kv_scales,
    page_table,
    row_slots,
    seq_lens,
    plan,
    page_table_stride,
    scale_page_stride,
    part,
    NUM_PARTS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROPES: gl.constexpr,
):
    """e4m3 tiles times their scales -> bf16 tiles; tokens that do not exist become zeros, since
    0 * NaN would reach the output through P V. What `produce` loads early is converted early.
    A tile's scales are asked for while the one before is converted."""
    layout: gl.constexpr = code_layout()
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    b, tile, remaining, num_tiles, slot, page, settled = first_row(plan, part)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    num_early = gl.maximum(gl.minimum(gl.minimum(stop, tile + ROPES), settled) - tile, 0)
    if num_early == 0:
        gdc_wait()
    while remaining > 0:
        pages = page_table + slot.to(gl.int64) * page_table_stride
        seq_len = gl.load(seq_lens + b)
        s0, s1, s2, s3 = scales_of(kv_scales, page, scale_page_stride, token)
        page = gl.load(pages + gl.minimum(tile + 1, stop - 1))
        for j in range(tile, stop):
            n0, n1, n2, n3 = s0, s1, s2, s3
            if step + 1 != num_early:
                n0, n1, n2, n3 = scales_of(kv_scales, page, scale_page_stride, token)
            stage = step % STAGES
            target = step & 1
            exists = token < seq_len - j * TILE
            mbarrier.wait(coded_full.index(stage), (step // STAGES) & 1)
            mbarrier.wait(kv_empty.index(target), ((step >> 1) & 1) ^ 1)
            for g in gl.static_range(4):
                if g == 0:
                    s = s0
                elif g == 1:
                    s = s1
                elif g == 2:
                    s = s2
                else:
                    s = s3
                factor = gl.where(exists, s, 0.0) * 1.329227995784916e36  # 2^120
                wide = gl.expand_dims(factor.to(gl.bfloat16), 1).broadcast_to([TILE, 128])
                codes = coded.index(stage * 4 + g).load(layout)
                # 0x7F and 0xFF, NaN in e4m3, become finite here: a zero factor clears garbage.
                value = gl.inline_asm_elementwise(
                    _CONVERT,
                    "=r,=r,r,r,r",
                    [codes, wide],
                    dtype=gl.bfloat16,
                    is_pure=True,
                    pack=4,
                )
                half = kv_lo if g < 2 else kv_hi
                half.index(target).slice((g % 2) * 128, 128, dim=1).store(value)
            hopper.fence_async_shared()
            mbarrier.arrive(coded_empty.index(stage), count=1)
            mbarrier.arrive(kv_full.index(target), count=1)
            if step + 1 == num_early:
                gdc_wait()
                n0, n1, n2, n3 = scales_of(kv_scales, page, scale_page_stride, token)
            s0, s1, s2, s3 = n0, n1, n2, n3
            page = gl.load(pages + gl.minimum(j + 2, stop - 1))
            step += 1
        remaining -= stop - tile
        b += 1
        tile = 0
        if remaining > 0:
            num_tiles, stop = next_row(plan, b, remaining, NUM_PARTS)
            slot = gl.load(row_slots + b)
            page = gl.load(page_table + slot.to(gl.int64) * page_table_stride)


@gluon.jit
def store_run(
    lo,
    hi,
    m_i,
    sums,
    is_whole,
    part,
    b,
    rows,
    d,
    out,
    partial_out,
    partial_lse,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    ROWS_PAD: gl.constexpr,
):
    """What a part has of row b, O^T in halves [D / 2, query rows], its maxima and its sums by token
    and query row: the row's result where the part had all of it, else a partial one."""
    HALF: gl.constexpr = D // 2
    l_i = gl.sum(sums, axis=0)
    inv = 1.0 / gl.where(l_i > 0.0, l_i, 1.0)  # no KV: the output is zero anyway
    lo = lo * inv[None, :]
    hi = hi * inv[None, :]
    keep = (rows < ROWS)[None, :]
    if is_whole:
        at = (b.to(gl.int64) * ROWS + rows)[None, :] * D + d[:, None]
        gl.store(out + at, lo.to(out.dtype.element_ty), mask=keep)
        gl.store(out + at + HALF, hi.to(out.dtype.element_ty), mask=keep)
    else:
        row_at = (part + b).to(gl.int64) * ROWS_PAD + rows
        at = row_at[None, :] * D + d[:, None]
        gl.store(partial_out + at, lo, mask=keep)
        gl.store(partial_out + at + HALF, hi, mask=keep)
        lse = gl.where(l_i > 0.0, m_i + gl.log2(l_i), float("-inf"))
        gl.store(partial_lse + row_at, lse, mask=rows < ROWS)
