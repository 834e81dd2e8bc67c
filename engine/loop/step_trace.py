# SPDX-License-Identifier: Apache-2.0
"""One JSON line a step, for whoever asks where a turn's time went.

Times are microseconds of the monotonic clock, which all processes of a machine share: `plan_us`
(planned; to the millisecond), `launch_us` (the executor began), `launched_us` (all of it was
launched), `done_us` (the result was there), `commit_us` (the loop had it). `forward_ms` and
`sample_ms` are the device's own.

Does not know: what a step is for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable

from engine.execution.steps import StepResult
from engine.loop.commit import DispatchedStep

logger = logging.getLogger(__name__)


class StepTrace:
    """Lines appended to a file; what is not flushed yet may be lost with the process.

    A full disk ends the trace, not the engine.
    """

    def __init__(self, path: str) -> None:
        """Raises: OSError if the file cannot be opened."""
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by its owner

    def note(self, step: DispatchedStep, result: StepResult, num_sampled: int) -> None:
        """A step was committed."""
        launch_us, launched_us, done_us = (ns // 1000 for ns in result.span)
        line = {
            "step": step.step_id,
            "rows": len(step.requests),
            "tokens": step.num_tokens,
            "sampled": num_sampled,
            "plan_us": step.dispatched_ms * 1000,
            "launch_us": launch_us,
            "launched_us": launched_us,
            "done_us": done_us,
            "commit_us": time.monotonic_ns() // 1000,
            "forward_ms": round(result.forward_ms, 3),
            "sample_ms": round(result.sample_ms, 3),
            "error": result.error,
        }
        self._try(lambda: self._file.write(json.dumps(line) + "\n"))

    def flush(self) -> None:
        """Let others read what was noted."""
        self._try(self._file.flush)

    def close(self) -> None:
        """No more comes."""
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> None:
        if self._file.closed:
            return
        try:
            act()
        except OSError as error:
            logger.warning("engine.step_trace ends: %s: %s", self._path, error)
            with contextlib.suppress(OSError):  # it tries to write what is left
                self._file.close()
