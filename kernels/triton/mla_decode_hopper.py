# SPDX-License-Identifier: Apache-2.0
"""Hopper MLA decode: one TMA producer warp, two wgmma warpgroups, bf16 paged KV (page = 64 tokens).

Owns: one part's run of tiles (see mla_plan.py). Does not know: how the run was chosen.
A 64-row tile holds the folded (query token, head) rows. Each warpgroup computes the whole 64 x 64
score tile for itself and one half of the latent columns of the output, so the two share nothing but
the KV stages: they drift apart, and one runs its softmax while the other feeds the tensor cores. The
doubled QK work (~1.6 us a tile of shared-memory traffic) hides under HBM (2.1 us a tile at bf16).
Gluon has no interpreter: checked against the reference on the GPU, compiled for sm_90 without one.
Source: the role split follows FlashMLA (DeepSeek, 2025), without its exchange of P through shared
memory.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gl, gluon, hopper

mbarrier = hopper.mbarrier
tma = hopper.tma


@gluon.jit
def _part_range(indptr, b, tile, remaining):
    num_tiles = gl.load(indptr + b + 1) - gl.load(indptr + b)
    return num_tiles, gl.minimum(num_tiles, tile + remaining)


@gluon.jit
def _produce(
    q_lo_desc,
    q_rope_desc,
    kv_lo_desc,
    kv_rope_desc,
    q_lo,
    q_hi,
    q_rope,
    kv_lo,
    kv_hi,
    kv_rope,
    q_full,
    q_empty,
    kv_full,
    kv_empty,
    page_table,
    row_slots,
    plan,
    page_table_stride,
    page_rows,
    m_block,
    part,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    HALF: gl.constexpr = D // 2
    b = gl.load(plan + part * 4)
    tile = gl.load(plan + part * 4 + 1)
    remaining = gl.load(plan + part * 4 + 2)
    indptr = plan + NUM_PARTS * 4
    step = 0
    segment = 0
    while remaining > 0:
        num_tiles, stop = _part_range(indptr, b, tile, remaining)
        pages = page_table + gl.load(row_slots + b).to(gl.int64) * page_table_stride
        page = gl.load(pages + tile)
        mbarrier.wait(q_empty, (segment & 1) ^ 1)
        mbarrier.expect(q_full, (D + 64) * 64 * 2)
        q_row = b * ROWS + m_block * 64
        tma.async_copy_global_to_shared(q_rope_desc, [q_row, D], q_full, q_rope)
        tma.async_copy_global_to_shared(q_lo_desc, [q_row, 0], q_full, q_lo)
        tma.async_copy_global_to_shared(q_lo_desc, [q_row, HALF], q_full, q_hi)
        for j in range(tile, stop):
            stage = step % STAGES
            full = kv_full.index(stage)
            mbarrier.wait(kv_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, (D + 64) * TILE * 2)
            kv_row = page * page_rows
            tma.async_copy_global_to_shared(kv_rope_desc, [kv_row, D], full, kv_rope.index(stage))
            tma.async_copy_global_to_shared(kv_lo_desc, [kv_row, 0], full, kv_lo.index(stage))
            tma.async_copy_global_to_shared(kv_lo_desc, [kv_row, HALF], full, kv_hi.index(stage))
            page = gl.load(pages + gl.minimum(j + 1, stop - 1))
            step += 1
        remaining -= stop - tile
        b += 1
        tile = 0
        segment += 1


@gluon.jit
def _consume(
    q_lo,
    q_hi,
    q_rope,
    kv_lo,
    kv_hi,
    kv_rope,
    q_full,
    q_empty,
    kv_full,
    kv_empty,
    seq_lens,
    plan,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    m_block,
    part,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SIDE: gl.constexpr,
):
    """SIDE 0 / 1: this warpgroup's half of the latent columns."""
    ROWS: gl.constexpr = H * Q_LEN
    HALF: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    rows = m_block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    cols = gl.arange(0, TILE, layout=gl.SliceLayout(0, s_layout))
    o_rows = m_block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
    o_cols = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, o_layout))
    q_token = rows // H
    b = gl.load(plan + part * 4)
    tile = gl.load(plan + part * 4 + 1)
    remaining = gl.load(plan + part * 4 + 2)
    indptr = plan + NUM_PARTS * 4
    step = 0
    segment = 0
    zero = gl.zeros([64, TILE], gl.float32, layout=s_layout)
    while remaining > 0:
        num_tiles, stop = _part_range(indptr, b, tile, remaining)
        limit = gl.load(seq_lens + b) - Q_LEN + 1 + q_token
        m_i = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
        l_i = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, s_layout))
        acc = gl.zeros([64, HALF], gl.float32, layout=o_layout)
        mbarrier.wait(q_full, segment & 1)
        for j in range(tile, stop):
            stage = step % STAGES
            mbarrier.wait(kv_full.index(stage), (step // STAGES) & 1)
            k_rope = kv_rope.index(stage)
            k_lo = kv_lo.index(stage)
            k_hi = kv_hi.index(stage)
            s = hopper.warpgroup_mma(
                q_rope, k_rope.permute([1, 0]), zero, use_acc=False, is_async=True
            )
            s = hopper.warpgroup_mma(q_lo, k_lo.permute([1, 0]), s, is_async=True)
            s = hopper.warpgroup_mma(q_hi, k_hi.permute([1, 0]), s, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            s = s * scale_log2
            s = gl.where((j * TILE + cols)[None, :] < limit[:, None], s, float("-inf"))
            m_new = gl.maximum(m_i, gl.max(s, axis=1))
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.exp2(m_i - m_safe)
            p = gl.exp2(s - m_safe[:, None])
            l_i = l_i * alpha + gl.sum(p, axis=1)
            m_i = m_new
            alpha_o = gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))
            acc = acc * alpha_o[:, None]
            p_op = gl.convert_layout(p.to(gl.bfloat16), p_layout)
            if SIDE == 0:
                acc = hopper.warpgroup_mma(p_op, k_lo, acc, is_async=True)
            else:
                acc = hopper.warpgroup_mma(p_op, k_hi, acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(kv_empty.index(stage), count=1)
            step += 1
        mbarrier.arrive(q_empty, count=1)
        inv = 1.0 / gl.where(l_i > 0.0, l_i, 1.0)  # no KV: acc is zero anyway
        inv_o = gl.convert_layout(inv, gl.SliceLayout(1, o_layout))
        acc = acc * inv_o[:, None]
        keep = (o_rows < ROWS)[:, None]
        if (stop - tile) == num_tiles:
            o = (b.to(gl.int64) * ROWS + o_rows) * D
            gl.store(out + o[:, None] + o_cols[None, :], acc.to(out.dtype.element_ty), mask=keep)
        else:
            slot = (part + b).to(gl.int64)
            o = (slot * ROWS_PAD + o_rows) * D
            gl.store(partial_out + o[:, None] + o_cols[None, :], acc, mask=keep)
            if SIDE == 0:
                lse = gl.where(l_i > 0.0, m_i + gl.log2(l_i), float("-inf"))
                gl.store(partial_lse + slot * ROWS_PAD + rows, lse, mask=rows < ROWS)
        remaining -= stop - tile
        b += 1
        tile = 0
        segment += 1


@gluon.jit
def mla_decode_hopper_kernel(
    q_lo_desc,
    q_rope_desc,
    kv_lo_desc,
    kv_rope_desc,
    page_table,
    row_slots,
    seq_lens,
    plan,
    out,
    partial_out,
    partial_lse,
    page_table_stride,
    page_rows,
    scale_log2,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Program (M block, part). Descriptors: q [rows, D + 64], kv [rows, D + 64] with pages
    `page_rows` rows apart; boxes of 64 rows by D / 2 or 64 columns."""
    HALF: gl.constexpr = D // 2
    m_block = gl.program_id(0)
    part = gl.program_id(1)
    q_lo = gl.allocate_shared_memory(gl.bfloat16, [64, HALF], q_lo_desc.layout)
    q_hi = gl.allocate_shared_memory(gl.bfloat16, [64, HALF], q_lo_desc.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], q_rope_desc.layout)
    kv_lo = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HALF], kv_lo_desc.layout)
    kv_hi = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HALF], kv_lo_desc.layout)
    kv_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], kv_rope_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (q_lo, q_hi, q_rope, kv_lo, kv_hi, kv_rope, q_full, q_empty, kv_full, kv_empty,
                 seq_lens, plan, out, partial_out, partial_lse, scale_log2, m_block, part,
                 H, Q_LEN, D, NUM_PARTS, ROWS_PAD, TILE, STAGES, 0),
            ),
            (
                _consume,
                (q_lo, q_hi, q_rope, kv_lo, kv_hi, kv_rope, q_full, q_empty, kv_full, kv_empty,
                 seq_lens, plan, out, partial_out, partial_lse, scale_log2, m_block, part,
                 H, Q_LEN, D, NUM_PARTS, ROWS_PAD, TILE, STAGES, 1),
            ),
            (
                _produce,
                (q_lo_desc, q_rope_desc, kv_lo_desc, kv_rope_desc, q_lo, q_hi, q_rope, kv_lo,
                 kv_hi, kv_rope, q_full, q_empty, kv_full, kv_empty, page_table, row_slots, plan,
                 page_table_stride, page_rows, m_block, part, H * Q_LEN, D, NUM_PARTS, TILE, STAGES),
            ),
        ],
        [4, 1],
        [216, 24],
    )
    if USE_PDL:
        gdc_launch_dependents()
