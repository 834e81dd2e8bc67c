# SPDX-License-Identifier: Apache-2.0
"""Streams that pages are copied on beside a device's compute stream.

Does not know: what is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from kvtiers.layered_load import Fence, Wait


class Lane(Protocol):
    """Where copies of a device run beside its compute stream, in order. One thread."""

    handle: int  # of the stream

    def entered(self) -> AbstractContextManager[object]:
        """Within it, copies and kernels are queued here."""
        ...

    def mark(self) -> Wait:
        """What waits until all that was queued so far is done."""
        ...

    def fence(self) -> Fence:
        """What makes the current stream go on only behind all that was queued so far."""
        ...

    def finish(self) -> None:
        """Wait until all that was queued is done."""
        ...


class CudaLane:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.handle: int = self._stream.cuda_stream

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Wait:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Wait = event.synchronize
        return wait

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return lambda: torch.cuda.current_stream(self._stream.device).wait_event(event)

    def finish(self) -> None:
        self.mark()()


@contextmanager
def finished(lane: Lane) -> Iterator[None]:
    """Queue work on a lane; on the way out it is done, also where something was raised.

    Whoever hears of a failed move gives its page to somebody else.
    """
    try:
        with lane.entered():
            yield
    finally:
        lane.finish()
