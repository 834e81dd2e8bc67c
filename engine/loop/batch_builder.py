# SPDX-License-Identifier: Apache-2.0
"""Plan arrays -> the tensors of a step. Owns the page table's memory.

The plan's views die with the next plan while a step still runs, so everything is copied. The page
table is one tensor for the life of the process; only the executor's thread writes it, from the
deltas of each step, just before that step. Does not know: requests, tokens' meaning.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from _scheduler import Plan
from engine.execution.batch import ForwardBatch


class BatchBuilder:
    """Builds steps for a runner on the CPU."""

    def __init__(self, *, max_slots: int, max_context_len: int, page_size: int) -> None:
        num_pages = -(-max_context_len // page_size) + 1
        self._page_table = torch.zeros((max_slots, num_pages), dtype=torch.int32)

    def build(self, plan: Plan) -> tuple[ForwardBatch, NDArray[np.int32]]:
        """The tensors of `plan`, and its page table deltas [D, 3] (slot, index, page)."""
        starts, lens = plan.row_starts, plan.row_lens
        num_rows, num_tokens = len(lens), len(plan.input_ids)
        indptr = np.zeros(num_rows + 1, dtype=np.int32)
        lens.cumsum(out=indptr[1:])
        positions = np.repeat(starts - indptr[:-1], lens)
        positions += np.arange(num_tokens, dtype=np.int32)
        arrays = (
            plan.input_ids,
            positions,
            plan.slot_mapping,
            indptr,
            plan.row_slots,
            starts + lens,
            plan.row_samples.nonzero()[0].astype(np.int32),
            plan.page_copies.reshape(-1),
        )
        # One copy and one hand-over to torch: each costs more than the numbers in it.
        packed = torch.from_numpy(np.concatenate(arrays))
        parts = packed.split_with_sizes([len(array) for array in arrays])
        batch = ForwardBatch(
            step_id=plan.step_id,
            input_ids=parts[0],
            positions=parts[1],
            slot_mapping=parts[2],
            row_indptr=parts[3],
            row_slots=parts[4],
            seq_lens=parts[5],
            sample_rows=parts[6],
            page_table=self._page_table,
            page_copies=parts[7].view(-1, 3),
        )
        return batch, np.array(plan.page_deltas, dtype=np.int32)
