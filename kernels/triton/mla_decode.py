# SPDX-License-Identifier: Apache-2.0
"""Portable split-KV MLA decode over paged KV (page = tile = 64 tokens).

Owns: one part's run of tiles (see mla_plan.py). Does not know: how the run was chosen.
Query tokens and heads of a row are folded into the M axis of one tile: row `r` is query token
`r // H`, head `r % H`; likewise those of rows that share tiles. Runs in the interpreter in fp32; on
NVIDIA GPUs it is the fallback of the Hopper kernel.
"""

from __future__ import annotations

from kernels._triton import gdc_launch_dependents, tl, triton


@triton.jit(do_not_specialize=["num_groups"])
def mla_decode_kernel(
    q,
    kv,
    kv_scales,
    kv_rope,
    page_table,
    row_slots,
    seq_lens,
    plan,
    out,
    partial_out,
    partial_lse,
    num_rows,
    num_groups,
    page_table_stride,
    page_stride,
    scale_page_stride,
    rope_page_stride,
    scale_log2,
    H: tl.constexpr,
    Q_LEN: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (M block, part). q [rows * Q_LEN, H, D + R], kv [pages, TILE, D + R],
    pages `page_stride` elements apart. FP8: kv e4m3 [pages, TILE, D], kv_scales fp32 [pages, TILE,
    D / 128], kv_rope [pages, TILE, R]; else those are not read."""
    ROWS: tl.constexpr = H * Q_LEN
    if USE_PDL:
        gdc_launch_dependents()  # they wait for this kernel's end before they read
    m_block = tl.program_id(0)
    part = tl.program_id(1)
    b = tl.load(plan + part * 8)
    tile = tl.load(plan + part * 8 + 1)
    remaining = tl.load(plan + part * 8 + 2)
    indptr = plan + NUM_PARTS * 8
    spans = indptr + (num_groups + num_rows) * 3 + 1
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    e = tl.arange(0, R)
    t = tl.arange(0, TILE)
    while remaining > 0:
        row_start = tl.load(indptr + b)
        num_tiles = tl.load(indptr + b + 1) - row_start
        stop = tl.minimum(num_tiles, tile + remaining)
        if GROUP > 1:
            span = spans + b * 8
            pages = page_table + tl.load(span).to(tl.int64) * page_table_stride
            pages += tl.load(span + 1)
            seq_len = tl.load(span + 2)  # from the span's first tile on
            query = tl.load(span + 3)
            in_rows = rows < tl.load(span + 4) * H
            is_part = tl.load(span + 5)
        else:
            pages = page_table + tl.load(row_slots + b).to(tl.int64) * page_table_stride
            seq_len = tl.load(seq_lens + b)
            query = b
            in_rows = rows < ROWS
            is_part = 0
        q_rows = (query.to(tl.int64) * ROWS + rows) * (D + R)
        q_d = tl.load(q + q_rows[:, None] + d[None, :], mask=in_rows[:, None], other=0.0)
        q_e = tl.load(q + q_rows[:, None] + D + e[None, :], mask=in_rows[:, None], other=0.0)
        limit = seq_len - Q_LEN + 1 + rows // H
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        page = tl.load(pages + tile)
        for j in tl.range(tile, stop, num_stages=STAGES):
            base = kv + page.to(tl.int64) * page_stride
            if FP8:
                scale_base = kv_scales + page.to(tl.int64) * scale_page_stride
                rope_base = kv_rope + page.to(tl.int64) * rope_page_stride
            page = tl.load(pages + tl.minimum(j + 1, stop - 1))
            # A page's unused tokens may hold anything, and 0 * NaN would reach the output.
            real = (j * TILE + t < seq_len)[:, None]
            if FP8:
                g = tl.arange(0, D // 128)
                k_d = tl.load(base + t[:, None] * D + d[None, :], mask=real, other=0.0)
                factor = tl.load(
                    scale_base + t[:, None] * (D // 128) + g[None, :], mask=real, other=0.0
                )
                groups = tl.reshape(k_d.to(q_d.dtype), (TILE, D // 128, 128))
                k_d = tl.reshape(groups * factor.to(q_d.dtype)[:, :, None], (TILE, D))
                k_e = tl.load(rope_base + t[:, None] * R + e[None, :], mask=real, other=0.0)
                k_e = k_e.to(q_d.dtype)
            else:
                k_d = tl.load(base + t[:, None] * (D + R) + d[None, :], mask=real, other=0.0)
                k_e = tl.load(base + t[:, None] * (D + R) + D + e[None, :], mask=real, other=0.0)
            s = tl.dot(q_d, k_d.T)
            s = tl.dot(q_e, k_e.T, s)
            s = s * scale_log2
            s = tl.where((j * TILE + t)[None, :] < limit[:, None], s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, axis=1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - m_safe)
            p = tl.exp2(s - m_safe[:, None])
            l_i = l_i * alpha + tl.sum(p, axis=1)
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(k_d.dtype), k_d, acc)
            m_i = m_new
        inv = 1.0 / tl.where(l_i > 0.0, l_i, 1.0)  # no KV: acc is zero anyway
        acc = acc * inv[:, None]
        if ((stop - tile) == num_tiles) & (is_part == 0):
            o = (query.to(tl.int64) * ROWS + rows) * D
            tl.store(
                out + o[:, None] + d[None, :],
                acc.to(out.dtype.element_ty),
                mask=in_rows[:, None],
            )
        else:
            slot = (part + b).to(tl.int64)
            lse = tl.where(l_i > 0.0, m_i + tl.log2(tl.where(l_i > 0.0, l_i, 1.0)), float("-inf"))
            o = (slot * ROWS_PAD + rows) * D
            tl.store(partial_out + o[:, None] + d[None, :], acc, mask=in_rows[:, None])
            tl.store(partial_lse + slot * ROWS_PAD + rows, lse, mask=in_rows)
        remaining -= stop - tile
        b += 1
        tile = 0
