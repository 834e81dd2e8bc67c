# SPDX-License-Identifier: Apache-2.0
"""`python -m engine.process` that runs no step before it was given so many requests, and none any
more after so many steps that all of them share.

The environment variable HOLD_AT says both numbers: `3:30`. Its streams are then in their midst,
however late their reader looks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from engine import api
from engine.execution.host_launcher import HostLauncher
from engine.execution.steps import Step, StepResult
from engine.loop.intake import Intake
from engine.loop.requests import Request
from engine.process import main

HOLD_AT = "MOORAGE_TEST_HOLD_AT"


def arm(num_requests: int, num_steps: int) -> None:
    """Replace what takes requests in and what launches steps."""
    accept, launch = Intake.accept, HostLauncher.launch
    have_come, never = threading.Event(), threading.Event()
    left = {"requests": num_requests, "steps": num_steps}

    def counting_accept(self: Intake, wire: api.GenerateRequest, now_ms: int) -> Request:
        left["requests"] -= 1
        if left["requests"] == 0:
            have_come.set()
        return accept(self, wire, now_ms)

    def held_launch(self: HostLauncher, step: Step) -> Callable[[], StepResult]:
        have_come.wait()
        if left["steps"] == 0:
            never.wait()
        left["steps"] -= len(step.forward.row_slots) == num_requests
        return launch(self, step)

    Intake.accept = counting_accept  # type: ignore[method-assign]
    HostLauncher.launch = held_launch  # type: ignore[method-assign]


if __name__ == "__main__":
    if HOLD_AT in os.environ:
        requests, steps = map(int, os.environ[HOLD_AT].split(":"))
        arm(requests, steps)
    sys.exit(main())
