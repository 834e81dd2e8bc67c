# SPDX-License-Identifier: Apache-2.0
"""Plan arrays -> the tensors of a step. Owns the page table's memory.

The plan's views die with the next plan while a step still runs, so everything is copied. The page
table is one tensor for the life of the process; only the executor's thread writes it, from the
deltas of each step, just before that step. A row with drafts becomes one row a token, which is how
logits are had behind each of them: the KV of a step is written before it is read. Does not know:
requests, where drafts come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from _scheduler import Plan
from engine.execution.batch import ForwardBatch
from kvtiers.layered_load import LayeredLoad

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelRows:
    """The rows of a step as the model gets them. Views of a plan, or arrays of their own."""

    starts: Ints  # [R]
    lens: Ints  # [R]
    slots: Ints  # [R]
    samples: NDArray[np.uint8]  # [R]
    input_ids: Ints  # [T]
    slot_mapping: Ints  # [T]


def model_rows(plan: Plan, drafts: Sequence[Ints] | None) -> ModelRows:
    """`drafts`, one array a row of the plan, fill what rows were planned with; None: none was."""
    if drafts is None:
        return ModelRows(
            starts=plan.row_starts,
            lens=plan.row_lens,
            slots=plan.row_slots,
            samples=plan.row_samples,
            input_ids=plan.input_ids,
            slot_mapping=plan.slot_mapping,
        )
    ends = plan.row_lens.cumsum()
    rows: list[tuple[int, int, int, int]] = []  # (start, len, slot, samples)
    input_ids: list[Ints] = []
    slot_mapping: list[Ints] = []
    for row, own in enumerate(drafts):
        start, length = int(plan.row_starts[row]), int(plan.row_lens[row])
        slot, samples, first = int(plan.row_slots[row]), int(plan.row_samples[row]), ends[row]
        ids = plan.input_ids[first - length : first]
        if length > 1 and ids[-1] < 0:  # planned with drafts; as many as were granted remain
            length = 1 + len(own)
            ids = np.concatenate([ids[:1], own])
            rows += [(start + place, 1, slot, 1) for place in range(length)]
        else:
            rows.append((start, length, slot, samples))
        input_ids.append(ids)
        begin = first - int(plan.row_lens[row])
        slot_mapping.append(plan.slot_mapping[begin : begin + length])
    columns = np.array(rows, dtype=np.int32).T
    return ModelRows(
        starts=columns[0],
        lens=columns[1],
        slots=columns[2],
        samples=columns[3].astype(np.uint8),
        input_ids=np.concatenate(input_ids),
        slot_mapping=np.concatenate(slot_mapping),
    )


class BatchBuilder:
    """Builds steps for a runner on the CPU."""

    def __init__(self, *, max_slots: int, max_context_len: int, page_size: int) -> None:
        num_pages = -(-max_context_len // page_size) + 1
        self._page_table = torch.zeros((max_slots, num_pages), dtype=torch.int32)
        self._kept: list[Ints] = []  # deltas of plans without rows

    def keep_deltas(self, plan: Plan) -> None:
        """Keep the deltas of a plan that has no rows: they are due before the next step's."""
        if len(plan.page_deltas):
            self._kept.append(np.array(plan.page_deltas, dtype=np.int32))

    def build(
        self,
        plan: Plan,
        rows: ModelRows | None = None,
        behind: Sequence[int] | None = None,
        loads: Sequence[LayeredLoad] = (),
    ) -> tuple[ForwardBatch, NDArray[np.int32]]:
        """The tensors of `plan`, and page table deltas [D, 3] (slot, index, page), no pair twice:
        its own, and those kept of plans before it.

        Args:
            rows: what `model_rows` made of the plan with drafts.
            behind: for a model that drafts, the known token behind each of these rows, or -1.
            loads: what rows read as it comes.
        """
        rows = rows if rows is not None else model_rows(plan, None)
        starts, lens = rows.starts, rows.lens
        num_rows, num_tokens = len(lens), len(rows.input_ids)
        indptr = np.zeros(num_rows + 1, dtype=np.int32)
        lens.cumsum(out=indptr[1:])
        positions = np.repeat(starts - indptr[:-1], lens)
        positions += np.arange(num_tokens, dtype=np.int32)
        arrays = (
            rows.input_ids,
            positions,
            rows.slot_mapping,
            indptr,
            rows.slots,
            starts + lens,
            rows.samples.nonzero()[0].astype(np.int32),
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
            next_ids=None if behind is None else _next_ids(rows.input_ids, indptr, behind),
            loads=tuple(loads),
        )
        return batch, self._take_deltas(plan)

    def _take_deltas(self, plan: Plan) -> Ints:
        own = np.array(plan.page_deltas, dtype=np.int32)
        if not self._kept:
            return own
        # A device writes them in any order, so of a pair that is there twice the last counts.
        deltas = np.concatenate([*self._kept, own])[::-1]
        self._kept.clear()
        _, first = np.unique(deltas[:, :2], axis=0, return_index=True)
        return np.ascontiguousarray(deltas[first])


def _next_ids(input_ids: Ints, indptr: Ints, behind: Sequence[int]) -> torch.Tensor:
    """The token behind each: the next one of its row; behind a row's last, what is known."""
    following = np.full(len(input_ids), -1, dtype=np.int32)
    following[:-1] = input_ids[1:]
    following[indptr[1:] - 1] = behind
    return torch.from_numpy(following)
