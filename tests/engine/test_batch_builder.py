# SPDX-License-Identifier: Apache-2.0
"""Plans become tensors: every array by hand, and none of them a view of the plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.loop.batch_builder import BatchBuilder


def make_plan() -> Any:
    def int32(values: Any) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return SimpleNamespace(
        step_id=7,
        row_request_ids=np.array([11, 12, 13]),
        row_slots=int32([2, 0, 1]),
        row_starts=int32([4, 0, 9]),
        row_lens=int32([3, 2, 1]),
        row_samples=np.array([0, 1, 1], dtype=np.uint8),
        input_ids=int32([50, 51, 52, 60, 61, -1]),
        slot_mapping=int32([8, 9, 10, 20, 21, 33]),
        page_deltas=int32([[2, 1, 5], [0, 0, 6]]),
        page_copies=int32([[3, 5, 2]]),
        admissions=[],
        retracted=[],
    )


def test_a_plan_becomes_the_tensors_it_describes() -> None:
    builder = BatchBuilder(max_slots=3, max_context_len=17, page_size=4)
    batch, deltas = builder.build(make_plan())
    assert batch.step_id == 7
    assert batch.input_ids.tolist() == [50, 51, 52, 60, 61, -1]
    assert batch.positions.tolist() == [4, 5, 6, 0, 1, 9]
    assert batch.slot_mapping.tolist() == [8, 9, 10, 20, 21, 33]
    assert batch.row_indptr.tolist() == [0, 3, 5, 6]
    assert batch.row_slots.tolist() == [2, 0, 1]
    assert batch.seq_lens.tolist() == [7, 2, 10]
    assert batch.sample_rows.tolist() == [1, 2]
    assert batch.page_copies.tolist() == [[3, 5, 2]]
    assert batch.page_table.shape == (3, 6), "5 pages hold 17 tokens, and one is slack"
    assert deltas.tolist() == [[2, 1, 5], [0, 0, 6]]


def test_nothing_of_a_step_changes_when_the_plan_is_reused() -> None:
    builder = BatchBuilder(max_slots=3, max_context_len=16, page_size=4)
    plan = make_plan()
    batch, deltas = builder.build(plan)
    for value in vars(plan).values():
        if isinstance(value, np.ndarray):
            value[:] = 99
    assert batch.input_ids.tolist() == [50, 51, 52, 60, 61, -1]
    assert batch.row_slots.tolist() == [2, 0, 1]
    assert batch.page_copies.tolist() == [[3, 5, 2]]
    assert deltas.tolist() == [[2, 1, 5], [0, 0, 6]]


def test_all_steps_share_one_page_table() -> None:
    builder = BatchBuilder(max_slots=3, max_context_len=16, page_size=4)
    first, _ = builder.build(make_plan())
    second, _ = builder.build(make_plan())
    assert first.page_table is second.page_table


def test_page_deltas_of_plans_without_rows_are_due_before_the_next_step() -> None:
    builder = BatchBuilder(max_slots=3, max_context_len=16, page_size=4)
    plan = make_plan()
    plan.page_deltas = np.array([[1, 0, 3], [2, 1, 4]], dtype=np.int32)
    builder.keep_deltas(plan)
    plan.page_deltas = np.array([[1, 0, 7], [1, 2, 8]], dtype=np.int32)
    builder.keep_deltas(plan)
    plan.page_deltas[:] = 99
    _, deltas = builder.build(make_plan())
    # A pair that comes twice: the last counts, and it is there once.
    assert sorted(deltas.tolist()) == [[0, 0, 6], [1, 0, 7], [1, 2, 8], [2, 1, 5]]
    _, deltas = builder.build(make_plan())
    assert deltas.tolist() == [[2, 1, 5], [0, 0, 6]]
