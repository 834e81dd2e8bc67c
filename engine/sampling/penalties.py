# SPDX-License-Identifier: Apache-2.0
"""Repetition, presence and frequency penalties of one request, on its row of logits.

Does not know: batches, seeds. Semantics: repetition divides a positive logit and multiplies a
negative one, for every id in prompt or output; frequency subtracts per occurrence in the output;
presence subtracts once if the output holds the id.

Source: Keskar et al., arXiv 1909.05858 (repetition); the OpenAI API reference (the other two).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class Penalties:
    """The state of one request: which ids it has seen, how often it has sampled each."""

    def __init__(
        self,
        vocab_size: int,
        *,
        repetition: float,
        presence: float,
        frequency: float,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
    ) -> None:
        self._repetition = repetition
        self._presence = presence
        self._frequency = frequency
        counts = np.bincount(output_ids, minlength=vocab_size).astype(np.float32)
        seen = counts > 0
        seen[prompt_ids] = True
        self._counts = torch.from_numpy(counts)
        self._seen = torch.from_numpy(seen)

    def apply(self, row: torch.Tensor) -> None:
        """Penalise a row of logits [vocab], fp32, in place."""
        if self._repetition != 1.0:
            penalised = torch.where(row > 0, row / self._repetition, row * self._repetition)
            row.copy_(torch.where(self._seen, penalised, row))
        if self._frequency != 0.0:
            row.sub_(self._counts, alpha=self._frequency)
        if self._presence != 0.0:
            row.sub_((self._counts > 0).to(row.dtype), alpha=self._presence)

    def add(self, token_id: int) -> None:
        """Count a sampled token."""
        self._counts[token_id] += 1
        self._seen[token_id] = True
