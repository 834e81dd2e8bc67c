# SPDX-License-Identifier: Apache-2.0
"""In which order a step's decode rows are computed, where kernels read what neighbours share once.

Rows come as the scheduler has them, by who arrived first; forks of a session may lie anywhere among
others. Groups of `group` rows in turn read together what they share with the first of the group
(kernels/triton/mla_plan.py), so relatives are put there, the closest first. Any order is right; an
order is kept while the same slots run, and found anew now and then. Does not know: devices, tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch

Ints = NDArray[np.int64]

# Pages by which relatives are told: rows that agree on one agree on all before it.
PROBES = tuple(16 << power for power in range(12))
FRESH_STEPS = 64  # pages that turn out to be the same are swapped for one while requests run


def pack(rows: Ints, keys: NDArray[np.int32], group: int) -> list[int]:
    """`rows` so that those which agree on most of their keys are in one group.

    Args:
        keys: int32 [rows, probes]; -1 where a row is shorter.
    """
    full, rest = _pack(list(rows), keys, 0, group)
    return [*full, *rest]


def _pack(
    rows: list[int], keys: NDArray[np.int32], probe: int, group: int
) -> tuple[list[int], list[int]]:
    """Whole groups of relatives, and who is left, the largest families first."""
    families: dict[int, list[int]] = {}
    strangers: list[int] = []
    for row in rows:
        key = int(keys[row, probe]) if probe < keys.shape[1] else -1
        (strangers if key < 0 else families.setdefault(key, [])).append(row)
    full: list[int] = []
    left: list[list[int]] = []
    for family in families.values():
        whole, rest = _pack(family, keys, probe + 1, group) if len(family) > 1 else ([], family)
        full += whole
        left.append(rest)
    left.sort(key=len, reverse=True)
    rest = [row for some in left for row in some] + strangers
    cut = len(rest) - len(rest) % group if probe > 0 else 0
    return full + rest[:cut], rest[cut:]


class RowOrder:
    """Keeps the page tables of all slots, as the device has them."""

    def __init__(self, num_slots: int, table_width: int, page_size: int, group: int) -> None:
        self._group = group
        self._page_size = page_size
        self._table = np.full((num_slots, table_width), -1, dtype=np.int32)
        self._probes = np.array([at for at in PROBES if at < table_width], dtype=np.int64)
        self._slots = b""
        self._order: Ints | None = None
        self._num_steps = 0

    def note(self, page_deltas: NDArray[np.int32]) -> None:
        """[D, 3] (slot, index, page), as a step has them."""
        self._table[page_deltas[:, 0], page_deltas[:, 1]] = page_deltas[:, 2]

    def hold(self, page_table: torch.Tensor) -> None:
        """int32 [M, P] on the host, instead of what is known of the first M slots."""
        self._table[: page_table.shape[0], : page_table.shape[1]] = page_table.numpy()
        self._slots = b""

    def apply(self, batch: ForwardBatch) -> ForwardBatch:
        """Rows of one token each in the order that suits them. Where slots repeat, as those of
        drafts do, they stay."""
        if batch.row_slots.shape[0] <= self._group:
            return batch
        slots = batch.row_slots.numpy()
        key = slots.tobytes()
        self._num_steps += 1
        if key != self._slots or self._num_steps >= FRESH_STEPS:
            self._slots, self._num_steps = key, 0
            self._order = self._find(slots, batch.seq_lens.numpy())
        return batch if self._order is None else reordered(batch, self._order)

    def _find(self, slots: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> Ints | None:
        if len(np.unique(slots)) < len(slots):
            return None
        keys = self._table[slots][:, self._probes]
        keys[self._probes[None, :] >= (seq_lens[:, None] - 1) // self._page_size] = -1
        found = np.array(pack(np.arange(len(slots)), keys, self._group), dtype=np.int64)
        return None if bool((found[1:] > found[:-1]).all()) else found


def reordered(batch: ForwardBatch, order: Ints) -> ForwardBatch:
    """Rows of one token in this order; `sample_rows` name the same rows as before, in the order in
    which they are sampled."""
    index = torch.from_numpy(order)
    places = torch.empty_like(index)
    places[index] = torch.arange(len(order))
    return replace(
        batch,
        input_ids=batch.input_ids[index],
        positions=batch.positions[index],
        slot_mapping=batch.slot_mapping[index],
        row_slots=batch.row_slots[index],
        seq_lens=batch.seq_lens[index],
        sample_rows=places[batch.sample_rows.long()].to(torch.int32),
    )
