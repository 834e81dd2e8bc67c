# SPDX-License-Identifier: Apache-2.0
"""MLA prefill beside the Hopper kernel: gather of paged latents, attention, merge of parts.

Owns: the kernels that any CUDA GPU runs. Does not know: how work was cut (mla_prefill_plan.py),
the expansion of latents into keys and values.
Source: FlashAttention-2 (arXiv 2307.08691); merging of split-KV attention by log-sum-exp.
"""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.triton.quick_launch import quick_launch


@quick_launch
@triton.jit
def gather_latents_kernel(
    kv,
    page_table,
    pages,
    out,
    page_table_stride,
    page_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (page of the plan, ROWS of its tokens): copy them; zeros where there is no token,
    whatever the pool holds there."""
    record = pages + tl.program_id(0) * 4
    slot = tl.load(record).to(tl.int64)
    index = tl.load(record + 1)
    tokens = tl.load(record + 2)
    page = tl.load(page_table + slot * page_table_stride + index).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH_PAD)
    inside = (column < WIDTH)[None, :]
    source = kv + page * page_stride + row[:, None] * WIDTH + column[None, :]
    values = tl.load(source, mask=inside & (row < tokens)[:, None], other=0.0)
    target = (tl.program_id(0).to(tl.int64) * PAGE + row)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, values, mask=inside)


@quick_launch
@triton.jit
def gather_planes_kernel(
    values,
    scales,
    rope,
    page_table,
    pages,
    out,
    page_table_stride,
    page_stride,
    scale_page_stride,
    rope_page_stride,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
):
    """As gather_latents_kernel, out of fp8 planes: value * factor, exact in bf16."""
    record = pages + tl.program_id(0) * 4
    slot = tl.load(record).to(tl.int64)
    index = tl.load(record + 1)
    tokens = tl.load(record + 2)
    page = tl.load(page_table + slot * page_table_stride + index).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_token = (row < tokens)[:, None]
    c = tl.arange(0, C)
    e = tl.arange(0, R)
    g = tl.arange(0, C // 128)
    kind: tl.constexpr = out.dtype.element_ty
    coded = tl.load(values + page * page_stride + row[:, None] * C + c[None, :])
    factor = tl.load(scales + page * scale_page_stride + row[:, None] * (C // 128) + g[None, :])
    groups = tl.reshape(coded.to(kind), (ROWS, C // 128, 128))
    latents = tl.reshape(groups * factor.to(kind)[:, :, None], (ROWS, C))
    keys = tl.load(rope + page * rope_page_stride + row[:, None] * R + e[None, :])
    place = out + (tl.program_id(0).to(tl.int64) * PAGE + row)[:, None] * (C + R)
    # What a page holds behind its tokens may be anything.
    tl.store(place + c[None, :], tl.where(is_token, latents, 0.0))
    tl.store(place + C + e[None, :], tl.where(is_token, keys.to(kind), 0.0))


@quick_launch
@triton.jit(do_not_specialize=["num_items", "first_head"])
def mla_prefill_kernel(
    q,
    keys,
    latents,
    values,
    items,
    out,
    partial_out,
    partial_lse,
    num_items,
    first_head,
    q_stride,
    kv_heads,
    scale_log2,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (head, item), items fastest; `keys` [tokens, kv_heads, N] and `values` hold the heads
    from `first_head` on."""
    local_head = tl.program_id(0) // num_items
    head = first_head + local_head
    record = items + (tl.program_id(0) % num_items) * 8
    q_row = tl.load(record)
    num_queries = tl.load(record + 1)
    kv_row = tl.load(record + 2).to(tl.int64)
    num_tiles = tl.load(record + 3)
    limit0 = tl.load(record + 4)
    slot = tl.load(record + 5)
    rows = tl.arange(0, BLOCK_M)
    keep = rows < num_queries
    column = tl.arange(0, TILE)
    n = tl.arange(0, N)
    r = tl.arange(0, R)
    d = tl.arange(0, V)
    q_at = q + (q_row + rows).to(tl.int64)[:, None] * q_stride + head * (N + R)
    q_nope = tl.load(q_at + n[None, :], mask=keep[:, None], other=0.0)
    q_rope = tl.load(q_at + N + r[None, :], mask=keep[:, None], other=0.0)
    k_at = keys + ((kv_row + column)[:, None] * kv_heads + local_head) * N + n[None, :]
    rope_at = latents + (kv_row + column)[:, None] * (C + R) + C + r[None, :]
    v_at = values + ((kv_row + column)[:, None] * kv_heads + local_head) * V + d[None, :]
    limit = limit0 + rows
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V], tl.float32)
    for i in tl.range(0, num_tiles, num_stages=STAGES):
        k = tl.load(k_at)
        rope = tl.load(rope_at)
        s = tl.dot(q_rope, rope.T)
        s = tl.dot(q_nope, k.T, s) * scale_log2
        s = tl.where((i * TILE + column)[None, :] < limit[:, None], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - safe_top)
        p = tl.exp2(s - safe_top[:, None])
        mass = mass * shrink + tl.sum(p, axis=1)
        v = tl.load(v_at)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
        k_at += TILE * kv_heads * N
        rope_at += TILE * (C + R)
        v_at += TILE * kv_heads * V
    acc = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    if slot < 0:
        at = ((q_row + rows).to(tl.int64) * H + head) * V
        tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=keep[:, None])
    else:
        at = (slot.to(tl.int64) * H + head) * BLOCK_M + rows
        tl.store(partial_out + at[:, None] * V + d[None, :], acc, mask=keep[:, None])
        lse = tl.where(mass > 0.0, top + tl.log2(mass), float("-inf"))
        tl.store(partial_lse + at, lse, mask=keep)


@quick_launch
@triton.jit(do_not_specialize=["first_head"])
def mla_prefill_merge_kernel(
    partial_out,
    partial_lse,
    merges,
    out,
    first_head,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (ROWS queries of a split tile, head): out = sum_p 2^(lse_p - lse) * partial_p."""
    PER_TILE: tl.constexpr = BLOCK_M // ROWS
    record = merges + (tl.program_id(0) // PER_TILE) * 4
    head = first_head + tl.program_id(1)
    q_row = tl.load(record)
    num_queries = tl.load(record + 1)
    slot = tl.load(record + 2).to(tl.int64)
    parts = tl.load(record + 3)
    rows = (tl.program_id(0) % PER_TILE) * ROWS + tl.arange(0, ROWS)
    keep = rows < num_queries
    d = tl.arange(0, V)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V], tl.float32)
    for p in range(parts):
        at = ((slot + p) * H + head) * BLOCK_M + rows
        lse = tl.load(partial_lse + at, mask=keep, other=float("-inf"))
        part = tl.load(partial_out + at[:, None] * V + d[None, :], mask=keep[:, None], other=0.0)
        new_top = tl.maximum(top, lse)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - safe_top)
        weight = tl.exp2(lse - safe_top)
        mass = mass * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = new_top
    acc = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    at = ((q_row + rows).to(tl.int64) * H + head) * V
    tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=keep[:, None])
