# SPDX-License-Identifier: Apache-2.0
"""Public op: logits as a request wants them, before one is chosen. Does not know: requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
    """What is edited: per sample [S] numbers, and per slot tables.

    `rows` fp64, `slots` fp64: a sample's row of logits and its row of the tables. `repetition`,
    `presence`, `frequency` fp32; 1, 0, 0 leave a row alone. `masks` int32 [slots, ceil(V / 32)]:
    bit i of word w allows token 32 w + i. `counts` int32 [slots, V]: bit 0 says that the request
    has the token at all, the rest how often in its output. `bias` fp32 [slots, V].
    """

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    masks: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor


def edit_rows(logits: torch.Tensor, edits: RowEdits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (fp32 [S, V], bool [S]): the edited rows, and whether the logits were sound before.

    Penalties first (repetition divides a positive logit and multiplies a negative one, for every
    token the request has; frequency and presence are subtracted for what it has output), then the
    bias, then the mask. Sound: no NaN, no +inf, and something finite.

    Args:
        logits: fp32 [R, V]; unchanged.

    Raises:
        KernelInputError: if shapes or dtypes disagree.
    """
    expect_shape("logits", logits, (None, None))
    num, vocab = edits.rows.shape[0], logits.shape[1]
    for name in ("slots", "repetition", "presence", "frequency"):
        expect_shape(name, getattr(edits, name), (num,))
    for name in ("rows", "slots"):
        expect_dtype(name, getattr(edits, name), torch.float64)
    for name in ("repetition", "presence", "frequency"):
        expect_dtype(name, getattr(edits, name), torch.float32)
    num_slots = edits.masks.shape[0]
    expect_shape("masks", edits.masks, (None, -(-vocab // 32)))
    expect_shape("counts", edits.counts, (num_slots, vocab))
    expect_shape("bias", edits.bias, (num_slots, vocab))
    for name in ("masks", "counts"):
        expect_dtype(name, getattr(edits, name), torch.int32)
    formats = (("logits", format_of(logits.dtype)),)
    kernel = select_kernel(CallSignature("edit_rows", logits.device.type, formats))
    out: tuple[torch.Tensor, torch.Tensor] = kernel.fn(logits, edits)
    return out
