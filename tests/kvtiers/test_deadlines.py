# SPDX-License-Identifier: Apache-2.0
"""Calls with a deadline: what one that raises held goes with its error, not with garbage."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from kvtiers.deadlines import DeadlineThreads


class Buffer:
    """Stands for the memory that a call reads into."""


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    threads = DeadlineThreads("test")

    def fail(buffer: Buffer) -> weakref.ref[Buffer]:
        def call() -> None:
            raise OSError(f"no room for {buffer is not None}")

        with pytest.raises(OSError, match="no room for True"):
            threads.run(call, 20.0)
        return weakref.ref(buffer)

    gc.collect()
    gc.disable()
    try:
        held = fail(Buffer())
        deadline_s = time.monotonic() + 20
        while held() is not None and time.monotonic() < deadline_s:
            time.sleep(0.001)  # its thread may not be through yet
        assert held() is None
    finally:
        gc.enable()
        threads.close()
    assert threads.num_stuck == 0
