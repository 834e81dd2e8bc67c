# SPDX-License-Identifier: Apache-2.0
"""The tensors of one step, as the loop hands them to the model runner.

Does not know: requests, sessions, where a page lives. Legend: T tokens of the step, R rows,
S rows that sample, M slots, P pages per slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kvtiers.layered_load import LayeredLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step. All tensors int32, on the runner's device, prefill rows before decode rows."""

    step_id: int
    input_ids: torch.Tensor  # [T]; -1: take the runner's next_input_ids[slot of the row]
    positions: torch.Tensor  # [T] position of each token in its sequence
    slot_mapping: torch.Tensor  # [T] page * page_size + offset, where its KV is written
    row_indptr: torch.Tensor  # [R + 1] tokens of row r are [row_indptr[r], row_indptr[r + 1])
    row_slots: torch.Tensor  # [R]
    seq_lens: torch.Tensor  # [R] tokens of KV after this step
    sample_rows: torch.Tensor  # [S] rows whose last token's logits are wanted
    page_table: torch.Tensor  # [M, P] persistent; view, valid until the next step
    page_copies: torch.Tensor  # [C, 3] (source page, target page, tokens), done before the forward
    # [T] the token behind each; -1: what its row samples in this step. None: nobody drafts.
    next_ids: torch.Tensor | None = None
    # Pages that rows read are still on their way: a layer of them is read behind its `wait`.
    loads: tuple[LayeredLoad, ...] = ()


class ModelRunner(Protocol):
    """Runs the model over paged KV. `forward` may be called from one worker thread only."""

    vocab_size: int
    max_context_len: int
    page_size: int
    num_pages: int
    model_fingerprint: str
    next_input_ids: torch.Tensor  # int32 [max_slots]: written by the sampler, read by forward

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write KV, return logits fp32 [S, vocab_size]; owned by the runner until the next call."""
        ...


@runtime_checkable
class DraftingRunner(Protocol):
    """A runner whose model may guess one token further."""

    @property
    def can_draft(self) -> bool: ...

    def draft(self, batch: ForwardBatch, next_ids: torch.Tensor) -> torch.Tensor:
        """int32 [S]: what follows each sampled token, by the model's guess."""
        ...
