# SPDX-License-Identifier: Apache-2.0
"""Signs of life for the process that watches this one, and what it keeps for it.

Does not know: who watches, what happens to an engine without a pulse.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

BEAT_MS = 200
# A step this old is no work any more: from then on the loop's turning proves nothing.
SILENT_STEP_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """Descriptors inherited from a process that outlives this one; None: there is none."""

    l2_fd: int | None = None  # shared memory
    heartbeat_fd: int | None = None  # an eventfd


class Heart:
    """Adds to an eventfd while the loop turns and its steps come to an end."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._next_ms = 0

    def beat(self, now_ms: int, oldest_step_ms: int | None) -> None:
        """Call it each turn; what is still computing after `SILENT_STEP_MS` may hang."""
        if self._fd is None or now_ms < self._next_ms:
            return
        if oldest_step_ms is not None and now_ms - oldest_step_ms > SILENT_STEP_MS:
            return
        self._next_ms = now_ms + BEAT_MS
        os.eventfd_write(self._fd, 1)
