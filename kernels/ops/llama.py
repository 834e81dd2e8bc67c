# SPDX-License-Identifier: Apache-2.0
"""Public op: one step of a whole llama-type decoder, fused where a kernel for it exists.

Does not know: implementations, requests, files.
"""

from __future__ import annotations

import torch

from kernels.llama_stack import LlamaStack, PagedRows
from kernels.packed_weight import weight_format
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def llama_forward(
    stack: LlamaStack,
    input_ids: torch.Tensor,
    rows: PagedRows,
    kv_pool: torch.Tensor,
    sample_rows: torch.Tensor,
) -> torch.Tensor:
    """Run all layers, write KV, return the logits of each sampled row's last token.

    The pool's dtype sets the arithmetic: fp32 runs everything in fp32; bf16 allows bf16 activations
    and, with 4- and 8-bit weights, 8-bit dot products.

    Args:
        stack: the weights.
        input_ids: int32 [T], each in [0, vocab).
        rows: the ragged step; rows may mix prefill and decode.
        kv_pool: [num_pages, num_layers, 2, page_size, Hkv, D] fp32 or bf16, contiguous.
        sample_rows: int32 [S], rows whose last token's logits are wanted.

    Returns:
        fp32 [S, vocab], a new tensor (the caller's to keep).

    Raises:
        KernelInputError: if shapes disagree, an index tensor is not int32, or an id is outside the
            vocabulary.
    """
    _check(stack, input_ids, rows, kv_pool, sample_rows)
    formats = (
        ("kv", format_of(kv_pool.dtype)),
        ("weight", _common_format(stack)),
        ("lm_head", weight_format(stack.lm_head)),
        ("embedding", weight_format(stack.embedding)),
        ("heads", _common_head_form(stack)),
    )
    traits = (
        ("head_dim", stack.shape.head_dim),
        ("group", stack.shape.num_heads // stack.shape.num_kv_heads),
        ("hidden", stack.shape.hidden),
        ("ffn", stack.shape.ffn),
    )
    kernel = select_kernel(CallSignature("llama_forward", kv_pool.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(stack, input_ids, rows, kv_pool, sample_rows)
    return out


def _common_format(stack: LlamaStack) -> str:
    """Return the formats of all linears of all layers, joined by "+" where there are several."""
    if "common_format" not in stack.derived:
        formats = {
            weight_format(weight)
            for layer in stack.layers
            for weight in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)
        }
        stack.derived["common_format"] = "+".join(sorted(formats))
    found: str = stack.derived["common_format"]
    return found


def _common_head_form(stack: LlamaStack) -> str:
    """Return what heads have beyond rope: "plain", "bias", "norm" or "bias+norm"."""
    if "head_form" not in stack.derived:
        forms = {part for layer in stack.layers for part in layer.head_form.split("+")}
        stack.derived["head_form"] = "+".join(sorted(forms - {"plain"})) or "plain"
    found: str = stack.derived["head_form"]
    return found


def _check(
    stack: LlamaStack,
    input_ids: torch.Tensor,
    rows: PagedRows,
    kv_pool: torch.Tensor,
    sample_rows: torch.Tensor,
) -> None:
    shape = stack.shape
    num_tokens, num_rows = input_ids.shape[0], rows.row_slots.shape[0]
    pool_shape = (None, shape.num_layers, 2, rows.page_size, shape.num_kv_heads, shape.head_dim)
    expect_shape("kv_pool", kv_pool, pool_shape)
    expect_shape("input_ids", input_ids, (num_tokens,))
    expect_shape("rows.positions", rows.positions, (num_tokens,))
    expect_shape("rows.slot_mapping", rows.slot_mapping, (num_tokens,))
    expect_shape("rows.row_indptr", rows.row_indptr, (num_rows + 1,))
    expect_shape("rows.seq_lens", rows.seq_lens, (num_rows,))
    expect_shape("rows.page_table", rows.page_table, (None, None))
    for name, index in (
        ("input_ids", input_ids),
        ("rows.positions", rows.positions),
        ("rows.slot_mapping", rows.slot_mapping),
        ("rows.row_indptr", rows.row_indptr),
        ("rows.row_slots", rows.row_slots),
        ("rows.seq_lens", rows.seq_lens),
        ("rows.page_table", rows.page_table),
        ("sample_rows", sample_rows),
    ):
        expect_dtype(name, index, torch.int32)
