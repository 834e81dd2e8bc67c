# SPDX-License-Identifier: Apache-2.0
"""One JSON line a step, for whoever asks where a turn's time went.

Times are microseconds of the monotonic clock, which all processes of a machine share: `plan_us`
(planned; to the millisecond), `launch_us` (the executor began), `launched_us` (all of it was
launched), `done_us` (the result was there), `commit_us` (the loop had it). `forward_ms` and
`sample_ms` are the device's own.

Does not know: what a step is for.
"""

from __future__ import annotations

import json
import time

from engine.execution.steps import StepResult
from engine.loop.commit import DispatchedStep


class StepTrace:
    """Lines appended to a file; what is not flushed yet may be lost with the process."""

    def __init__(self, path: str) -> None:
        """Raises: OSError if the file cannot be written."""
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
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Let others read what was noted."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()
