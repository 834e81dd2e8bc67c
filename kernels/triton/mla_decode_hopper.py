# SPDX-License-Identifier: Apache-2.0
"""Hopper MLA decode: TMA producer warp, a score warpgroup, two output warpgroups; bf16 paged KV.

Owns: one part's run of tiles (see mla_plan.py). Does not know: how the run was chosen. A 64-row
tile holds the folded (query token, head) rows; a page is a tile of 64 KV tokens. The score
warpgroup computes S = Q K^T and the online softmax and hands P (bf16) and the rescale factors
over in shared memory; each output warpgroup accumulates half of the latent columns of P V. While
they work on tile i, the score warpgroup is at tile i + 1. Two KV stages fill the shared memory
that Q leaves.
Measured and not done (H200, 2026-11): each output warpgroup with its own S costs 2.5 us a tile of
tensor-core time against 2.1 us of HBM time; starting the scores of tile i + 1 before the softmax
of tile i doubles the time of a tile (the KV stage is held longer); four stages of 32 tokens are
10-30 % slower than two of 64 (Q is read twice as often). Gluon has no interpreter: checked
against the reference on the GPU, compiled for sm_90 without one.
Source: sizes and the column split follow FlashMLA (DeepSeek, 2025).
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from kernels.triton.quick_launch import quick_launch

mbarrier = hopper.mbarrier
tma = hopper.tma


@gluon.jit
def _next_span(plan, b, remaining, NUM_PARTS: gl.constexpr):
    """Tiles of span b, and how many of them this part still takes from its start."""
    indptr = plan + NUM_PARTS * 8
    num_tiles = gl.load(indptr + b + 1) - gl.load(indptr + b)
    return num_tiles, gl.minimum(num_tiles, remaining)


@gluon.jit
def _span(plan, b, num_spans, NUM_PARTS: gl.constexpr):
    """Where the plan says more of span b; there where rows are grouped."""
    return plan + (NUM_PARTS * 8 + 1) + num_spans * 3 + b * 8


@gluon.jit
def _load_tile(
    kv_lo_desc,
    kv_rope_desc,
    kv_lo,
    kv_hi,
    kv_rope,
    kv_full,
    kv_empty,
    kv_row,
    step,
    D: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Wait until the stage of tile `step` is free and fill it from row `kv_row` on."""
    stage = step % STAGES
    full = kv_full.index(stage)
    mbarrier.wait(kv_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full, (D + 64) * TILE * 2)
    tma.async_copy_global_to_shared(kv_rope_desc, [kv_row, D], full, kv_rope.index(stage))
    tma.async_copy_global_to_shared(kv_lo_desc, [kv_row, 0], full, kv_lo.index(stage))
    tma.async_copy_global_to_shared(kv_lo_desc, [kv_row, D // 2], full, kv_hi.index(stage))


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
    num_spans,
    m_block,
    part,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
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
    offset = gl.load(record + 7)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    segment = 0
    first = tile
    if USE_PDL:
        pages = page_table + slot.to(gl.int64) * page_table_stride + offset
        ahead = gl.minimum(gl.minimum(stop, tile + STAGES), settled)
        for j in range(tile, ahead):
            _load_tile(
                kv_lo_desc,
                kv_rope_desc,
                kv_lo,
                kv_hi,
                kv_rope,
                kv_full,
                kv_empty,
                page * page_rows,
                step,
                D,
                TILE,
                STAGES,
            )
            page = gl.load(pages + gl.minimum(j + 1, stop - 1))
            step += 1
        first += step
        gdc_wait()
    while remaining > 0:
        pages = page_table + slot.to(gl.int64) * page_table_stride + offset
        query = b
        if GROUP > 1:
            query = gl.load(_span(plan, b, num_spans, NUM_PARTS) + 3)
        mbarrier.wait(q_empty, (segment & 1) ^ 1)
        mbarrier.expect(q_full, (D + 64) * 64 * 2)
        q_row = query * (H * Q_LEN) + m_block * 64
        tma.async_copy_global_to_shared(q_rope_desc, [q_row, D], q_full, q_rope)
        tma.async_copy_global_to_shared(q_lo_desc, [q_row, 0], q_full, q_lo)
        tma.async_copy_global_to_shared(q_lo_desc, [q_row, D // 2], q_full, q_hi)
        for j in range(first, stop):
            _load_tile(
                kv_lo_desc,
                kv_rope_desc,
                kv_lo,
                kv_hi,
                kv_rope,
                kv_full,
                kv_empty,
                page * page_rows,
                step,
                D,
                TILE,
                STAGES,
            )
            page = gl.load(pages + gl.minimum(j + 1, stop - 1))
            step += 1
        remaining -= stop - tile
        b += 1
        tile = 0
        first = tile
        segment += 1
        if remaining > 0:
            num_tiles, stop = _next_span(plan, b, remaining, NUM_PARTS)
            if GROUP > 1:
                span = _span(plan, b, num_spans, NUM_PARTS)
                slot = gl.load(span)
                offset = gl.load(span + 1)
            else:
                slot = gl.load(row_slots + b)
            page = gl.load(page_table + slot.to(gl.int64) * page_table_stride + offset)


@gluon.jit
def _clear_tail(tile, valid, TILE: gl.constexpr):
    """Zero the rows of a stage from `valid` on: 0 * NaN would reach the output through P V."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    tile.store(gl.where((row < valid)[:, None], tile.load(layout), 0.0))


@gluon.jit
def _issue_scores(
    q_lo,
    q_hi,
    q_rope,
    kv_lo,
    kv_hi,
    kv_rope,
    kv_full,
    zero,
    step,
    valid,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Wait for the stage of tile `step`, of which `valid` tokens exist, and start S = Q K^T."""
    stage = step % STAGES
    mbarrier.wait(kv_full.index(stage), (step // STAGES) & 1)
    if valid < TILE:
        _clear_tail(kv_lo.index(stage), valid, TILE)
        _clear_tail(kv_hi.index(stage), valid, TILE)
        hopper.fence_async_shared()
    k_rope = kv_rope.index(stage).permute([1, 0])
    k_lo = kv_lo.index(stage).permute([1, 0])
    k_hi = kv_hi.index(stage).permute([1, 0])
    s = hopper.warpgroup_mma(q_rope, k_rope, zero, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma(q_lo, k_lo, s, is_async=True)
    return hopper.warpgroup_mma(q_hi, k_hi, s, is_async=True)


@gluon.jit
def _hand_over(
    s,
    m_i,
    l_i,
    limit,
    first_limit,
    begin,
    cols,
    scale_log2,
    p_tile,
    factor,
    p_full,
    p_empty,
    event,
    TILE: gl.constexpr,
):
    """Online softmax of one tile; P and the shrink factor go to the output warpgroups."""
    if begin + TILE > first_limit:
        s = gl.where((begin + cols)[None, :] < limit[:, None], s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, axis=1) * scale_log2)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    p = gl.exp2(s * scale_log2 - m_safe[:, None])
    mbarrier.wait(p_empty, (event & 1) ^ 1)
    p_tile.store(p.to(gl.bfloat16))
    factor.store(alpha)
    hopper.fence_async_shared()
    mbarrier.arrive(p_full, count=1)
    return m_new, l_i * alpha + gl.sum(p, axis=1)


@gluon.jit
def _score(
    q_lo,
    q_hi,
    q_rope,
    kv_lo,
    kv_hi,
    kv_rope,
    p_tile,
    factor,
    q_full,
    q_empty,
    kv_full,
    p_full,
    p_empty,
    seq_lens,
    plan,
    partial_lse,
    scale_log2,
    num_spans,
    m_block,
    part,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Per tile: P and the factor by which earlier output shrinks; after a row: 1 / sum."""
    ROWS: gl.constexpr = H * Q_LEN
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = m_block * 64 + gl.arange(0, 64, layout=row_layout)
    cols = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    if USE_PDL:
        gdc_wait()
    record = plan + part * 8
    b = gl.load(record)
    tile = gl.load(record + 1)
    remaining = gl.load(record + 2)
    num_tiles = gl.load(record + 3)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    event = 0
    segment = 0
    zero = gl.zeros([64, TILE], gl.float32, layout=layout)
    while remaining > 0:
        num_queries = ROWS
        is_part = b * 0
        if GROUP > 1:
            span = _span(plan, b, num_spans, NUM_PARTS)
            seq_len = gl.load(span + 2)  # from the span's first tile on
            num_queries = gl.load(span + 4) * H
            is_part = gl.load(span + 5)
        else:
            seq_len = gl.load(seq_lens + b)
        # Row 0 sees least: tiles before its limit need no mask. What a group shares, all see.
        first_limit = seq_len - Q_LEN + 1
        limit = first_limit + rows // H
        m_i = gl.full([64], float("-inf"), gl.float32, layout=row_layout)
        l_i = gl.zeros([64], gl.float32, layout=row_layout)
        mbarrier.wait(q_full, segment & 1)
        for j in range(tile, stop):
            pending = _issue_scores(
                q_lo,
                q_hi,
                q_rope,
                kv_lo,
                kv_hi,
                kv_rope,
                kv_full,
                zero,
                step,
                seq_len - j * TILE,
                TILE,
                STAGES,
            )
            s = hopper.warpgroup_mma_wait(0, deps=[pending])
            m_i, l_i = _hand_over(
                s,
                m_i,
                l_i,
                limit,
                first_limit,
                j * TILE,
                cols,
                scale_log2,
                p_tile,
                factor,
                p_full,
                p_empty,
                event,
                TILE,
            )
            step += 1
            event += 1
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(p_empty, (event & 1) ^ 1)
        factor.store(1.0 / gl.where(l_i > 0.0, l_i, 1.0))  # no KV: the output is zero anyway
        mbarrier.arrive(p_full, count=1)
        event += 1
        if (stop - tile != num_tiles) | (is_part != 0):
            lse = gl.where(l_i > 0.0, m_i + gl.log2(l_i), float("-inf"))
            at = (part + b).to(gl.int64) * ROWS_PAD + rows
            gl.store(partial_lse + at, lse, mask=rows < num_queries)
        remaining -= stop - tile
        b += 1
        tile = 0
        segment += 1
        if remaining > 0:
            num_tiles, stop = _next_span(plan, b, remaining, NUM_PARTS)


@gluon.jit
def _accumulate(
    values,
    p_tile,
    factor,
    kv_full,
    kv_empty,
    p_full,
    p_empty,
    plan,
    out,
    partial_out,
    num_spans,
    m_block,
    part,
    H: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    STAGES: gl.constexpr,
    SIDE: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """SIDE 0 / 1: half of the latent columns; `values` are that half of the KV stages."""
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = m_block * 64 + gl.arange(0, 64, layout=row_layout)
    cols = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    if USE_PDL:
        gdc_wait()
    record = plan + part * 8
    b = gl.load(record)
    tile = gl.load(record + 1)
    remaining = gl.load(record + 2)
    num_tiles = gl.load(record + 3)
    stop = gl.minimum(num_tiles, tile + remaining)
    step = 0
    event = 0
    while remaining > 0:
        acc = gl.zeros([64, HALF], gl.float32, layout=layout)
        for _j in range(tile, stop):
            stage = step % STAGES
            mbarrier.wait(kv_full.index(stage), (step // STAGES) & 1)
            mbarrier.wait(p_full, event & 1)
            acc = acc * factor.load(row_layout)[:, None]
            acc = hopper.warpgroup_mma(p_tile, values.index(stage), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(kv_empty.index(stage), count=1)
            mbarrier.arrive(p_empty, count=1)
            step += 1
            event += 1
        mbarrier.wait(p_full, event & 1)
        acc = acc * factor.load(row_layout)[:, None]
        mbarrier.arrive(p_empty, count=1)
        event += 1
        query = b
        num_queries = ROWS
        is_part = b * 0
        if GROUP > 1:
            span = _span(plan, b, num_spans, NUM_PARTS)
            query = gl.load(span + 3)
            num_queries = gl.load(span + 4) * H
            is_part = gl.load(span + 5)
        keep = (rows < num_queries)[:, None]
        if (stop - tile == num_tiles) & (is_part == 0):
            o = (query.to(gl.int64) * ROWS + rows) * D
            gl.store(out + o[:, None] + cols[None, :], acc.to(out.dtype.element_ty), mask=keep)
        else:
            o = ((part + b).to(gl.int64) * ROWS_PAD + rows) * D
            gl.store(partial_out + o[:, None] + cols[None, :], acc, mask=keep)
        remaining -= stop - tile
        b += 1
        tile = 0
        if remaining > 0:
            num_tiles, stop = _next_span(plan, b, remaining, NUM_PARTS)


@quick_launch
@gluon.jit(
    do_not_specialize=["num_rows", "num_groups"],
    do_not_specialize_on_alignment=["row_slots", "seq_lens"],
)
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
    num_rows,
    num_groups,
    scale_log2,
    H: gl.constexpr,
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
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
    num_spans = num_rows + num_groups
    q_lo = gl.allocate_shared_memory(gl.bfloat16, [64, HALF], q_lo_desc.layout)
    q_hi = gl.allocate_shared_memory(gl.bfloat16, [64, HALF], q_lo_desc.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], q_rope_desc.layout)
    kv_lo = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HALF], kv_lo_desc.layout)
    kv_hi = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HALF], kv_lo_desc.layout)
    kv_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], kv_rope_desc.layout)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [64, TILE], q_rope_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    factor = gl.allocate_shared_memory(gl.float32, [64], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                _score,
                (
                    q_lo,
                    q_hi,
                    q_rope,
                    kv_lo,
                    kv_hi,
                    kv_rope,
                    p_tile,
                    factor,
                    q_full,
                    q_empty,
                    kv_full,
                    p_full,
                    p_empty,
                    seq_lens,
                    plan,
                    partial_lse,
                    scale_log2,
                    num_spans,
                    m_block,
                    part,
                    H,
                    Q_LEN,
                    GROUP,
                    NUM_PARTS,
                    ROWS_PAD,
                    TILE,
                    STAGES,
                    USE_PDL,
                ),
            ),
            (
                _accumulate,
                (
                    kv_lo,
                    p_tile,
                    factor,
                    kv_full,
                    kv_empty,
                    p_full,
                    p_empty,
                    plan,
                    out,
                    partial_out,
                    num_spans,
                    m_block,
                    part,
                    H,
                    H * Q_LEN,
                    D,
                    GROUP,
                    NUM_PARTS,
                    ROWS_PAD,
                    STAGES,
                    0,
                    USE_PDL,
                ),
            ),
            (
                _accumulate,
                (
                    kv_hi,
                    p_tile,
                    factor,
                    kv_full,
                    kv_empty,
                    p_full,
                    p_empty,
                    plan,
                    out,
                    partial_out,
                    num_spans,
                    m_block,
                    part,
                    H,
                    H * Q_LEN,
                    D,
                    GROUP,
                    NUM_PARTS,
                    ROWS_PAD,
                    STAGES,
                    1,
                    USE_PDL,
                ),
            ),
            (
                _produce,
                (
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
                    num_spans,
                    m_block,
                    part,
                    H,
                    Q_LEN,
                    D,
                    GROUP,
                    NUM_PARTS,
                    TILE,
                    STAGES,
                    USE_PDL,
                ),
            ),
        ],
        [4, 4, 1],
        [176, 176, 24],
    )
    if USE_PDL:
        gdc_launch_dependents()
