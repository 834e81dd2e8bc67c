# SPDX-License-Identifier: Apache-2.0
"""Hopper MLA decode over fp8 planes, scores straight from the codes: the query as two e4m3 terms.

Owns: what is computed of a part's run of tiles, for up to 16 folded query rows. Does not know: how
tiles come (mla_fp8_tiles.py), or how the run was chosen (mla_plan.py). In mla_decode_fp8.py, whose
operands are as here, scores wait for a tile in bf16; here e4m3 codes are an operand of the tensor
core as they lie, a group of 128 columns at a time:

    S[t, h] = rope + factor[h] * sum over groups g of scale[t, g] * K_g[t] (q1_g[h] + q2_g[h])

with q / factor = q1 + q2 + rest, both e4m3, of four bits each: the rest is at most 2^-8 of q or
2^-19 of the row's largest, whichever is more (bf16 itself: 2^-9). Both terms lie side by side as 32
columns of one operand, so a tile's codes are read once. A tile in bf16 is wanted for the output
alone then, which leaves its making a whole tile's time; 256 cycles of shared memory less, too.
Gluon has no interpreter: checked against the reference on a GPU, compiled for sm_90 without one.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from kernels.triton.mla_fp8_tiles import convert, first_row, next_row, produce, scales_of, store_run
from kernels.triton.quick_launch import quick_launch

mbarrier = hopper.mbarrier

N = gl.constexpr(16)  # columns of scores: query rows


@gluon.jit
def _split_queries(
    q, q_terms, q_rope, col_layout: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr
):
    """Rows of q -> two terms each in shared memory, side by side; their rope parts as they are.
    Returns what a score over the terms is to be multiplied by, per row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    at = q + row[:, None] * (D + 64) + column[None, :]
    live = (row < ROWS)[:, None]
    x0 = gl.load(at, mask=live, other=0.0).to(gl.float32)
    x1 = gl.load(at + 128, mask=live, other=0.0).to(gl.float32)
    x2 = gl.load(at + 256, mask=live, other=0.0).to(gl.float32)
    x3 = gl.load(at + 384, mask=live, other=0.0).to(gl.float32)
    rope_row = gl.arange(0, N, layout=gl.SliceLayout(1, rope_layout))
    rope_column = gl.arange(0, 64, layout=gl.SliceLayout(0, rope_layout))
    rope_at = q + D + rope_row[:, None] * (D + 64) + rope_column[None, :]
    rope = gl.load(rope_at, mask=(rope_row < ROWS)[:, None], other=0.0)
    most = gl.maximum(
        gl.maximum(gl.max(gl.abs(x0), axis=1), gl.max(gl.abs(x1), axis=1)),
        gl.maximum(gl.max(gl.abs(x2), axis=1), gl.max(gl.abs(x3), axis=1)),
    )
    most = gl.maximum(most, 1e-30)  # 448 / most stays finite
    to_codes = (448.0 / most)[:, None]
    for g in gl.static_range(4):
        if g == 0:
            x = x0
        elif g == 1:
            x = x1
        elif g == 2:
            x = x2
        else:
            x = x3
        x = x * to_codes
        first = x.to(gl.float8e4nv)
        q_terms.index(g).slice(0, N, dim=0).store(first)
        rest = x - first.to(gl.float32)
        q_terms.index(g).slice(N, N, dim=0).store(rest.to(gl.float8e4nv))
    q_rope.store(rope)
    return gl.convert_layout(most * (1.0 / 448.0), col_layout)


@gluon.jit
def _compute(
    q,
    q_terms,
    q_rope,
    coded,
    kv_lo,
    kv_hi,
    kv_rope,
    coded_full,
    coded_empty,
    kv_full,
    kv_empty,
    rope_full,
    rope_empty,
    kv_scales,
    page_table,
    row_slots,
    seq_lens,
    plan,
    out,
    partial_out,
    partial_lse,
    page_table_stride,
    scale_page_stride,
    scale_log2,
    part,
    ROWS: gl.constexpr,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
):
    """Per tile: S^T, the online softmax down its columns, O^T."""
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    terms_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * N, 32]
    )
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    rows = gl.arange(0, N, layout=col_layout)
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    scaled_token = gl.arange(0, TILE, layout=gl.SliceLayout(1, terms_layout))
    d = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    gdc_wait()
    b, tile, remaining, num_tiles, slot, page, _ = first_row(plan, part)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    zero = gl.zeros([TILE, N], gl.float32, layout=layout)
    zeros = gl.zeros([TILE, 2 * N], gl.float32, layout=terms_layout)
    while remaining > 0:
        pages = page_table + slot.to(gl.int64) * page_table_stride
        s0, s1, s2, s3 = scales_of(kv_scales, page, scale_page_stride, scaled_token)
        page = gl.load(pages + gl.minimum(tile + 1, stop - 1))
        factor = _split_queries(
            q + b.to(gl.int64) * ROWS * (D + 64), q_terms, q_rope, col_layout, ROWS, D
        )
        hopper.fence_async_shared()
        seq_len = gl.load(seq_lens + b)
        limit = seq_len - Q_LEN + 1 + rows // H
        m_i = gl.full([N], float("-inf"), gl.float32, layout=col_layout)
        sums = gl.zeros([TILE, N], gl.float32, layout=layout)
        lo = gl.zeros([HALF, N], gl.float32, layout=layout)
        hi = gl.zeros([HALF, N], gl.float32, layout=layout)
        for j in range(tile, stop):
            here = step & 1
            turn = (step >> 1) & 1
            n0, n1, n2, n3 = scales_of(kv_scales, page, scale_page_stride, scaled_token)
            page = gl.load(pages + gl.minimum(j + 2, stop - 1))
            rope = kv_rope.index(here)
            mbarrier.wait(coded_full.index(here), turn)
            mbarrier.wait(rope_full.index(here), turn)
            s = hopper.warpgroup_mma(
                rope, q_rope.permute([1, 0]), zero, use_acc=False, is_async=True
            )
            kind: gl.constexpr = gl.float8e4nv
            k0 = coded.index(here * 4)._reinterpret(kind, [TILE, 128], coded.type.layout)
            k1 = coded.index(here * 4 + 1)._reinterpret(kind, [TILE, 128], coded.type.layout)
            k2 = coded.index(here * 4 + 2)._reinterpret(kind, [TILE, 128], coded.type.layout)
            k3 = coded.index(here * 4 + 3)._reinterpret(kind, [TILE, 128], coded.type.layout)
            t0 = hopper.warpgroup_mma(
                k0, q_terms.index(0).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            t1 = hopper.warpgroup_mma(
                k1, q_terms.index(1).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            t2 = hopper.warpgroup_mma(
                k2, q_terms.index(2).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            t3 = hopper.warpgroup_mma(
                k3, q_terms.index(3).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            s, t0, t1, t2, t3 = hopper.warpgroup_mma_wait(0, deps=[s, t0, t1, t2, t3])
            t = t0 * s0[:, None] + t1 * s1[:, None] + t2 * s2[:, None] + t3 * s3[:, None]
            t = gl.sum(t.reshape([TILE, 2, N]), axis=1)
            s = s + gl.convert_layout(t, layout, assert_trivial=True) * factor[None, :]
            s0, s1, s2, s3 = n0, n1, n2, n3
            if (j + 1) * TILE > seq_len - Q_LEN + 1:
                s = gl.where((j * TILE + token)[:, None] < limit[None, :], s, float("-inf"))
            m_new = gl.maximum(m_i, gl.max(s, axis=0) * scale_log2)
            # All warps have read the codes and the rope part once the maximum is known.
            mbarrier.arrive(coded_empty.index(here), count=1)
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.exp2(m_i - m_safe)
            p = gl.exp2(s * scale_log2 - m_safe[None, :])
            m_i = m_new
            sums = sums * alpha[None, :] + p
            p_columns = rope.slice(0, N, dim=0).permute([1, 0])
            p_columns.store(p.to(gl.bfloat16))
            hopper.fence_async_shared()
            lo = lo * alpha[None, :]
            hi = hi * alpha[None, :]
            mbarrier.wait(kv_full.index(here), turn)
            k_lo = kv_lo.index(here)
            k_hi = kv_hi.index(here)
            lo = hopper.warpgroup_mma(k_lo.permute([1, 0]), p_columns, lo, is_async=True)
            hi = hopper.warpgroup_mma(k_hi.permute([1, 0]), p_columns, hi, is_async=True)
            lo, hi = hopper.warpgroup_mma_wait(0, deps=[lo, hi])
            mbarrier.arrive(kv_empty.index(here), count=1)
            mbarrier.arrive(rope_empty.index(here), count=1)
            step += 1
        is_whole = (stop - tile) == num_tiles
        store_run(
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
            ROWS,
            D,
            ROWS_PAD,
        )
        remaining -= stop - tile
        b += 1
        tile = 0
        if remaining > 0:
            num_tiles, stop = next_row(plan, b, remaining, NUM_PARTS)
            slot = gl.load(row_slots + b)
            page = gl.load(page_table + slot.to(gl.int64) * page_table_stride)


@quick_launch
@gluon.jit(do_not_specialize_on_alignment=["row_slots", "seq_lens"])
def mla_decode_fp8_terms_kernel(
    q,
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
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
):
    """Program (part). q bf16 [rows * H, D + 64]; descriptors: kv bytes [rows, D], pages `page_rows`
    rows apart, in boxes of 64 by 128; rope [rows, 64] likewise."""
    HALF: gl.constexpr = D // 2
    part = gl.program_id(0)
    # Layouts of tiles that the tensor core reads: rows of 128 bytes, swizzled.
    bf16_tile: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    fp8_tile: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8, rank=2
    )
    q_terms = gl.allocate_shared_memory(gl.float8e4nv, [4, 2 * N, 128], fp8_tile)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [N, 64], bf16_tile)
    coded = gl.allocate_shared_memory(gl.uint8, [8, TILE, 128], coded_desc.layout)
    kv_lo = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], bf16_tile)
    kv_hi = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], bf16_tile)
    # P takes the place of the rope tile just read: there is no room for another.
    kv_rope = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, 64], kv_rope_desc.layout)
    rope_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rope_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    coded_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    coded_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(coded_full.index(i), count=1)
        mbarrier.init(coded_empty.index(i), count=2)  # read for scores, and converted
        mbarrier.init(rope_full.index(i), count=1)
        mbarrier.init(rope_empty.index(i), count=1)
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q,
                    q_terms,
                    q_rope,
                    coded,
                    kv_lo,
                    kv_hi,
                    kv_rope,
                    coded_full,
                    coded_empty,
                    kv_full,
                    kv_empty,
                    rope_full,
                    rope_empty,
                    kv_scales,
                    page_table,
                    row_slots,
                    seq_lens,
                    plan,
                    out,
                    partial_out,
                    partial_lse,
                    page_table_stride,
                    scale_page_stride,
                    scale_log2,
                    part,
                    H * Q_LEN,
                    H,
                    Q_LEN,
                    D,
                    NUM_PARTS,
                    ROWS_PAD,
                    TILE,
                ),
            ),
            (
                convert,
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
                    2,
                    2,
                ),
            ),
            (
                produce,
                (
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
                    D,
                    NUM_PARTS,
                    TILE,
                    2,
                    2,
                ),
            ),
        ],
        [4, 1],
        [152, 32],
    )
    gdc_launch_dependents()
