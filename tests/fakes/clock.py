# SPDX-License-Identifier: Apache-2.0
"""A clock that moves when a test says so."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in milliseconds."""

    def __init__(self, now_ms: int = 1000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        """Let `ms` milliseconds pass."""
        self.now_ms += ms
