# SPDX-License-Identifier: Apache-2.0
"""Absorbed latent attention whose sums run in one order, whatever else is in the batch.

Owns: a token's attention over its own KV, cut at multiples of PART_TOKENS of its sequence and
merged from the front. Which parts there are follows from the token's own position, never from how
many rows share a step, so a token gets the same bits in a prompt, in a chunk of one, and decoded.
Does not know: projections, layers.
"""

from __future__ import annotations

import math

import torch

from kernels._triton import tl, triton
from kernels.sizes import cdiv

PART_TOKENS = 1024
TILE = 64
SLICE = 128  # output columns of a program
# (token, part) pairs of one launch: their partial results are fp32 [heads, latent].
SCRATCH_BYTES = 256 << 20


@triton.jit
def fixed_part_kernel(
    q,
    kv,
    page_table,
    token_slots,
    token_lens,
    partial_out,
    partial_lse,
    page_table_stride,
    page_stride,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (part, slice of D, token and block of heads). q [T, H, D + R]; kv [pages, PAGE,
    D + R], pages `page_stride` elements apart; token_lens: tokens that each query sees."""
    part = tl.program_id(0)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    H_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(2) // H_BLOCKS).to(tl.int64)
    h = (tl.program_id(2) % H_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    length = tl.load(token_lens + token)
    if part * PART < length:
        pages = page_table + tl.load(token_slots + token).to(tl.int64) * page_table_stride
        c = tl.arange(0, CHUNK)
        e = tl.arange(0, R)
        q_rows = q + (token * H + h) * (D + R)
        q_rope = tl.load(q_rows[:, None] + D + e[None, :], mask=(h < H)[:, None], other=0.0)
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, SLICE], tl.float32)
        stop = tl.minimum(length, (part + 1) * PART)
        for start in range(part * PART, stop, TILE):
            at = start + tl.arange(0, TILE)
            real = at < stop
            page = tl.load(pages + at // PAGE, mask=real, other=0).to(tl.int64)
            row = kv + page * page_stride + (at % PAGE) * (D + R)
            k_rope = tl.load(row[:, None] + D + e[None, :], mask=real[:, None], other=0.0)
            s = tl.dot(q_rope, tl.trans(k_rope.to(q_rope.dtype)), input_precision="ieee")
            for d in range(0, D, CHUNK):
                q_part = tl.load(q_rows[:, None] + d + c[None, :], mask=(h < H)[:, None], other=0.0)
                k_part = tl.load(row[:, None] + d + c[None, :], mask=real[:, None], other=0.0)
                s = tl.dot(q_part, tl.trans(k_part.to(q_part.dtype)), s, input_precision="ieee")
            s = tl.where(real[None, :], s * scale_log2, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, axis=1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(s - new_top[:, None])
            mass = mass * shrink + tl.sum(p, axis=1)
            v = tl.load(row[:, None] + column[None, :], mask=real[:, None], other=0.0)
            v = v.to(q_rope.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        slot = (token * NUM_PARTS + part) * H + h
        to = partial_out + slot[:, None] * D + column[None, :]
        tl.store(to, acc / mass[:, None], mask=(h < H)[:, None])
        tl.store(partial_lse + slot, top + tl.log2(mass), mask=h < H)


@triton.jit
def fixed_merge_kernel(
    partial_out,
    partial_lse,
    token_lens,
    out,
    H: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Program (token, head): parts from the front."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num = (tl.load(token_lens + token) + PART - 1) // PART
    d = tl.arange(0, D)
    top = float("-inf")
    norm = 0.0
    acc = tl.zeros([D], tl.float32)
    for part in range(num):
        slot = (token * NUM_PARTS + part) * H + head
        lse = tl.load(partial_lse + slot)
        new_top = tl.maximum(top, lse)
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        norm = norm * shrink + weight
        acc = acc * shrink + tl.load(partial_out + slot * D + d) * weight
        top = new_top
    result = acc / tl.where(norm > 0.0, norm, 1.0)  # no KV: zero
    tl.store(out + (token * H + head) * D + d, result.to(out.dtype.element_ty))


def fixed_attention(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    token_slots: torch.Tensor,
    token_lens: torch.Tensor,
    most_tokens: int,
    softmax_scale: float,
    latent_dim: int,
    part_tokens: int = PART_TOKENS,
) -> torch.Tensor:
    """[T, H, latent_dim] in q.dtype: each token of q over the first token_lens[t] of its slot.

    Args:
        q: [T, H, latent_dim + rope_dim], contiguous.
        token_slots, token_lens: int32 [T].
        most_tokens: at least the largest of token_lens; the host's number, nothing is read back.
    """
    num_tokens, num_heads, width = q.shape
    num_parts = max(1, cdiv(most_tokens, part_tokens))
    at_once = max(1, SCRATCH_BYTES // (4 * num_parts * num_heads * latent_dim))
    shape = (min(at_once, num_tokens), num_parts, num_heads)
    partial_out = torch.empty(*shape, latent_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    out = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    columns = min(SLICE, latent_dim)
    for start in range(0, num_tokens, at_once):
        some = slice(start, min(start + at_once, num_tokens))
        num = some.stop - start
        grid = (num_parts, latent_dim // columns, num * cdiv(num_heads, 16))
        fixed_part_kernel[grid](
            q[some],
            kv_pool_layer,
            page_table,
            token_slots[some],
            token_lens[some],
            partial_out,
            partial_lse,
            page_table.stride(0),
            kv_pool_layer.stride(0),
            softmax_scale * math.log2(math.e),
            H=num_heads,
            D=latent_dim,
            R=width - latent_dim,
            PAGE=kv_pool_layer.shape[1],
            PART=part_tokens,
            NUM_PARTS=num_parts,
            TILE=TILE,
            SLICE=columns,
            CHUNK=min(64, latent_dim),
            BLOCK_H=16,
            num_warps=8 if q.dtype == torch.float32 else 4,
        )
        fixed_merge_kernel[(num, num_heads)](
            partial_out,
            partial_lse,
            token_lens[some],
            out[some],
            H=num_heads,
            D=latent_dim,
            PART=part_tokens,
            NUM_PARTS=num_parts,
            num_warps=4,
        )
    return out
