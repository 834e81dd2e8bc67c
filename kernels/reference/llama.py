# SPDX-License-Identifier: Apache-2.0
"""The whole llama stack as a composition of the other public ops: the ground truth for fused ones.

Does not know: how each op runs (ops/ choose), files, requests. Legend: T tokens, S sampled rows,
H hidden, N query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.llama_stack import LlamaLayer, LlamaStack, PagedRows
from kernels.ops.activation import silu_and_mul
from kernels.ops.attention import paged_attention
from kernels.ops.linear import linear
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.rope import rope_kv_write
from kernels.packed_weight import embed
from kernels.registry import Priority, register_kernel


def _attend(
    stack: LlamaStack,
    layer: LlamaLayer,
    normed_TH: torch.Tensor,
    rows: PagedRows,
    kv_pool_layer: torch.Tensor,
) -> torch.Tensor:
    shape = stack.shape
    num_tokens = normed_TH.shape[0]
    kv_width = shape.num_kv_heads * shape.head_dim
    qkv = linear(normed_TH, layer.qkv)
    if layer.qkv_bias is not None:
        qkv = (qkv.float() + layer.qkv_bias).to(qkv.dtype)
    q, k, v = torch.split(qkv, [shape.num_heads * shape.head_dim, kv_width, kv_width], dim=-1)
    q_TND = _normed_heads(q, layer.q_norm, shape.head_dim, shape.rms_eps)
    k_TGD = _normed_heads(k, layer.k_norm, shape.head_dim, shape.rms_eps)
    v_TGD = v.reshape(num_tokens, shape.num_kv_heads, shape.head_dim)
    rope_kv_write(
        q_TND, k_TGD, v_TGD, rows.positions, stack.cos_sin, kv_pool_layer, rows.slot_mapping
    )
    out_TND = paged_attention(
        q_TND,
        kv_pool_layer,
        rows.page_table,
        rows.row_slots,
        rows.row_indptr,
        rows.seq_lens,
        rows.page_size,
        shape.head_dim**-0.5,
    )
    return linear(out_TND.flatten(1), layer.attn_out)


def _normed_heads(
    x: torch.Tensor, norm: torch.Tensor | None, head_dim: int, eps: float
) -> torch.Tensor:
    """[T, heads, D] of x [T, heads * D], each head through its norm where there is one."""
    if norm is not None:
        x = rms_norm(x.reshape(-1, head_dim), norm, eps).reshape(x.shape)
    return x.reshape(x.shape[0], -1, head_dim)


def _check_ids(input_ids: torch.Tensor, vocab: int) -> None:
    outside = (input_ids < 0) | (input_ids >= vocab)
    if bool(outside.any()):
        index = int(outside.int().argmax())
        raise KernelInputError(f"input_ids[{index}]", int(input_ids[index]), f"0 to {vocab - 1}")


@register_kernel("llama_forward", "reference", priority=Priority.REFERENCE)
def llama_forward(
    stack: LlamaStack,
    input_ids: torch.Tensor,
    rows: PagedRows,
    kv_pool: torch.Tensor,
    sample_rows: torch.Tensor,
) -> torch.Tensor:
    """Activations in the pool's dtype, the residual stream too; logits in fp32."""
    _check_ids(input_ids, stack.shape.vocab)
    eps = stack.shape.rms_eps
    residual = embed(stack.embedding, input_ids, kv_pool.dtype)
    delta = torch.zeros_like(residual)
    for index, layer in enumerate(stack.layers):
        normed, residual = add_rms_norm(delta, residual, layer.input_norm, eps)
        delta = _attend(stack, layer, normed, rows, kv_pool[:, index])
        normed, residual = add_rms_norm(delta, residual, layer.post_norm, eps)
        delta = linear(silu_and_mul(linear(normed, layer.gate_up)), layer.down)
    last = rows.row_indptr[sample_rows.long() + 1].long() - 1
    final = rms_norm(delta[last] + residual[last], stack.final_norm, eps)
    return linear(final, stack.lm_head).float()
