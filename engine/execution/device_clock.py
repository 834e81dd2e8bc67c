# SPDX-License-Identifier: Apache-2.0
"""Streams and the times between points of a step: events on a GPU, the host's clock elsewhere.

Does not know: what runs between two marks.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class DeviceStream:
    """One stream of a GPU, or nothing at all on a CPU.

    What was launched before it was made, on any stream (weights, an empty pool), is done.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # without types
        if device.type == "cuda":
            cuda.synchronize(device)
        self.cuda_stream: Any = cuda.Stream(device) if device.type == "cuda" else None

    def enter(self) -> AbstractContextManager[object]:
        """What is launched inside goes to the stream."""
        if self.cuda_stream is None:
            return nullcontext()
        entered: AbstractContextManager[object] = torch.cuda.stream(self.cuda_stream)
        return entered

    def synchronise(self) -> None:
        """Wait until all of it is done."""
        if self.cuda_stream is not None:
            self.cuda_stream.synchronize()

    def clock(self) -> StepClock:
        """A clock that starts now."""
        return StepClock(self.cuda_stream)


class StepClock:
    """Marks points of one step; `wait` returns when the last of them is reached."""

    def __init__(self, cuda_stream: Any) -> None:
        self._stream = cuda_stream
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Mark what has been launched so far."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
            return
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append(event)

    def wait(self) -> None:
        """Until the device is there; lets other threads of the process run."""
        if self._stream is not None:
            self._marks[-1].synchronize()

    def ms_before(self, place: int) -> float:
        """Milliseconds between mark `place` - 1 and mark `place`. Requires: `wait` returned."""
        before, after = self._marks[place - 1], self._marks[place]
        if self._stream is None:
            return float(after - before) * 1e3
        elapsed: float = before.elapsed_time(after)
        return elapsed
