# SPDX-License-Identifier: Apache-2.0
"""A model that computes each token of a step by itself: `engine.deterministic` on a CPU.

A product over many rows rounds by how many there are, and so do the vector loops of plain torch.
One token at a time has the same shapes whatever is in the step, so its bits depend on its own
history alone: not on the batch, on how its prompt was cut, or on who computed the KV it reads. The
price is one pass over the weights for each token. Does not know: architectures, kernels, requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.models.model import DraftingModel, PagedModel, StepRows
from kvtiers.layout import KvLayout


class OneTokenSteps:
    """See the module; a `PagedModel`, and a `DraftingModel` where the given one is. The model's
    drafts, which change no token, are taken for a whole step."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self.num_layers = model.num_layers
        self.vocab_size = model.vocab_size
        self.step_bytes_per_token = model.step_bytes_per_token
        self.can_draft = isinstance(model, DraftingModel) and model.can_draft
        self.last_hidden = torch.empty(0)

    def kv_layout(self, page_size: int, dtype: str) -> KvLayout:
        return self._model.kv_layout(page_size, dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `PagedModel`; tokens in the order of the step."""
        logits: dict[int, torch.Tensor] = {}
        starts = rows.row_indptr.tolist()
        samples = {starts[row + 1] - 1: at for at, row in enumerate(sample_rows.tolist())}
        hidden = []
        for row, seq_len in enumerate(rows.seq_lens.tolist()):
            for token in range(starts[row], starts[row + 1]):
                kv_len = seq_len - (starts[row + 1] - 1 - token)
                place = samples.get(token)
                found = self._model.forward(
                    input_ids[token : token + 1],
                    _one_token(rows, row, token, kv_len, is_sampled=place is not None),
                    kv_pool,
                    sample_rows.new_zeros(0 if place is None else 1),
                )
                if place is not None:
                    logits[place] = found
                if self.can_draft:
                    assert isinstance(self._model, DraftingModel)
                    hidden.append(self._model.last_hidden)
        if hidden:
            self.last_hidden = torch.cat(hidden)
        if len(logits) == 1:
            return logits[0]
        if not logits:
            return torch.empty(0, self.vocab_size)
        # By numpy: a copy of torch's wakes its threads, which spin where those of kernels run.
        return torch.from_numpy(np.concatenate([logits[at].numpy() for at in sorted(logits)]))

    def draft(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `DraftingModel`."""
        assert isinstance(self._model, DraftingModel), "can_draft"
        return self._model.draft(next_ids, hidden, rows, kv_pool, sample_rows)


def _one_token(rows: StepRows, row: int, token: int, kv_len: int, *, is_sampled: bool) -> StepRows:
    """The step of one token as a decode row, be it of a prompt or not."""
    one = slice(token, token + 1)
    return replace(
        rows,
        positions=rows.positions[one],
        slot_mapping=rows.slot_mapping[one],
        row_indptr=torch.tensor([0, 1], dtype=torch.int32),
        row_slots=rows.row_slots[row : row + 1],
        seq_lens=torch.tensor([kv_len], dtype=torch.int32),
        num_prefill_rows=0,
        num_prefill_tokens=0,
        prefill_on_host=None,
        samples_all=is_sampled,
        folded=None,
    )
