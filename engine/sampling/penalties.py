# SPDX-License-Identifier: Apache-2.0
"""Repetition, presence and frequency penalties of one request, on its row of logits.

Semantics: repetition divides a positive logit and multiplies a negative one, for every id in
prompt or output; frequency subtracts per occurrence in the output; presence subtracts once if the
output holds the id. Does not know: batches, seeds.

Source: Keskar et al., arXiv 1909.05858 (repetition); the OpenAI API reference (the other two).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Penalties:
    """The state of one request: which ids it has seen, how often it has sampled each."""

    def __init__(
        self,
        *,
        repetition: float,
        presence: float,
        frequency: float,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
    ) -> None:
        self._repetition = np.float32(repetition)
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)
        seen = np.unique(np.concatenate([prompt_ids, output_ids]))
        self._place_of = {token_id: place for place, token_id in enumerate(seen.tolist())}
        self._num_ids = len(seen)
        self._ids = seen.astype(np.int64)
        self._counts = np.zeros(len(seen), dtype=np.float32)  # in the output
        np.add.at(self._counts, np.searchsorted(seen, output_ids), 1)

    @property
    def factors(self) -> tuple[float, float, float]:
        """(repetition, presence, frequency)."""
        return float(self._repetition), float(self._presence), float(self._frequency)

    def state(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of prompt and output, and how often each is in the output."""
        num = self._num_ids
        return self._ids[:num], self._counts[:num].astype(np.int64)

    def apply(self, row: NDArray[np.float32]) -> None:
        """Penalise a row of logits [vocab] in place."""
        ids, counts = self._ids[: self._num_ids], self._counts[: self._num_ids]
        values = row[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        row[ids] = values

    def add(self, token_id: int) -> None:
        """Count a sampled token."""
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = self._num_ids
            self._num_ids += 1
            if place == len(self._ids):
                room = np.zeros(len(self._ids) + 64, dtype=np.int64)
                self._ids = np.concatenate([self._ids, room])
                self._counts = np.concatenate([self._counts, room.astype(np.float32)])
            self._ids[place] = token_id
        self._counts[place] += 1
