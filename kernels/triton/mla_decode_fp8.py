# SPDX-License-Identifier: Apache-2.0
"""Hopper MLA decode over fp8 planes: TMA producer, converting warpgroup, computing warpgroup.

Owns: one part's run of tiles (see mla_plan.py). Does not know: how the run was chosen. A page is a
tile of 64 KV tokens. The operands are swapped, since few query rows (16 or 32 of folded query
tokens and heads) would fill a quarter of a 64-row tile: S^T = K Q^T and O^T = V^T P^T have the
64 tokens and the latent columns as their large axis, so a tile costs 1360 cycles of tensor core
and shared memory where the plain form costs 2176, and Q takes 18 KB instead of 72. That room holds
two bf16 tiles: one is computed with while the converting warpgroup fills the other from e4m3, with
five integer or half-precision instructions for two numbers (value and scale are exact in bf16).
Rope parts come two tiles ahead as well, which is worth 1 % of a step.
Gluon has no interpreter: checked against the reference on a GPU, compiled for sm_90 without one.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from kernels.triton.quick_launch import quick_launch

mbarrier = hopper.mbarrier
tma = hopper.tma

# Four e4m3 numbers to bf16 times 2^-120 (exponent and mantissa bits moved; subnormals too), then
# times the scale, which carries 2^120.
_CONVERT = gl.constexpr("""
{
.reg .b32 a, b, m;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 m, a, 4;
and.b32 m, m, 0x07F007F0;
and.b32 a, a, 0x80008000;
or.b32 a, a, m;
shr.u32 m, b, 4;
and.b32 m, m, 0x07F007F0;
and.b32 b, b, 0x80008000;
or.b32 b, b, m;
mul.bf16x2 $0, a, $3;
mul.bf16x2 $1, b, $4;
}
""")


@gluon.jit
def _next_row(plan, b, remaining, NUM_PARTS: gl.constexpr):
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
def _produce(
    q_lo_desc,
    q_rope_desc,
    coded_desc,
    kv_rope_desc,
    q_lo,
    q_hi,
    q_rope,
    coded,
    kv_rope,
    q_full,
    q_empty,
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
    ROWS: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROPES: gl.constexpr,
):
    """Before the previous kernel's end (which writes q and this step's KV) only tiles of earlier
    steps are loaded; plan, lengths and page table are older than that kernel (see mla.py)."""
    record = plan + part * 8
    b = gl.load(record)
    tile = gl.load(record + 1)
    remaining = gl.load(record + 2)
    num_tiles = gl.load(record + 3)
    slot = gl.load(record + 4)
    page = gl.load(record + 5)
    settled = gl.load(record + 6)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    segment = 0
    pages = page_table + slot.to(gl.int64) * page_table_stride
    first = gl.maximum(tile, gl.minimum(gl.minimum(stop, tile + ROPES), settled))
    for j in range(tile, first):
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
    gdc_wait()
    while remaining > 0:
        pages = page_table + slot.to(gl.int64) * page_table_stride
        mbarrier.wait(q_empty, (segment & 1) ^ 1)
        mbarrier.expect(q_full, (D + 64) * N * 2)
        q_row = b * ROWS
        tma.async_copy_global_to_shared(q_rope_desc, [q_row, D], q_full, q_rope)
        tma.async_copy_global_to_shared(q_lo_desc, [q_row, 0], q_full, q_lo)
        tma.async_copy_global_to_shared(q_lo_desc, [q_row, D // 2], q_full, q_hi)
        for j in range(first, stop):
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
        remaining -= stop - tile
        b += 1
        tile = 0
        first = tile
        segment += 1
        if remaining > 0:
            num_tiles, stop = _next_row(plan, b, remaining, NUM_PARTS)
            slot = gl.load(row_slots + b)
            page = gl.load(page_table + slot.to(gl.int64) * page_table_stride)


@gluon.jit
def _convert_tile(
    coded,
    kv_lo,
    kv_hi,
    coded_full,
    coded_empty,
    kv_full,
    kv_empty,
    scales,
    exists,
    step,
    layout: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`scales`: where those of each token lie."""
    # Asked for before the tile is waited for.
    s0 = gl.load(scales)
    s1 = gl.load(scales + 1)
    s2 = gl.load(scales + 2)
    s3 = gl.load(scales + 3)
    stage = step % STAGES
    target = step & 1
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


@gluon.jit
def _convert(
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
    0 * NaN would reach the output through P V. What `_produce` loads early is converted early."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    record = plan + part * 8
    b = gl.load(record)
    tile = gl.load(record + 1)
    remaining = gl.load(record + 2)
    num_tiles = gl.load(record + 3)
    slot = gl.load(record + 4)
    settled = gl.load(record + 6)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    pages = page_table + slot.to(gl.int64) * page_table_stride
    first = gl.maximum(tile, gl.minimum(gl.minimum(stop, tile + ROPES), settled))
    for j in range(tile, first):
        page = gl.load(pages + j).to(gl.int64)
        _convert_tile(
            coded,
            kv_lo,
            kv_hi,
            coded_full,
            coded_empty,
            kv_full,
            kv_empty,
            kv_scales + page * scale_page_stride + token * 4,
            token < TILE,
            step,
            layout,
            TILE,
            STAGES,
        )
        step += 1
    gdc_wait()
    while remaining > 0:
        pages = page_table + slot.to(gl.int64) * page_table_stride
        seq_len = gl.load(seq_lens + b)
        for j in range(first, stop):
            page = gl.load(pages + j).to(gl.int64)
            _convert_tile(
                coded,
                kv_lo,
                kv_hi,
                coded_full,
                coded_empty,
                kv_full,
                kv_empty,
                kv_scales + page * scale_page_stride + token * 4,
                token < seq_len - j * TILE,
                step,
                layout,
                TILE,
                STAGES,
            )
            step += 1
        remaining -= stop - tile
        b += 1
        tile = 0
        first = tile
        if remaining > 0:
            num_tiles, stop = _next_row(plan, b, remaining, NUM_PARTS)
            slot = gl.load(row_slots + b)


@gluon.jit
def _compute(
    q_lo,
    q_hi,
    q_rope,
    kv_lo,
    kv_hi,
    kv_rope,
    p_tile,
    q_full,
    q_empty,
    kv_full,
    kv_empty,
    rope_full,
    rope_empty,
    seq_lens,
    plan,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    part,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
    ROPES: gl.constexpr,
):
    """Per tile: S^T, the online softmax down its columns, O^T."""
    ROWS: gl.constexpr = H * Q_LEN
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    rows = gl.arange(0, N, layout=col_layout)
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    gdc_wait()
    record = plan + part * 8
    b = gl.load(record)
    tile = gl.load(record + 1)
    remaining = gl.load(record + 2)
    num_tiles = gl.load(record + 3)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    segment = 0
    zero = gl.zeros([TILE, N], gl.float32, layout=layout)
    while remaining > 0:
        seq_len = gl.load(seq_lens + b)
        limit = seq_len - Q_LEN + 1 + rows // H
        m_i = gl.full([N], float("-inf"), gl.float32, layout=col_layout)
        sums = gl.zeros([TILE, N], gl.float32, layout=layout)
        lo = gl.zeros([HALF, N], gl.float32, layout=layout)
        hi = gl.zeros([HALF, N], gl.float32, layout=layout)
        mbarrier.wait(q_full, segment & 1)
        for j in range(tile, stop):
            here = step & 1
            turn = (step >> 1) & 1
            at_rope = here if ROPES == 2 else 0
            rope = kv_rope.index(at_rope)
            mbarrier.wait(rope_full.index(at_rope), turn if ROPES == 2 else here)
            mbarrier.wait(kv_full.index(here), turn)
            k_lo = kv_lo.index(here)
            k_hi = kv_hi.index(here)
            s = hopper.warpgroup_mma(
                rope, q_rope.permute([1, 0]), zero, use_acc=False, is_async=True
            )
            s = hopper.warpgroup_mma(k_lo, q_lo.permute([1, 0]), s, is_async=True)
            s = hopper.warpgroup_mma(k_hi, q_hi.permute([1, 0]), s, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            if ROPES == 1:
                mbarrier.arrive(rope_empty.index(0), count=1)
                p_columns = p_tile.permute([1, 0])
            else:  # the scores' rope parts have been read by all warps once the maximum is known
                p_columns = rope.slice(0, N, dim=0).permute([1, 0])
            if (j + 1) * TILE > seq_len - Q_LEN + 1:
                s = gl.where((j * TILE + token)[:, None] < limit[None, :], s, float("-inf"))
            m_new = gl.maximum(m_i, gl.max(s, axis=0) * scale_log2)
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.exp2(m_i - m_safe)
            p = gl.exp2(s * scale_log2 - m_safe[None, :])
            m_i = m_new
            sums = sums * alpha[None, :] + p
            p_columns.store(p.to(gl.bfloat16))
            hopper.fence_async_shared()
            lo = lo * alpha[None, :]
            hi = hi * alpha[None, :]
            lo = hopper.warpgroup_mma(k_lo.permute([1, 0]), p_columns, lo, is_async=True)
            hi = hopper.warpgroup_mma(k_hi.permute([1, 0]), p_columns, hi, is_async=True)
            lo, hi = hopper.warpgroup_mma_wait(0, deps=[lo, hi])
            mbarrier.arrive(kv_empty.index(here), count=1)
            if ROPES > 1:
                mbarrier.arrive(rope_empty.index(at_rope), count=1)
            step += 1
        mbarrier.arrive(q_empty, count=1)
        l_i = gl.sum(sums, axis=0)
        inv = 1.0 / gl.where(l_i > 0.0, l_i, 1.0)  # no KV: the output is zero anyway
        lo = lo * inv[None, :]
        hi = hi * inv[None, :]
        keep = (rows < ROWS)[None, :]
        if (stop - tile) == num_tiles:
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
        remaining -= stop - tile
        b += 1
        tile = 0
        segment += 1
        if remaining > 0:
            num_tiles, stop = _next_row(plan, b, remaining, NUM_PARTS)


@quick_launch
@gluon.jit(do_not_specialize_on_alignment=["row_slots", "seq_lens"])
def mla_decode_fp8_kernel(
    q_lo_desc,
    q_rope_desc,
    coded_desc,
    kv_rope_desc,
    kv_scales,
    page_table,
    row_slots,
    seq_lens,
    plan,
    out,
    partial_out,
    partial_lse,
    page_table_stride,
    page_rows,
    rope_page_rows,
    scale_page_stride,
    scale_log2,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROPES: gl.constexpr,
):
    """Program (part). Descriptors: q [rows, D + 64] in boxes of N rows by D / 2 or 64; kv bytes
    [rows, D], pages `page_rows` rows apart, in boxes of 64 by 128; rope [rows, 64] likewise."""
    HALF: gl.constexpr = D // 2
    part = gl.program_id(0)
    # Layouts of bf16 tiles that the tensor core reads: rows of 128 bytes, swizzled.
    bf16_tile: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    q_lo = gl.allocate_shared_memory(gl.bfloat16, [N, HALF], q_lo_desc.layout)
    q_hi = gl.allocate_shared_memory(gl.bfloat16, [N, HALF], q_lo_desc.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [N, 64], q_rope_desc.layout)
    coded = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, TILE, 128], coded_desc.layout)
    kv_lo = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], bf16_tile)
    kv_hi = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], bf16_tile)
    kv_rope = gl.allocate_shared_memory(gl.bfloat16, [ROPES, TILE, 64], kv_rope_desc.layout)
    # With two rope tiles P takes the place of the one just read: there is no room for a third.
    if ROPES == 1:
        p_tile = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], bf16_tile)
    else:
        p_tile = kv_rope.index(0)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rope_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], mbarrier.MBarrierLayout())
    rope_empty = gl.allocate_shared_memory(gl.int64, [ROPES, 1], mbarrier.MBarrierLayout())
    coded_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    coded_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(ROPES):
        mbarrier.init(rope_full.index(i), count=1)
        mbarrier.init(rope_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(coded_full.index(i), count=1)
        mbarrier.init(coded_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q_lo,
                    q_hi,
                    q_rope,
                    kv_lo,
                    kv_hi,
                    kv_rope,
                    p_tile,
                    q_full,
                    q_empty,
                    kv_full,
                    kv_empty,
                    rope_full,
                    rope_empty,
                    seq_lens,
                    plan,
                    out,
                    partial_out,
                    partial_lse,
                    scale_log2,
                    part,
                    H,
                    Q_LEN,
                    N,
                    D,
                    NUM_PARTS,
                    ROWS_PAD,
                    TILE,
                    ROPES,
                ),
            ),
            (
                _convert,
                (
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
                    NUM_PARTS,
                    TILE,
                    STAGES,
                    ROPES,
                ),
            ),
            (
                _produce,
                (
                    q_lo_desc,
                    q_rope_desc,
                    coded_desc,
                    kv_rope_desc,
                    q_lo,
                    q_hi,
                    q_rope,
                    coded,
                    kv_rope,
                    q_full,
                    q_empty,
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
                    H * Q_LEN,
                    N,
                    D,
                    NUM_PARTS,
                    TILE,
                    STAGES,
                    ROPES,
                ),
            ),
        ],
        [4, 1],
        [152, 32],
    )
    gdc_launch_dependents()
