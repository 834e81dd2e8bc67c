# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive their parent, and when to start one again.

Does not know: what the children are. Linux only (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PR_SET_PDEATHSIG = 1
RESTART_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0
MEMORY_NAME = "moorage-l2"
# Between two looks at a child. In a longer gap the watcher stood still itself, so maybe all did.
MAX_GAP_S = 2.0
# The signals the supervisor takes with sigtimedwait; exec would hand the mask to the children.
SUPERVISED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

_libc = ctypes.CDLL(None, use_errno=True)


def spawn(
    module: str, args: Sequence[str], *, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start `python -m module args...`; the kernel sends it SIGTERM when its parent dies.

    Must be called on the main thread: the parent-death signal follows the thread that forked.
    """
    return spawn_command([sys.executable, "-m", module, *args], pass_fds=pass_fds)


def spawn_command(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    more_env: Mapping[str, str] | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start any command in the same way. Raises: OSError where there is no such command."""
    parent_pid = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISED_SIGNALS)
        _libc.prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent_pid:  # it died before prctl took hold
            os._exit(1)

    return subprocess.Popen(
        list(command),
        pass_fds=tuple(pass_fds),
        env={**os.environ, **(more_env or {})},
        stdin=subprocess.DEVNULL,
        preexec_fn=in_child,
        start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then drains
    )


def keep_memory() -> int:
    """A descriptor of empty shared memory for a child to size and fill.

    What is in it lives as long as this process, however often the child dies.
    """
    return os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)


class Pulse:
    """Watches a child that adds to an eventfd while it is well. One thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._last_s: float | None = None
        self._looked_s = 0.0

    def reset(self) -> None:
        """Another child is starting: it is not watched before its first sign of life."""
        self._read()
        self._last_s = None

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last sign of life, seen at this call or before; 0 before the first.

        A machine that stood still (paused, suspended) stopped child and watcher alike: of a gap
        between two calls no more than `MAX_GAP_S` counts.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if self._read():
            self._last_s = now_s
        elif self._last_s is not None and gap_s > MAX_GAP_S:
            self._last_s += gap_s - MAX_GAP_S
        return now_s - self._last_s if self._last_s is not None else 0.0

    def _read(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True


@dataclass(slots=True)
class RestartPolicy:
    """Decides how long to wait before a restart; gives up past `max_restarts` in a minute."""

    max_restarts: int
    _restarts: deque[float] = field(default_factory=deque)

    def next_delay_s(self, now_s: float) -> float | None:
        """Note one death and return the wait before the restart, or None to give up."""
        while self._restarts and now_s - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            return None
        self._restarts.append(now_s)
        return min(FIRST_BACKOFF_S * 4.0 ** (len(self._restarts) - 1), MAX_BACKOFF_S)


def describe_exit(code: int) -> str:
    """Return an exit status in words: `exit 3` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
