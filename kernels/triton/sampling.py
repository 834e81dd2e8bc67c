# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of a decode step's ends: ids in, ids out. Does not know: the insides.

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.expert_choice import arrivals
from kernels.triton.mla import use_pdl
from kernels.triton.sample_rows import embed_rows_kernel, feed_ids_kernel, greedy_rows_kernel

PIECES = 32  # programs of a row


@register_kernel(
    "greedy_rows",
    "triton",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"logits": {"fp32"}},
)
def greedy_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    masks: torch.Tensor,
    next_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """One launch: PIECES programs a row, the last of which folds."""
    num, vocab = rows.shape[0], logits.shape[1]
    peaks = torch.empty(num, PIECES, dtype=torch.float32, device=logits.device)
    places = torch.empty(num, PIECES, dtype=torch.int32, device=logits.device)
    block = min(1024, next_power_of_2(cdiv(vocab, PIECES)))
    pdl = use_pdl(logits.device)
    greedy_rows_kernel[(num, PIECES)](
        logits,
        rows,
        slots,
        masks,
        next_ids,
        token_ids,
        peaks,
        places,
        arrivals(logits.device, num),
        vocab,
        logits.stride(0),
        masks.stride(0),
        PIECES=PIECES,
        BLOCK=block,
        STEPS=cdiv(vocab, PIECES * block),
        USE_PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


@register_kernel("feed_ids", "triton", priority=Priority.PERFORMANT, device="cuda")
def feed_ids(
    ids: torch.Tensor, slots: torch.Tensor, next_ids: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """One launch."""
    out = torch.empty_like(ids)
    num = ids.shape[0]
    if num:
        feed_ids_kernel[(cdiv(num, 256),)](
            ids, slots, next_ids, out, num, vocab_size, BLOCK=256, num_warps=4
        )
    return out


@register_kernel("embed_rows", "triton", priority=Priority.PERFORMANT, device="cuda")
def embed_rows(table: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One launch."""
    num, width = ids.shape[0], table.shape[1]
    out = torch.empty(num, width, dtype=dtype, device=table.device)
    block = min(2048, next_power_of_2(width))
    if num:
        embed_rows_kernel[(num, cdiv(width, block))](
            ids, table, out, H=width, BLOCK=block, USE_PDL=use_pdl(table.device), num_warps=4
        )
    return out
