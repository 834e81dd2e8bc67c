# SPDX-License-Identifier: Apache-2.0
"""How long a server may be away, and the growing pauses between attempts."""

from __future__ import annotations

import time

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Patience:
    """Counts from when it was made, or from the last thing that came."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Something came: begin anew."""
        self._until_s = time.monotonic() + self._seconds
        self._pause_s = FIRST_PAUSE_S

    def next_pause_s(self) -> float | None:
        """How long to wait before the next attempt; None where the time is over."""
        pause_s = self._pause_s
        if time.monotonic() + pause_s > self._until_s:
            return None
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s
