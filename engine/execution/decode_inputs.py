# SPDX-License-Identifier: Apache-2.0
"""Where captured decode steps find their rows: one buffer a padded size, rewritten each step.

Padding rows use a slot and a page of their own (the sentinels) and have no KV. Does not know:
graphs, models, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch
from engine.execution.folding import chains_of, choose_q_len, fill_folded, usable_forms
from engine.execution.host_ring import HostRing
from engine.models.model import FoldedRows, StepRows
from kernels.ops.mla_decode_form import FoldForm

# Columns of a buffer. The last three are read where rows are folded: of each token its place among
# the queries, of each folded row its slot and length (engine/execution/folding.py).
IDS, POSITIONS, MAPPING, SLOTS, LENS, PLACES, FOLDED_SLOTS, FOLDED_LENS, NUM_COLUMNS = range(9)


class DecodeInputs:
    """Rows of one token each, in buffers on the device."""

    def __init__(
        self,
        sizes: Sequence[int],
        page_table: torch.Tensor,
        *,
        page_size: int,
        sentinel_slot: int,
        sentinel_page: int,
        forms: Sequence[FoldForm],
        drafted_tokens: int,
        longest_chain: int,
    ) -> None:
        """`forms`: that rows may be folded to, in steps of up to `drafted_tokens` tokens, of which
        a sequence has up to `longest_chain`."""
        device = page_table.device
        self._page_table = page_table
        self._page_size = page_size
        self._sentinel_slot = sentinel_slot
        self._sentinel_place = sentinel_page * page_size
        self._buffers = {
            size: torch.zeros(NUM_COLUMNS, size, dtype=torch.int32, device=device) for size in sizes
        }
        self._counting = torch.arange(max(sizes) + 1, dtype=torch.int32, device=device)
        most = next((size for size in sizes if size >= drafted_tokens), 0)
        self._forms = {
            size: usable_forms(forms, size, longest_chain) if size <= most else () for size in sizes
        }

    def q_lens(self, size: int) -> tuple[int, ...]:
        """What rows of a step of this size may be folded to; 1: not at all."""
        return (1, *(form.q_len for form in self._forms[size]))

    def fill(self, batch: ForwardBatch, size: int, ring: HostRing) -> int:
        """Send a step's rows; return what they are folded to."""
        num_rows = batch.row_slots.shape[0]
        columns = ring.ints((NUM_COLUMNS, size))
        # The tail: no KV to read, and one place of the sentinel page to write to.
        columns[:, num_rows:] = 0
        columns[MAPPING, num_rows:] = self._sentinel_place
        columns[SLOTS, num_rows:] = self._sentinel_slot
        parts = (
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.row_slots,
            batch.seq_lens,
        )
        for column, part in enumerate(parts):
            columns[column, :num_rows] = part
        q_len = self._fold(batch, columns[PLACES:].numpy(), size)
        self._buffers[size].copy_(columns, non_blocking=True)
        return q_len

    def _fold(self, batch: ForwardBatch, columns: NDArray[Any], size: int) -> int:
        forms = self._forms[size]
        if not forms:
            return 1
        chains = chains_of(batch)
        q_len = choose_q_len(chains, forms)
        if q_len > 1:
            fill_folded(chains, q_len, self._sentinel_slot, columns)
        return q_len

    def reset(self, size: int, q_len: int = 1) -> None:
        """A step of padding alone."""
        buffer = self._buffers[size]
        buffer.zero_()
        buffer[MAPPING] = self._sentinel_place
        buffer[SLOTS] = buffer[FOLDED_SLOTS] = self._sentinel_slot
        buffer[PLACES] = (self._counting[:size] + 1) * q_len - 1

    def ids(self, size: int) -> torch.Tensor:
        """int32 [size], as the step has them."""
        return self._buffers[size][IDS]

    def slots(self, size: int) -> torch.Tensor:
        """int32 [size], of each token."""
        return self._buffers[size][SLOTS]

    def rows(self, size: int, q_len: int) -> StepRows:
        """The rows of the step that was filled last; views."""
        buffer = self._buffers[size]
        folded = None
        if q_len > 1:
            folded = FoldedRows(
                q_len=q_len,
                places=buffer[PLACES],
                row_slots=buffer[FOLDED_SLOTS],
                seq_lens=buffer[FOLDED_LENS],
            )
        return StepRows(
            positions=buffer[POSITIONS],
            slot_mapping=buffer[MAPPING],
            row_indptr=self._counting[: size + 1],
            row_slots=buffer[SLOTS],
            seq_lens=buffer[LENS],
            page_table=self._page_table,
            page_size=self._page_size,
            num_prefill_rows=0,
            num_prefill_tokens=0,
            samples_all=True,
            folded=folded,
        )
