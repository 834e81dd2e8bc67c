# SPDX-License-Identifier: Apache-2.0
"""The frames of one answer that goes on without a reader: any number of readers, at any time.

In memory, on one event loop. Does not know: what frames say, who makes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class FrameLog:
    """Grows until `end`; frames are numbered from 0."""

    frames: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    _is_over: bool = False
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, frame: bytes) -> None:
        """Append a frame; its readers are woken."""
        self.frames.append(frame)
        self.num_bytes += len(frame)
        self._wake()

    def end(self) -> None:
        """No more frames come."""
        self._is_over = True
        self._wake()

    async def read(self, starting_after: int = -1) -> AsyncIterator[bytes]:
        """Yield the frames above a number, those that are there and those that come."""
        place = starting_after + 1
        while True:
            while place < len(self.frames):
                yield self.frames[place]
                place += 1
            if self._is_over:
                return
            await self._grown.wait()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
