# SPDX-License-Identifier: Apache-2.0
"""One worker thread that runs a step after the other: page table, forward, sample.

The loop dispatches step N before it has seen the tokens of step N - 1; those stay with the runner
(`next_input_ids[slot]`). Does not know: requests, the scheduler, grammars beyond a bitmask.

Thread rule: `dispatch`, `take` and `close` belong to the loop's thread. The page table, the
sampling rows and the runner belong to the worker.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch, ModelRunner
from engine.sampling.params import SampleBatch, Sampled
from engine.sampling.sampler import sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What the worker needs for one step."""

    forward: ForwardBatch
    page_deltas: NDArray[np.int32]  # [D, 3] (slot, index, page)
    sampling: SampleBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What came of a step. `error` says why nothing did."""

    step_id: int
    sampled: Sampled | None
    forward_ms: float
    mask_wait_ms: float
    sample_ms: float
    error: str | None = None


class Executor:
    """Runs steps in the order of dispatch; `on_done` is called on the worker after each."""

    def __init__(self, runner: ModelRunner, on_done: Callable[[], None]) -> None:
        self._runner = runner
        self._on_done = on_done
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()  # append and popleft are atomic
        self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
        self._thread.start()

    def dispatch(self, step: Step) -> None:
        """Queue a step; returns at once."""
        self._steps.put(step)

    def take(self) -> StepResult | None:
        """The oldest result not taken yet, or None."""
        return self._results.popleft() if self._results else None

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Finish the queued steps and end the worker; one that hangs ends with the process."""
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        with torch.inference_mode():
            while (step := self._steps.get()) is not None:
                self._results.append(self._run(step))
                self._on_done()

    def _run(self, step: Step) -> StepResult:
        start = time.perf_counter()
        try:
            deltas = step.page_deltas
            table = step.forward.page_table.numpy()
            table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]
            logits = self._runner.forward(step.forward)
            computed = time.perf_counter()
            sampled = None
            waited = computed
            if step.sampling.rows:
                step.sampling.mask_ready.wait()
                waited = time.perf_counter()
                sampled = sample(logits, step.sampling)
                self._feed_back(step.sampling.slots, sampled)
        except Exception as error:  # the step fails, not the process: the loop decides on more
            logger.exception("step %d failed", step.forward.step_id)
            return StepResult(
                step_id=step.forward.step_id,
                sampled=None,
                forward_ms=_since_ms(start),
                mask_wait_ms=0.0,
                sample_ms=0.0,
                error=f"{type(error).__name__}: {error}",
            )
        return StepResult(
            step_id=step.forward.step_id,
            sampled=sampled,
            forward_ms=(computed - start) * 1e3,
            mask_wait_ms=(waited - computed) * 1e3,
            sample_ms=_since_ms(waited),
        )

    def _feed_back(self, slots: NDArray[np.int64], sampled: Sampled) -> None:
        # A failed row still occupies its slot in the step already dispatched: any id will do.
        token_ids = torch.from_numpy(np.maximum(sampled.token_ids, 0))
        self._runner.next_input_ids[torch.from_numpy(slots)] = token_ids


def _since_ms(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
