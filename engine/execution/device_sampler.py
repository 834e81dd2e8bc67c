# SPDX-License-Identifier: Apache-2.0
"""Sampling where the logits are: one parameter buffer and one mask row a slot, nothing read back.

A row that wants penalties, a logit bias or logprobs is left to the host's sampler (see
`wants_host`). Does not know: graphs, streams, requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.params import RowSampling, SampleBatch, uniform
from kernels.ops.bitmask import apply_bitmask
from kernels.ops.draw import draw_tokens
from kernels.ops.step_ids import greedy_rows

# Rows of the parameter buffer, fp64 so that one upload carries ids and chances exactly.
ROW, SLOT, TEMPERATURE, TOP_K, TOP_P, MIN_P, CHANCE, NUM_PARAMS = range(8)


def wants_host(rows: list[RowSampling]) -> bool:
    """Whether a row's logits are edited by what only the host knows, or asked for."""
    return any(
        row.penalties is not None or row.bias_ids.size > 0 or row.num_logprobs >= 0 for row in rows
    )


def is_greedy(rows: list[RowSampling]) -> bool:
    return all(row.is_greedy for row in rows)


def fill_params(
    params: NDArray[np.float64], batch: SampleBatch, logit_rows: NDArray[np.int64], sentinel: int
) -> None:
    """Fill [NUM_PARAMS, S]; the tail behind the batch's rows samples row 0 for the sentinel."""
    num = len(batch.rows)
    params[:, num:] = 0.0
    params[SLOT, num:] = sentinel
    params[TOP_P, num:] = 1.0
    params[ROW, :num] = logit_rows
    params[SLOT, :num] = batch.slots
    for place, row in enumerate(batch.rows):
        if row.is_greedy:
            params[TEMPERATURE:, place] = (0.0, 0.0, 1.0, 0.0, 0.0)
            continue
        chance = uniform(row.seed, int(batch.positions[place]))
        params[TEMPERATURE:, place] = (row.temperature, row.top_k, row.top_p, row.min_p, chance)


def sample_rows(
    logits: torch.Tensor,
    params: torch.Tensor,
    masks: torch.Tensor,
    next_ids: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    draws: bool,
) -> None:
    """Write token_ids int32 [S] (-1 where a row allows none) and feed them back.

    Args:
        logits: fp32 [R, V]; unchanged.
        params: fp64 [NUM_PARAMS, S].
        masks: int32 [slots, ceil(V / 32)], allowed tokens of each slot.
        next_ids: int32 [slots]; a failed row's slot gets 0, as its next step is under way already.
        draws: False only where every row is greedy.
    """
    if not draws:
        greedy_rows(logits, params[ROW], params[SLOT], masks, next_ids, token_ids)
        return
    slots = params[SLOT].long()
    chosen = logits[params[ROW].long()]
    is_sound = torch.isfinite(chosen.amax(dim=-1))  # NaN spreads; -inf is a forbidden token
    apply_bitmask(chosen, masks[slots])
    ids = draw_tokens(
        chosen,
        params[TEMPERATURE].float(),
        params[TOP_K].int(),
        params[TOP_P].float(),
        params[MIN_P].float(),
        params[CHANCE],
    )
    token_ids.copy_(torch.where(is_sound, ids, -1))
    next_ids[slots] = token_ids.clamp_min(0)


@dataclass(slots=True, eq=False)
class _SlotMask:
    """What the device holds for a slot; `is_changing`: a grammar gives another one each step."""

    row: RowSampling
    bans_stops: bool
    is_changing: bool
    words: NDArray[np.int32]  # without the grammar


class SlotMasks:
    """Host side of the masks: which slots' rows have to be sent before the next sample."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._held: list[_SlotMask | None] = [None] * num_slots

    def changed(self, batch: SampleBatch) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Slots [n] and their new masks [n, words]. Requires: `batch.mask_ready` is set."""
        slots: list[int] = []
        masks: list[NDArray[np.int32]] = []
        for place, (row, slot) in enumerate(zip(batch.rows, batch.slots.tolist(), strict=True)):
            grammar = None if batch.bitmask is None else batch.bitmask[place]
            bans_stops = int(batch.positions[place]) < row.min_new_tokens and row.stop_ids.size > 0
            held = self._held[slot]
            is_same = held is not None and held.row is row and held.bans_stops == bans_stops
            if is_same and grammar is None and held is not None and not held.is_changing:
                continue
            words = held.words if is_same and held is not None else self._words(row, bans_stops)
            self._held[slot] = _SlotMask(row, bans_stops, grammar is not None, words)
            slots.append(slot)
            masks.append(words if grammar is None else words & grammar)
        if not slots:
            return np.empty(0, dtype=np.int64), np.empty((0, self._num_words), dtype=np.int32)
        return np.array(slots), np.stack(masks)

    def _words(self, row: RowSampling, bans_stops: bool) -> NDArray[np.int32]:
        words = np.full(self._num_words, 0xFFFFFFFF, dtype=np.uint32)
        banned = np.concatenate((row.banned_ids, row.stop_ids)) if bans_stops else row.banned_ids
        for token_id in banned.tolist():
            words[token_id >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token_id & 31)))
        return words.view(np.int32)
