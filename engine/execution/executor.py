# SPDX-License-Identifier: Apache-2.0
"""One worker thread that launches a step after the other; a second one waits where a device works.

The loop dispatches step N before it has seen the tokens of step N - 1; those stay with the runner.
Does not know: requests, the scheduler, how a step runs (a Launcher).

Thread rule: `dispatch`, `take` and `close` belong to the loop's thread. The launcher belongs to the
worker; only the calls it returned are made elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.execution.batch import ModelRunner
from engine.execution.host_launcher import HostLauncher
from engine.execution.steps import Launcher, LaunchesSteps, Step, StepResult

__all__ = ["Executor", "Step", "StepResult"]

logger = logging.getLogger(__name__)

# (step_id, waits for the result, when its launch began and had ended)
_Pending = tuple[int, Callable[[], StepResult], int, int]


class Executor:
    """Runs steps in the order of dispatch; `on_done` is called, on its threads, after each.

    Args:
        stamps_steps: results say when their step was launched and done, which takes 2 us.
    """

    def __init__(
        self, runner: ModelRunner, on_done: Callable[[], None], *, stamps_steps: bool = False
    ) -> None:
        self._launcher: Launcher = (
            runner.step_launcher() if isinstance(runner, LaunchesSteps) else HostLauncher(runner)
        )
        self._on_done = on_done
        self._stamps_steps = stamps_steps
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._pending: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()  # append and popleft are atomic
        self._clock: int | None = None  # of the CPU time that the worker has used
        self._worked_ns = 0
        self._threads = [threading.Thread(target=self._work, name="executor", daemon=True)]
        if self._launcher.is_async:
            self._threads.append(
                threading.Thread(target=self._wait_for_results, name="step-results", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def is_async(self) -> bool:
        """Whether steps run on a device, beside this process's threads."""
        return self._launcher.is_async

    def dispatch(self, step: Step) -> None:
        """Queue a step; returns at once."""
        self._steps.put(step)

    def take(self) -> StepResult | None:
        """The oldest result not taken yet, or None."""
        return self._results.popleft() if self._results else None

    def work_ns(self) -> int:
        """CPU time that steps have used, which grows while one computes; of a device it says
        nothing: then it stands still."""
        if self._clock is not None and not self._launcher.is_async:
            with contextlib.suppress(OSError):  # the worker has ended
                self._worked_ns = time.clock_gettime_ns(self._clock)
        return self._worked_ns

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Finish the queued steps and end the threads; one that hangs ends with the process."""
        self._steps.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        with torch.inference_mode():
            while (step := self._steps.get()) is not None:
                start_ns = time.monotonic_ns()
                finish = self._launch(step)
                pending = (step.forward.step_id, finish, start_ns, time.monotonic_ns())
                if self._launcher.is_async:
                    self._pending.put(pending)
                else:
                    self._hand_over(*pending)
        self._pending.put(None)

    def _wait_for_results(self) -> None:
        while (pending := self._pending.get()) is not None:
            self._hand_over(*pending)

    def _launch(self, step: Step) -> Callable[[], StepResult]:
        start = time.perf_counter()
        try:
            return self._launcher.launch(step)
        except Exception as error:  # the step fails, not the process: the loop decides on more
            failed = _failed(step.forward.step_id, error, start)
            return lambda: failed

    def _hand_over(
        self, step_id: int, finish: Callable[[], StepResult], start_ns: int, launched_ns: int
    ) -> None:
        start = time.perf_counter()
        try:
            result = finish()
        except Exception as error:  # what a device did wrong shows when its result is waited for
            result = _failed(step_id, error, start)
        if self._stamps_steps:
            result = replace(result, span=(start_ns, launched_ns, time.monotonic_ns()))
        self._results.append(result)
        self._on_done()


def _failed(step_id: int, error: Exception, start: float) -> StepResult:
    logger.error("step %d failed", step_id, exc_info=error)
    return StepResult(
        step_id=step_id,
        sampled=None,
        forward_ms=(time.perf_counter() - start) * 1e3,
        mask_wait_ms=0.0,
        sample_ms=0.0,
        error=f"{type(error).__name__}: {error}",
    )
