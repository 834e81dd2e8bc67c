# SPDX-License-Identifier: Apache-2.0
"""Public ops at the ends of a decode step: ids in, rows of the embedding, ids out.

Does not know: implementations, requests.
"""

from __future__ import annotations

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


def feed_ids(
    ids: torch.Tensor, slots: torch.Tensor, next_ids: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return int32 [T]: ids, each -1 replaced by next_ids of its slot, clamped to the vocabulary.

    Args:
        ids: int32 [T].
        slots: int32 [T].
        next_ids: int32 [num_slots].

    Raises:
        KernelInputError: if shapes disagree or a tensor is not int32.
    """
    expect_shape("slots", slots, tuple(ids.shape))
    for name, values in (("ids", ids), ("slots", slots), ("next_ids", next_ids)):
        expect_dtype(name, values, torch.int32)
    kernel = select_kernel(CallSignature("feed_ids", ids.device.type, ()))
    out: torch.Tensor = kernel.fn(ids, slots, next_ids, vocab_size)
    return out


def embed_rows(table: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return table[ids] in dtype, [T, hidden].

    Args:
        table: [vocab, hidden].
        ids: int32 [T], inside the vocabulary.

    Raises:
        KernelInputError: if shapes disagree or ids is not int32.
    """
    expect_shape("table", table, (None, None))
    expect_shape("ids", ids, (None,))
    expect_dtype("ids", ids, torch.int32)
    formats = (("table", format_of(table.dtype)),)
    kernel = select_kernel(CallSignature("embed_rows", table.device.type, formats))
    out: torch.Tensor = kernel.fn(table, ids, dtype)
    return out


def greedy_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    masks: torch.Tensor,
    next_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Write token_ids int32 [S], the highest allowed logit of each row (the lowest index of
    equals), and next_ids of its slot.

    A row gives -1 (and 0 to next_ids) where its logits hold a NaN or +inf, or its allowed ones
    no finite number. Padding samples may share a slot.

    Args:
        logits: fp32 [R, V]; unchanged.
        rows: fp64 [S], the row of logits of each sample.
        slots: fp64 [S], its row of masks and its place in next_ids.
        masks: int32 [num_slots, ceil(V / 32)], bit i of word w allows token 32 w + i.
        next_ids: int32 [num_slots].
        token_ids: int32 [S].

    Raises:
        KernelInputError: if shapes or dtypes disagree.
    """
    expect_shape("logits", logits, (None, None))
    expect_shape("masks", masks, (next_ids.shape[0], -(-logits.shape[1] // 32)))
    expect_shape("slots", slots, tuple(rows.shape))
    expect_shape("token_ids", token_ids, tuple(rows.shape))
    for name, values in (("masks", masks), ("next_ids", next_ids), ("token_ids", token_ids)):
        expect_dtype(name, values, torch.int32)
    for name, values in (("rows", rows), ("slots", slots)):
        expect_dtype(name, values, torch.float64)
    formats = (("logits", format_of(logits.dtype)),)
    kernel = select_kernel(CallSignature("greedy_rows", logits.device.type, formats))
    kernel.fn(logits, rows, slots, masks, next_ids, token_ids)
