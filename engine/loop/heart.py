# SPDX-License-Identifier: Apache-2.0
"""Signs of life for the process that watches this one, and what it keeps for it.

Does not know: who watches, what happens to an engine without a pulse.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

BEAT_MS = 200
# From this age of a step on the loop's turning proves nothing: the step must be seen to compute.
SILENT_STEP_MS = 10_000
# CPU time between two beats that is work. A thread that waits for a lock uses none: kernels that
# wait for each other sleep after some microseconds.
WORK_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """Descriptors inherited from a process that outlives this one; None: there is none."""

    l2_fd: int | None = None  # shared memory
    heartbeat_fd: int | None = None  # an eventfd


class Heart:
    """Adds to an eventfd while the loop turns and its steps end, or are seen to compute.

    Args:
        work_ns: CPU time that steps have used so far; stands still where a device computes.
    """

    def __init__(self, fd: int | None, work_ns: Callable[[], int]) -> None:
        self._fd = fd
        self._work_ns = work_ns
        self._worked_ns = 0
        self._next_ms = 0

    def beat(self, now_ms: int, oldest_step_ms: int | None) -> None:
        """Call it each turn; a step older than `SILENT_STEP_MS` that does no work may hang."""
        if self._fd is None or now_ms < self._next_ms:
            return
        worked_ns = self._work_ns()
        is_old = oldest_step_ms is not None and now_ms - oldest_step_ms > SILENT_STEP_MS
        if is_old and worked_ns - self._worked_ns < WORK_NS:
            return
        self._worked_ns = worked_ns
        self._next_ms = now_ms + BEAT_MS
        os.eventfd_write(self._fd, 1)
