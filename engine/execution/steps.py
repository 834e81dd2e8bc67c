# SPDX-License-Identifier: Apache-2.0
"""A step as the loop hands it over, what comes of it, and who can run it.

Does not know: threads, devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch
from engine.sampling.params import SampleBatch, Sampled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What the worker needs for one step."""

    forward: ForwardBatch
    page_deltas: NDArray[np.int32]  # [D, 3] (slot, index, page)
    sampling: SampleBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What came of a step. `error` says why nothing did.

    `num_lost`: so many rows, the first ones, came to nothing for want of memory, as `lost_error`
    says; what was sampled for them means nothing.

    `span`: when the executor began to launch it, had launched it, and had its result; monotonic ns;
    zeros unless it was told to stamp steps.
    """

    step_id: int
    sampled: Sampled | None
    forward_ms: float
    mask_wait_ms: float
    sample_ms: float
    error: str | None = None
    num_lost: int = 0
    lost_error: str | None = None
    span: tuple[int, int, int] = (0, 0, 0)

    @property
    def any_error(self) -> str | None:
        """Why nothing came of some row of the step, or of all; None: something did of each."""
        return self.error or self.lost_error

    def error_of(self, row: int) -> str | None:
        """Why nothing came of one row of the step; None: something did."""
        return self.lost_error if self.error is None and row < self.num_lost else self.error


class Launcher(Protocol):
    """Runs steps in order. `is_async`: the result is not there yet when `launch` returns."""

    is_async: bool

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Start a step; the call it returns waits for the result (from any one thread)."""
        ...


@runtime_checkable
class LaunchesSteps(Protocol):
    """A runner that brings its own launcher."""

    def step_launcher(self) -> Launcher:
        """The launcher of this runner; one, for one worker thread."""
        ...
