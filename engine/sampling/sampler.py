# SPDX-License-Identifier: Apache-2.0
"""Logits of a step -> one token per row.

Order: penalties, logit bias, bans, grammar bitmask; then greedy rows take the maximum, the others
go through temperature, top-k, top-p (of what top-k left), min-p, and one draw. A cut keeps ties,
and a draw walks the vocabulary in id order, so what a row draws depends on its logits, parameters,
seed and position only, never on the rows beside it. On a CPU a row of logits fits in a core's
cache: rows are edited and drawn one after the other in numpy, which wakes no thread pool. Does not
know: requests, the scheduler.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.logprobs import LogprobRows
from engine.sampling.params import RowSampling, SampleBatch, Sampled, uniform
from kernels.ops import apply_bitmask, argmax

FloatRow = NDArray[np.float32]

# Weights are relative to the likeliest token's. A nucleus or a top-k rarely reaches below this;
# where it does, the whole vocabulary is sorted.
CANDIDATE_WEIGHT = 1e-4
DRAW_BLOCK = 256


def sample(logits: torch.Tensor, batch: SampleBatch) -> Sampled:
    """Choose a token per row. Requires: `batch.mask_ready` is set.

    Args:
        logits: [S, vocab] fp32, contiguous, on the CPU; changed in place.
    """
    rows = batch.rows
    logprobs = LogprobRows(logits, [row.num_logprobs for row in rows])
    values = logits.numpy()
    is_sound = np.isfinite(values.max(axis=1))  # NaN spreads; -inf is a token the model forbids
    for row, row_values, position in zip(rows, values, batch.positions, strict=True):
        _edit(row_values, row, int(position))
    if batch.bitmask is not None:
        apply_bitmask(logits, torch.from_numpy(batch.bitmask))
    token_ids = argmax(logits).numpy().astype(np.int32)
    peaks = values[np.arange(len(rows)), token_ids]
    token_ids[~is_sound | ~np.isfinite(peaks)] = -1
    for r, row in enumerate(rows):
        if not row.is_greedy and token_ids[r] >= 0:
            chance = uniform(row.seed, int(batch.positions[r]))
            token_ids[r] = draw(values[r], float(peaks[r]), row, chance)
    chosen = token_ids.tolist()
    for row, token_id in zip(rows, chosen, strict=True):
        if row.penalties is not None and token_id >= 0:
            row.penalties.add(token_id)
    return Sampled(token_ids=token_ids, logprobs=logprobs.gather(chosen))


def _edit(values: FloatRow, row: RowSampling, position: int) -> None:
    if row.penalties is not None:
        row.penalties.apply(values)
    if row.bias_ids.size:
        values[row.bias_ids] += row.bias
    if row.banned_ids.size:
        values[row.banned_ids] = -np.inf
    if position < row.min_new_tokens and row.stop_ids.size:
        values[row.stop_ids] = -np.inf


def draw(values: FloatRow, peak: float, row: RowSampling, chance: float) -> int:
    """The token that `chance` in [0, 1) falls on; `peak` is the largest of `values` [vocab]."""
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((values - np.float32(peak)) / np.float32(row.temperature))
    least = np.float32(row.min_p)
    if row.top_p < 1.0 or 0 < row.top_k < len(weights):
        least = max(least, _least_kept(weights, row))
    if least > 0:
        weights[weights < least] = 0
    return _pick(weights, chance)


def _least_kept(weights: FloatRow, row: RowSampling) -> np.float32:
    """The smallest weight that top-k and top-p keep."""
    for floor in (CANDIDATE_WEIGHT, 0.0):
        descending = np.sort(weights[weights > floor])[::-1]
        kth = np.float32(0)
        if row.top_k:
            if row.top_k <= len(descending):
                kth = descending[row.top_k - 1]
            elif floor > 0:
                continue
        if row.top_p >= 1.0:
            return kth
        if kth > 0:
            total = descending[descending >= kth].sum(dtype=np.float64)
        else:
            total = weights.sum(dtype=np.float64)
        mass = descending.cumsum(dtype=np.float64)
        place = int(np.searchsorted(mass, row.top_p * total))
        if place < len(descending):
            return max(kth, descending[place])
    return kth  # rounding left the nucleus a hair short of the whole


def _pick(weights: FloatRow, chance: float) -> int:
    """The first id whose cumulative weight exceeds `chance` of the total."""
    num_blocks = -(-len(weights) // DRAW_BLOCK)
    if len(weights) % DRAW_BLOCK:
        weights = np.pad(weights, (0, num_blocks * DRAW_BLOCK - len(weights)))
    blocks = weights.reshape(num_blocks, DRAW_BLOCK)
    block_mass = blocks.sum(axis=1).cumsum(dtype=np.float64)
    target = chance * block_mass[-1]
    block = min(int(np.searchsorted(block_mass, target, side="right")), num_blocks - 1)
    before = block_mass[block - 1] if block else 0.0
    mass = blocks[block].cumsum(dtype=np.float64)
    inside = min(int(np.searchsorted(mass, target - before, side="right")), DRAW_BLOCK - 1)
    token_id = block * DRAW_BLOCK + inside
    if weights[token_id] > 0:
        return token_id
    # Rounding carried the target past the last weight it may fall on.
    return int(np.flatnonzero(weights[: (block + 1) * DRAW_BLOCK])[-1])
