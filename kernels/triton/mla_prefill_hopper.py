# SPDX-License-Identifier: Apache-2.0
"""Hopper MLA prefill attention: a TMA producer warp and two consumer warpgroups; bf16, 192 / 128.

Owns: one work item (128 query tokens of one row, one head, a run of KV tiles of 128 tokens, see
mla_prefill_plan.py) over expanded keys and values. Does not know: pages, how keys and values came
about, who merges split items. Each warpgroup holds 64 query tokens: scores, softmax and output
stay in its registers, and P feeds the second product from there. The scores of tile i + 1 are
started before the output of tile i, so that the softmax runs beside the tensor cores.
Gluon has no interpreter: checked against the reference on the GPU, compiled for sm_90 without one.
Source: FlashAttention-3 (arXiv 2407.08608), the overlap inside a warpgroup.
"""

from __future__ import annotations

from kernels._triton import gl, gluon, hopper
from kernels.triton.quick_launch import quick_launch

mbarrier = hopper.mbarrier
tma = hopper.tma


@gluon.jit
def _produce(
    q_nope_desc,
    q_rope_desc,
    k_nope_desc,
    k_rope_desc,
    v_desc,
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    v,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    q_row,
    kv_row,
    head,
    local_head,
    num_tiles,
    N: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Queries once, then a tile of keys and a tile of values in turn."""
    q_column = head * (N + R)
    mbarrier.expect(q_full, 2 * ROWS * (N + R) * 2)
    for side in gl.static_range(2):
        row = q_row + side * ROWS
        tma.async_copy_global_to_shared(q_nope_desc, [row, q_column], q_full, q_nope.index(side))
        tma.async_copy_global_to_shared(
            q_rope_desc, [row, q_column + N], q_full, q_rope.index(side)
        )
    for i in range(num_tiles):
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        row = kv_row + i * TILE
        full = k_full.index(stage)
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(full, TILE * (N + R) * 2)
        tma.async_copy_global_to_shared(k_rope_desc, [row, C], full, k_rope.index(stage))
        column = local_head * N
        tma.async_copy_global_to_shared(k_nope_desc, [row, column], full, k_nope.index(stage))
        full = v_full.index(stage)
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(full, TILE * V * 2)
        tma.async_copy_global_to_shared(v_desc, [row, local_head * V], full, v.index(stage))


@gluon.jit
def _issue_scores(q_nope, q_rope, k_nope, k_rope, zero, i, STAGES: gl.constexpr):
    """Start S = Q K^T of tile i, whose keys are there."""
    stage = i % STAGES
    s = hopper.warpgroup_mma(
        q_rope, k_rope.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    return hopper.warpgroup_mma(q_nope, k_nope.index(stage).permute([1, 0]), s, is_async=True)


@gluon.jit
def _to_bf16(p, LAYOUT: gl.constexpr):
    """P as the A operand of the second product. Two numbers an instruction: the compiler's own cast
    takes one each and packs afterwards."""
    half = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [p],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
    return gl.convert_layout(half, LAYOUT)


@gluon.jit
def _softmax(s, m_i, l_i, limit, column, scale_log2, MASKED: gl.constexpr):
    """P of one tile in fp32, the new running maximum and sum, and the factor of what came before.
    `limit` [rows]: how many of the tile's columns each query sees."""
    if MASKED:
        s = gl.where(column[None, :] < limit[:, None], s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, axis=1) * scale_log2)
    m_safe = m_new
    if MASKED:  # a query that has seen nothing yet
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    p = gl.exp2(s * scale_log2 - m_safe[:, None])
    return p, m_new, l_i * alpha + gl.sum(p, axis=1), alpha


@gluon.jit
def _tiles(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    v,
    k_full,
    k_empty,
    v_full,
    v_empty,
    acc,
    p,
    m_i,
    l_i,
    zero,
    begin,
    end,
    num_tiles,
    limit,
    column,
    scale_log2,
    MASKED: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles [begin, end) of the item: scores of tile i beside the output of tile i - 1, whose
    weights `p` come in; those of the last tile go out."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for i in range(begin, end):
        s = _issue_scores(q_nope, q_rope, k_nope, k_rope, zero, i, STAGES)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        acc = hopper.warpgroup_mma(p, v.index(before), acc, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        p_wide, m_i, l_i, alpha = _softmax(
            s, m_i, l_i, limit - i * TILE, column, scale_log2, MASKED
        )
        # The branch of this wait keeps the assembler from moving the softmax behind the product
        # under way. P stays in fp32 until then, as that product reads the packed one's registers.
        following = i + 1
        mbarrier.wait(
            k_full.index(following % STAGES),
            (following // STAGES) & 1,
            pred=following < num_tiles,
        )
        acc, p_wide = hopper.warpgroup_mma_wait(0, deps=[acc, p_wide])
        mbarrier.arrive(v_empty.index(before), count=1)
        p = _to_bf16(p_wide, operand)
        acc = acc * alpha[:, None]
    return acc, p, m_i, l_i


@gluon.jit
def _consume(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    v,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    head,
    q_row,
    num_queries,
    limit0,
    num_tiles,
    slot,
    H: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SIDE: gl.constexpr,
):
    """64 queries of the item. Query r of it sees the first `limit0 + r` tokens of the run."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = SIDE * ROWS + gl.arange(0, ROWS, layout=row_layout)
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    limit = limit0 + rows
    if num_queries > SIDE * ROWS:
        first_limit = limit0 + SIDE * ROWS
        num_clear = gl.maximum(gl.minimum(num_tiles, first_limit // TILE), 1)
        zero = gl.zeros([ROWS, TILE], gl.float32, layout=layout)
        acc = gl.zeros([ROWS, V], gl.float32, layout=layout)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
        l_i = gl.zeros([ROWS], gl.float32, layout=row_layout)
        mine_nope, mine_rope = q_nope.index(SIDE), q_rope.index(SIDE)
        mbarrier.wait(q_full, 0)
        mbarrier.wait(k_full.index(0), 0)
        s = _issue_scores(mine_nope, mine_rope, k_nope, k_rope, zero, 0, STAGES)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(0), count=1)
        p_wide, m_i, l_i, _alpha = _softmax(s, m_i, l_i, limit, column, scale_log2, True)
        p = _to_bf16(p_wide, operand)
        mbarrier.wait(k_full.index(1 % STAGES), 1 // STAGES, pred=num_tiles > 1)
        acc, p, m_i, l_i = _tiles(
            mine_nope,
            mine_rope,
            k_nope,
            k_rope,
            v,
            k_full,
            k_empty,
            v_full,
            v_empty,
            acc,
            p,
            m_i,
            l_i,
            zero,
            1,
            num_clear,
            num_tiles,
            limit,
            column,
            scale_log2,
            False,
            TILE,
            STAGES,
        )
        acc, p, m_i, l_i = _tiles(
            mine_nope,
            mine_rope,
            k_nope,
            k_rope,
            v,
            k_full,
            k_empty,
            v_full,
            v_empty,
            acc,
            p,
            m_i,
            l_i,
            zero,
            num_clear,
            num_tiles,
            num_tiles,
            limit,
            column,
            scale_log2,
            True,
            TILE,
            STAGES,
        )
        last = (num_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((num_tiles - 1) // STAGES) & 1)
        acc = hopper.warpgroup_mma(p, v.index(last), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        acc = acc * (1.0 / gl.where(l_i > 0.0, l_i, 1.0))[:, None]
        dims = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
        keep = rows < num_queries
        if slot < 0:
            at = ((q_row + rows).to(gl.int64) * H + head) * V
            pointers = out + at[:, None] + dims[None, :]
            gl.store(pointers, acc.to(out.dtype.element_ty), mask=keep[:, None])
        else:
            at = (slot.to(gl.int64) * H + head) * (2 * ROWS) + rows
            gl.store(partial_out + at[:, None] * V + dims[None, :], acc, mask=keep[:, None])
            lse = gl.where(l_i > 0.0, m_i + gl.log2(l_i), float("-inf"))
            gl.store(partial_lse + at, lse, mask=keep)
    else:
        for i in range(num_tiles):
            stage = i % STAGES
            phase = (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage), count=1)


@quick_launch
@gluon.jit(do_not_specialize=["num_items", "first_head"])
def mla_prefill_hopper_kernel(
    q_nope_desc,
    q_rope_desc,
    k_nope_desc,
    k_rope_desc,
    v_desc,
    items,
    out,
    partial_out,
    partial_lse,
    num_items,
    first_head,
    scale_log2,
    H: gl.constexpr,
    N: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Program (head, item), items fastest. Descriptors: q [tokens, H * (N + R)], latents [tokens,
    C + R]; keys and values [tokens, heads * N or V] of the heads from `first_head` on; boxes of 64
    query or TILE KV tokens."""
    ROWS: gl.constexpr = 64
    program = gl.program_id(0)
    local_head = program // num_items
    head = first_head + local_head
    record = items + (program % num_items) * 8
    q_row = gl.load(record)
    num_queries = gl.load(record + 1)
    kv_row = gl.load(record + 2)
    num_tiles = gl.load(record + 3)
    limit0 = gl.load(record + 4)
    slot = gl.load(record + 5)
    q_nope = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, N], q_nope_desc.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, R], q_rope_desc.layout)
    k_nope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, N], k_nope_desc.layout)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, R], k_rope_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, V], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_nope,
                    q_rope,
                    k_nope,
                    k_rope,
                    v,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    out,
                    partial_out,
                    partial_lse,
                    scale_log2,
                    head,
                    q_row,
                    num_queries,
                    limit0,
                    num_tiles,
                    slot,
                    H,
                    V,
                    ROWS,
                    TILE,
                    STAGES,
                    0,
                ),
            ),
            (
                _consume,
                (
                    q_nope,
                    q_rope,
                    k_nope,
                    k_rope,
                    v,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    out,
                    partial_out,
                    partial_lse,
                    scale_log2,
                    head,
                    q_row,
                    num_queries,
                    limit0,
                    num_tiles,
                    slot,
                    H,
                    V,
                    ROWS,
                    TILE,
                    STAGES,
                    1,
                ),
            ),
            (
                _produce,
                (
                    q_nope_desc,
                    q_rope_desc,
                    k_nope_desc,
                    k_rope_desc,
                    v_desc,
                    q_nope,
                    q_rope,
                    k_nope,
                    k_rope,
                    v,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    q_row,
                    kv_row,
                    head,
                    local_head,
                    num_tiles,
                    N,
                    R,
                    V,
                    C,
                    ROWS,
                    TILE,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
