# SPDX-License-Identifier: Apache-2.0
"""A clock that moves when told."""

from __future__ import annotations


class SessionClock:
    """Unix milliseconds; `now_ms` is what a test injects."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, delta_ms: int) -> int:
        """Move on (or back, with a negative delta); returns the new time."""
        self._now_ms += delta_ms
        return self._now_ms
