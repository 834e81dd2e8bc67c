# SPDX-License-Identifier: Apache-2.0
"""Logits of a step -> one token per row, vectorised over the rows.

Order: penalties, logit bias, bans, grammar bitmask; then greedy rows take the maximum, and the
others temperature, top-k, top-p (of what top-k left), min-p, and one draw. A cut keeps ties, and
the draw walks the vocabulary in id order: what a row draws depends on its logits, its parameters,
its seed and its position only, never on the other rows. Does not know: requests, the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.logprobs import LogprobRows
from engine.sampling.params import RowSampling, SampleBatch, Sampled, uniforms
from kernels.ops import apply_bitmask, argmax

# Candidates looked at before the whole vocabulary is sorted for a top-p cut.
TOP_P_CANDIDATES = 512


def sample(logits: torch.Tensor, batch: SampleBatch) -> Sampled:
    """Choose a token per row. Requires: `batch.mask_ready` is set.

    Args:
        logits: [S, vocab] fp32, contiguous; changed in place.
    """
    rows = batch.rows
    logprobs = LogprobRows(logits, [row.num_logprobs for row in rows])
    is_finite = logits.amax(dim=-1).isfinite()  # NaN and +inf; -inf is a token the model forbids
    _edit_logits(logits, batch)
    if batch.bitmask is not None:
        apply_bitmask(logits, torch.from_numpy(batch.bitmask))
    token_ids = argmax(logits).to(torch.int64)
    best = logits.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    is_ok = is_finite & (token_ids >= 0) & best.isfinite()
    random_rows = [r for r, row in enumerate(rows) if not row.is_greedy]
    if random_rows:
        index = torch.tensor(random_rows)
        drawn = _draw(logits[index], best[index], [rows[r] for r in random_rows], batch, index)
        token_ids[index] = torch.where(drawn >= 0, drawn, token_ids[index])
    token_ids = torch.where(is_ok, token_ids, -1)
    chosen = token_ids.tolist()
    for row, token_id in zip(rows, chosen, strict=True):
        if row.penalties is not None and token_id >= 0:
            row.penalties.add(token_id)
    return Sampled(token_ids=np.asarray(chosen, dtype=np.int32), logprobs=logprobs.gather(chosen))


def _edit_logits(logits: torch.Tensor, batch: SampleBatch) -> None:
    for r, row in enumerate(batch.rows):
        if row.penalties is not None:
            row.penalties.apply(logits[r])
        if row.bias_ids.size:
            logits[r, torch.from_numpy(row.bias_ids)] += torch.from_numpy(row.bias)
        if row.banned_ids.size:
            logits[r].index_fill_(0, torch.from_numpy(row.banned_ids), -torch.inf)
        if batch.positions[r] < row.min_new_tokens and row.stop_ids.size:
            logits[r].index_fill_(0, torch.from_numpy(row.stop_ids), -torch.inf)


def _draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: Sequence[RowSampling],
    batch: SampleBatch,
    index: torch.Tensor,
) -> torch.Tensor:
    """One draw per row, int64 [R]; -1 where rounding left the draw beyond the last token."""
    temperature = torch.tensor([row.temperature for row in rows]).unsqueeze(1)
    weights = ((logits - best.unsqueeze(1)) / temperature).exp_()  # the likeliest token has 1
    least = torch.tensor([row.min_p for row in rows])
    cut = [r for r, row in enumerate(rows) if row.top_p < 1.0 or 0 < row.top_k < logits.shape[1]]
    if cut:
        least[cut] = torch.maximum(least[cut], _thresholds(weights[cut], [rows[r] for r in cut]))
    weights[weights < least.unsqueeze(1)] = 0.0
    mass = weights.to(torch.float64).cumsum(dim=-1)
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    chance = torch.from_numpy(uniforms(seeds, batch.positions[index.numpy()])).unsqueeze(1)
    drawn = torch.searchsorted(mass, chance * mass[:, -1:], right=True).squeeze(1)
    return torch.where(drawn < logits.shape[1], drawn, -1)


def _thresholds(weights: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """The least weight that each row's top-k and top-p keep, [R]."""
    vocab_size = weights.shape[1]
    num = min(vocab_size, max(TOP_P_CANDIDATES, *(row.top_k for row in rows)))
    thresholds = torch.zeros(len(rows))
    # Values only, so it makes no difference which of equal tokens topk returns.
    candidates = torch.topk(weights, num, dim=-1).values
    for r, row in enumerate(rows):
        found = _row_threshold(weights[r], candidates[r], row)
        if found is None:
            found = _row_threshold(weights[r], weights[r].sort(descending=True).values, row)
        thresholds[r] = 0.0 if found is None else found
    return thresholds


def _row_threshold(
    weights: torch.Tensor, descending: torch.Tensor, row: RowSampling
) -> torch.Tensor | None:
    """The least weight kept; None if `descending` ends before top-p is reached."""
    vocab_size = weights.shape[0]
    kth = descending[row.top_k - 1] if 0 < row.top_k < vocab_size else None
    if row.top_p >= 1.0:
        return kth
    kept = weights if kth is None else torch.where(weights >= kth, weights, 0.0)
    wanted = row.top_p * kept.to(torch.float64).cumsum(0)[-1]
    mass = descending.to(torch.float64).cumsum(0)
    place = int(torch.searchsorted(mass, wanted))
    if place >= descending.shape[0]:
        return None
    return descending[place] if kth is None else torch.maximum(descending[place], kth)
