# SPDX-License-Identifier: Apache-2.0
"""Sampling where the logits are: one parameter buffer, and by slot a mask, counts and a bias.

Nothing is read back before the tokens are. What a slot holds is sent when its request is another
one, or its grammar has moved on; what is counted is counted on the device. A sample behind a draft
has a slot of its own behind the sentinel's, for its mask and for the token nobody feeds back. Does
not know: graphs, streams, requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.params import RowSampling, SampleBatch, uniform
from kernels.ops.bitmask import apply_bitmask
from kernels.ops.draw import draw_tokens
from kernels.ops.edit import RowEdits, edit_rows
from kernels.ops.step_ids import greedy_rows

# Rows of the parameter buffer, fp64 so that one upload carries ids and chances exactly.
ROW, SLOT, TEMPERATURE, TOP_K, TOP_P, MIN_P, CHANCE, REPETITION, PRESENCE, FREQUENCY = range(10)
NUM_PARAMS = 10
_GREEDY = (0.0, 0.0, 1.0, 0.0, 0.0)  # TEMPERATURE to CHANCE
# A nucleus is never empty, and as fp32 a smaller one would be 0, which cuts nothing.
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)
_UNKNOWN = RowSampling()  # of no request


def has_edits(row: RowSampling) -> bool:
    """Whether a row's logits are changed by more than a mask."""
    return row.penalties is not None or row.bias_ids.size > 0


def is_greedy(rows: list[RowSampling]) -> bool:
    return all(row.is_greedy for row in rows)


def sample_slots(batch: SampleBatch, sentinel: int) -> NDArray[np.int64]:
    """Where each sample's mask and token are kept: its slot, or one behind the sentinel."""
    if batch.draft_places is None or not batch.draft_places.any():
        return batch.slots
    is_behind = batch.draft_places > 0
    slots: NDArray[np.int64] = np.where(is_behind, sentinel + is_behind.cumsum(), batch.slots)
    return slots


def fill_params(
    params: NDArray[np.float64],
    batch: SampleBatch,
    slots: NDArray[np.int64],
    logit_rows: NDArray[np.int64],
    sentinel: int,
) -> None:
    """Fill [NUM_PARAMS, S]; the tail behind the batch's rows samples row 0 for the sentinel."""
    num = len(batch.rows)
    params[:] = 0.0
    params[SLOT, num:] = sentinel
    params[TOP_P] = 1.0
    params[REPETITION] = 1.0
    params[ROW, :num] = logit_rows
    params[SLOT, :num] = slots
    for place, row in enumerate(batch.rows):
        if row.is_greedy:
            params[TEMPERATURE : CHANCE + 1, place] = _GREEDY
        else:
            chance = uniform(row.seed, int(batch.positions[place]))
            top_p = max(row.top_p, _LEAST_TOP_P)
            drawn = (row.temperature, row.top_k, top_p, row.min_p, chance)
            params[TEMPERATURE : CHANCE + 1, place] = drawn
        if row.penalties is not None:
            params[REPETITION:, place] = row.penalties.factors


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
    chosen = logits[params[ROW].long()]
    is_sound = torch.isfinite(chosen.amax(dim=-1))  # NaN spreads; -inf is a forbidden token
    apply_bitmask(chosen, masks[params[SLOT].long()])
    _draw(chosen, is_sound, params, next_ids, token_ids)


def sample_edited_rows(
    logits: torch.Tensor,
    params: torch.Tensor,
    masks: torch.Tensor,
    tables: EditTables,
    next_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """The same where a row has penalties or a bias; counts what it chose."""
    edits = RowEdits(
        rows=params[ROW],
        slots=params[SLOT],
        repetition=params[REPETITION].float(),
        presence=params[PRESENCE].float(),
        frequency=params[FREQUENCY].float(),
        masks=masks,
        counts=tables.counts,
        bias=tables.bias,
    )
    chosen, is_sound = edit_rows(logits, edits)
    _draw(chosen, is_sound, params, next_ids, token_ids)
    tables.count(params[SLOT].long(), token_ids.long())


def _draw(
    chosen: torch.Tensor,
    is_sound: torch.Tensor,
    params: torch.Tensor,
    next_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    ids = draw_tokens(
        chosen,
        params[TEMPERATURE].float(),
        params[TOP_K].int(),
        params[TOP_P].float(),
        params[MIN_P].float(),
        params[CHANCE],
    )
    token_ids.copy_(torch.where(is_sound, ids, -1))
    next_ids[params[SLOT].long()] = token_ids.clamp_min(0)


class EditTables:
    """What penalties and biases of each slot are made of, on the device; see `RowEdits`."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device)
        self._held: list[RowSampling | None] = [None] * num_slots

    def stale(self, batch: SampleBatch, slots: NDArray[np.int64]) -> list[tuple[int, RowSampling]]:
        """Slots whose request is another one than the tables hold: to be held before the sample.
        Of a row without edits the factors are neutral, the bias has to be."""
        return [
            (slot, row)
            for row, slot in zip(batch.rows, slots.tolist(), strict=True)
            if self._held[slot] is not (row if has_edits(row) else None)
        ]

    def hold(
        self,
        slot: int,
        row: RowSampling,
        ids: torch.Tensor,
        counts: torch.Tensor,
        bias_ids: torch.Tensor,
        bias: torch.Tensor,
    ) -> None:
        """Fill a slot's rows for `row`; all on the device, ids int64."""
        self._held[slot] = _UNKNOWN  # until all of it is there: memory may be short in between
        self.counts[slot] = 0
        self.counts[slot, ids] = counts
        self.bias[slot] = 0.0
        self.bias[slot, bias_ids] = bias
        self._held[slot] = row if has_edits(row) else None

    def count(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take note of sampled tokens [S], -1 for none."""
        ids = token_ids.clamp_min(0)
        before = self.counts[slots, ids]
        self.counts[slots, ids] = torch.where(token_ids >= 0, (before | 1) + 2, before)


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

    def changed(
        self, batch: SampleBatch, sample_slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Slots [n] and their new masks [n, words]. Requires: `batch.mask_ready` is set."""
        slots: list[int] = []
        masks: list[NDArray[np.int32]] = []
        for place, (row, slot) in enumerate(zip(batch.rows, sample_slots.tolist(), strict=True)):
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
