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
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=indptr[1:])
        positions = np.repeat(starts - indptr[:-1], lens) + np.arange(indptr[-1], dtype=np.int32)
        batch = ForwardBatch(
            step_id=plan.step_id,
            input_ids=_copy(plan.input_ids),
            positions=_copy(positions),
            slot_mapping=_copy(plan.slot_mapping),
            row_indptr=_copy(indptr),
            row_slots=_copy(plan.row_slots),
            seq_lens=_copy(starts + lens),
            sample_rows=_copy(np.flatnonzero(plan.row_samples)),
            page_table=self._page_table,
            page_copies=_copy(plan.page_copies),
        )
        return batch, np.array(plan.page_deltas, dtype=np.int32)


def _copy(array: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int32))
