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
from engine.loop.log_file import LogFile


class StepTrace:
    """Writes to a log that its owner closes."""

    def __init__(self, log: LogFile) -> None:
        self._log = log

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
            "error": result.any_error,
        }
        self._log.write(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        """Let others read what was noted."""
        self._log.flush()
