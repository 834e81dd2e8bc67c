# SPDX-License-Identifier: Apache-2.0
"""Hopper MLA decode over fp8 planes for 17 to 32 folded query rows.

Owns: what is computed of a part's run of tiles. Does not know: how tiles come (mla_fp8_tiles.py),
or how the run was chosen (mla_plan.py). Up to 16 rows go by mla_decode_fp8_terms.py. The operands
are swapped, since so few rows (query tokens and heads folded) would fill half of a 64-row tile:
S^T = K Q^T and O^T = V^T P^T have the 64 tokens and the latent columns as their large axis, so a
tile costs 1360 cycles of tensor core and shared memory where the plain form costs 2176, and Q takes
36 KB instead of 72. That room holds two bf16 tiles: one is computed with while a warpgroup fills
the other from e4m3.
Gluon has no interpreter: checked against the reference on a GPU, compiled for sm_90 without one.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from kernels.triton.mla_fp8_tiles import convert, first_row, next_row, produce, store_run
from kernels.triton.quick_launch import quick_launch

mbarrier = hopper.mbarrier


@gluon.jit
def _load_queries(q, q_lo, q_hi, q_rope, ROWS: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Rows of q [N, D + 64] to shared memory, zeros behind the first ROWS."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = q + row[:, None] * (D + 64) + column[None, :]
    live = (row < ROWS)[:, None]
    for c in gl.static_range(D // 64):
        values = gl.load(at + c * 64, mask=live, other=0.0)
        if c < D // 128:
            q_lo.slice(c * 64, 64, dim=1).store(values)
        else:
            q_hi.slice((c - D // 128) * 64, 64, dim=1).store(values)
    q_rope.store(gl.load(at + D, mask=live, other=0.0))
    hopper.fence_async_shared()


@gluon.jit
def _compute(
    q,
    q_lo,
    q_hi,
    q_rope,
    kv_lo,
    kv_hi,
    kv_rope,
    p_tile,
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
    b, tile, remaining, num_tiles, _, _, _ = first_row(plan, part)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    zero = gl.zeros([TILE, N], gl.float32, layout=layout)
    while remaining > 0:
        _load_queries(q + b.to(gl.int64) * ROWS * (D + 64), q_lo, q_hi, q_rope, ROWS, N, D)
        seq_len = gl.load(seq_lens + b)
        limit = seq_len - Q_LEN + 1 + rows // H
        m_i = gl.full([N], float("-inf"), gl.float32, layout=col_layout)
        sums = gl.zeros([TILE, N], gl.float32, layout=layout)
        lo = gl.zeros([HALF, N], gl.float32, layout=layout)
        hi = gl.zeros([HALF, N], gl.float32, layout=layout)
        for j in range(tile, stop):
            here = step & 1
            rope = kv_rope.index(0)
            mbarrier.wait(rope_full.index(0), here)
            mbarrier.wait(kv_full.index(here), (step >> 1) & 1)
            k_lo = kv_lo.index(here)
            k_hi = kv_hi.index(here)
            s = hopper.warpgroup_mma(
                rope, q_rope.permute([1, 0]), zero, use_acc=False, is_async=True
            )
            s = hopper.warpgroup_mma(k_lo, q_lo.permute([1, 0]), s, is_async=True)
            s = hopper.warpgroup_mma(k_hi, q_hi.permute([1, 0]), s, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(rope_empty.index(0), count=1)
            p_columns = p_tile.permute([1, 0])
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


@quick_launch
@gluon.jit(do_not_specialize_on_alignment=["row_slots", "seq_lens"])
def mla_decode_fp8_kernel(
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
    N: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
):
    """Program (part). q bf16 [rows * H, D + 64]; descriptors: kv bytes [rows, D], pages `page_rows`
    rows apart, in boxes of 64 by 128; rope [rows, 64] likewise."""
    HALF: gl.constexpr = D // 2
    part = gl.program_id(0)
    # Layouts of bf16 tiles that the tensor core reads: rows of 128 bytes, swizzled.
    bf16_tile: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    q_lo = gl.allocate_shared_memory(gl.bfloat16, [N, HALF], bf16_tile)
    q_hi = gl.allocate_shared_memory(gl.bfloat16, [N, HALF], bf16_tile)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [N, 64], bf16_tile)
    coded = gl.allocate_shared_memory(gl.uint8, [4, TILE, 128], coded_desc.layout)
    kv_lo = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], bf16_tile)
    kv_hi = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], bf16_tile)
    kv_rope = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 64], kv_rope_desc.layout)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], bf16_tile)
    rope_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    rope_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    coded_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    coded_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(rope_full.index(0), count=1)
    mbarrier.init(rope_empty.index(0), count=1)
    mbarrier.init(coded_full.index(0), count=1)
    mbarrier.init(coded_empty.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q,
                    q_lo,
                    q_hi,
                    q_rope,
                    kv_lo,
                    kv_hi,
                    kv_rope,
                    p_tile,
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
                    1,
                    1,
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
                    1,
                    1,
                ),
            ),
        ],
        [4, 1],
        [152, 32],
    )
    gdc_launch_dependents()
