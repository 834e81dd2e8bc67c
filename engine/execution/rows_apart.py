# SPDX-License-Identifier: Apache-2.0
"""Steps whose prefill is so short that the host is busy longer with launching it than the device
with computing it: their decode rows go by their captured graph, and the prefill rows by themselves.

Together the rows would share one read of the weights, but decode rows beside a prefill are launched
kernel by kernel. Does not know: devices, graphs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch

# Measured on an H200 (DeepSeek-V2-Lite shape): a prefill step with seven decode rows takes its host
# 50 ms together and 25 apart, which costs the device 4 ms more. By these sizes it is under 40 ms.
MOST_TOKENS = 1024
MOST_PAIRS = 1 << 25  # (new token, token it attends to): 1,024 new ones on 32,768


def are_better_apart(batch: ForwardBatch, num_prefill: int) -> bool:
    """Whether a step with `num_prefill` prefill rows is better computed in two parts."""
    if num_prefill == batch.row_slots.shape[0] or batch.loads:  # a graph waits for nothing inside
        return False
    lens = batch.row_indptr[: num_prefill + 1].diff().long()
    pairs = lens @ batch.seq_lens[:num_prefill].long()
    return int(lens.sum()) <= MOST_TOKENS and int(pairs) <= MOST_PAIRS


def part_rows(batch: ForwardBatch, num_prefill: int) -> tuple[ForwardBatch, ForwardBatch]:
    """The first `num_prefill` rows, and the rows of one token behind them; views."""
    cut = int(batch.row_indptr[num_prefill])
    is_prefill = batch.sample_rows < num_prefill
    prefill = replace(
        batch,
        input_ids=batch.input_ids[:cut],
        positions=batch.positions[:cut],
        slot_mapping=batch.slot_mapping[:cut],
        row_indptr=batch.row_indptr[: num_prefill + 1],
        row_slots=batch.row_slots[:num_prefill],
        seq_lens=batch.seq_lens[:num_prefill],
        sample_rows=batch.sample_rows[is_prefill],
        next_ids=None if batch.next_ids is None else batch.next_ids[:cut],
    )
    decode = replace(
        batch,
        input_ids=batch.input_ids[cut:],
        positions=batch.positions[cut:],
        slot_mapping=batch.slot_mapping[cut:],
        row_indptr=batch.row_indptr[num_prefill:] - cut,
        row_slots=batch.row_slots[num_prefill:],
        seq_lens=batch.seq_lens[num_prefill:],
        sample_rows=batch.sample_rows[~is_prefill] - num_prefill,
        next_ids=None if batch.next_ids is None else batch.next_ids[cut:],
    )
    return prefill, decode


def places_apart(
    sample_rows: torch.Tensor, num_prefill: int, first_prefill: int, decoded: torch.Tensor
) -> NDArray[np.int64]:
    """Where each sample's logits are: those of the decode rows at `decoded` (int32, of each that
    samples), those of the prefill rows that sample behind each other from `first_prefill` on."""
    is_prefill = sample_rows.numpy() < num_prefill
    places = first_prefill + is_prefill.cumsum() - 1
    places[~is_prefill] = decoded.numpy()
    return places
