# SPDX-License-Identifier: Apache-2.0
"""Runs a step where the host computes it: page table, forward, sample, one after the other.

Does not know: threads, the scheduler, grammars beyond a bitmask.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import DraftingRunner, ForwardBatch, ModelRunner
from engine.execution.steps import Step, StepResult
from engine.sampling.params import Sampled
from engine.sampling.sampler import sample


class HostLauncher:
    """The result is there when `launch` returns."""

    is_async = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Run the step. Raises what the model or the sampler raises."""
        start = time.perf_counter()
        deltas = step.page_deltas
        table = step.forward.page_table.numpy()
        table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]
        logits = self._runner.forward(step.forward)
        computed = waited = time.perf_counter()
        sampled = None
        if step.sampling.rows:
            step.sampling.mask_ready.wait()
            waited = time.perf_counter()
            sampled = sample(logits, step.sampling)
            self._feed_back(step.sampling.slots, sampled)
        if isinstance(self._runner, DraftingRunner) and self._runner.can_draft:
            sampled = self._with_drafts(self._runner, step.forward, sampled)
        result = StepResult(
            step_id=step.forward.step_id,
            sampled=sampled,
            forward_ms=(computed - start) * 1e3,
            mask_wait_ms=(waited - computed) * 1e3,
            sample_ms=(time.perf_counter() - waited) * 1e3,
        )
        return lambda: result

    def _with_drafts(
        self, runner: DraftingRunner, batch: ForwardBatch, sampled: Sampled | None
    ) -> Sampled | None:
        """Runs for a step that samples nothing too: its tokens' KV is read later."""
        assert batch.next_ids is not None, "a runner that drafts is told what follows"
        next_ids = batch.next_ids.clone()
        if sampled is not None:
            last = batch.row_indptr[batch.sample_rows.long() + 1].long() - 1
            next_ids[last] = torch.from_numpy(np.maximum(sampled.token_ids, 0))
        drafts = runner.draft(batch, next_ids)
        return None if sampled is None else replace(sampled, drafts=drafts.numpy())

    def _feed_back(self, slots: NDArray[np.int64], sampled: Sampled) -> None:
        # A failed row still occupies its slot in the step already dispatched: any id will do.
        token_ids = torch.from_numpy(np.maximum(sampled.token_ids, 0))
        self._runner.next_input_ids[torch.from_numpy(slots)] = token_ids
