# SPDX-License-Identifier: Apache-2.0
"""Signals that have taken effect when the call returns.

A signal is only pending when `kill` returns. On a busy machine a process that was asleep runs on
for some milliseconds, and a test that goes on at once meets one that is still there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

WAIT_S = 30.0


def stop_now(pid: int) -> None:
    """Stop a process (SIGSTOP); none of its threads runs any longer.

    Raises: TimeoutError, where it runs on.
    """
    os.kill(pid, signal.SIGSTOP)
    _wait(pid, "TtXZ", "SIGSTOP")


def kill_now(pid: int) -> None:
    """Kill a process (SIGKILL); it is gone, but for its parent's wait.

    Raises: TimeoutError, where it lives on.
    """
    os.kill(pid, signal.SIGKILL)
    _wait(pid, "XZ", "SIGKILL")


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    return set(_states(pid)) == {"T"}


def _wait(pid: int, states: str, name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(state not in states for state in _states(pid)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pid} does not heed {name}: its threads are {_states(pid)}")
        time.sleep(0.001)


def _states(pid: int) -> str:
    """A letter for each thread, as proc(5) has them; none of a process that is gone."""
    states = ""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                states += (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
    return states
