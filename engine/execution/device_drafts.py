# SPDX-License-Identifier: Apache-2.0
"""Drafting on a device: the hidden states a forward left, and the guesses, where graphs find them.

A captured forward's own memory may be another graph's by the time its step drafts, so hidden states
are copied to a buffer that stays. Does not know: graphs, sampling, requests.
"""

from __future__ import annotations

import torch

from engine.models.model import DraftingModel, StepRows


class DeviceDrafts:
    """Buffers by padded size, for one model. One step at a time."""

    def __init__(self, model: DraftingModel, sizes: list[int]) -> None:
        self._model = model
        self._sizes = sizes
        self._hidden: torch.Tensor | None = None
        self.draft_ids: dict[int, torch.Tensor] = {}  # int32 [size]

    def keep_hidden(self, size: int) -> None:
        """After the forward of a decode step. The first call allocates: before any capture."""
        hidden = self._model.last_hidden
        if self._hidden is None:
            most = max(self._sizes)
            self._hidden = torch.zeros(
                most, hidden.shape[1], dtype=hidden.dtype, device=hidden.device
            )
            for each in self._sizes:
                self.draft_ids[each] = torch.zeros(each, dtype=torch.int32, device=hidden.device)
        self._hidden[:size].copy_(hidden)

    def run_decode(
        self,
        size: int,
        next_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sampled: torch.Tensor,
    ) -> None:
        """Guess for `size` rows of one token."""
        assert self._hidden is not None, "keep_hidden came first"
        hidden = self._hidden[:size]
        self.draft_ids[size].copy_(self._model.draft(next_ids, hidden, rows, kv_pool, sampled))

    def run_mixed(
        self,
        size: int,
        next_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sampled: torch.Tensor,
    ) -> None:
        """Guess for the sampled rows of a step with prefill, right behind its forward."""
        drafts = self._model.draft(next_ids, self._model.last_hidden, rows, kv_pool, sampled)
        self.draft_ids[size][: len(drafts)] = drafts
