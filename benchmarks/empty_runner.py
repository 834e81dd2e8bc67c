# SPDX-License-Identifier: Apache-2.0
"""A ModelRunner that computes nothing: prepared logits, whatever the step.

Does not know: KV, prompts.
"""

from __future__ import annotations

import torch

from engine.execution.batch import ForwardBatch


class EmptyRunner:
    """Satisfies engine.execution.batch.ModelRunner."""

    def __init__(self, *, vocab_size: int, max_slots: int) -> None:
        self.vocab_size = vocab_size
        self.max_context_len = 8192
        self.page_size = 64
        self.num_pages = 2048
        self.model_fingerprint = "empty"
        self.next_input_ids = torch.zeros(max_slots, dtype=torch.int32)
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn((max_slots, vocab_size), generator=generator) * 3

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits fp32 [S, vocab_size]; a new tensor each step, as a model's are."""
        return self._logits[: len(batch.sample_rows)].clone()
