# SPDX-License-Identifier: Apache-2.0
"""A real redis-server of the test's own: a unix socket in a temporary directory, durable."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.fakes.signals import stop_now


def find_redis_server() -> str:
    """The binary; without one the test is skipped, or fails where CI=true."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        reason = "no redis-server (hint: apt-get install redis-server)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return binary


class RedisServer:
    """One server process; `kill` is kill -9, `start` again finds the same data."""

    def __init__(self, directory: Path, *options: str, preload: Path | None = None) -> None:
        self.directory = directory
        self.log_path = directory / "redis.log"
        self._preload = preload
        # A socket path holds about 100 bytes, so it may not lie deep in a test's directory.
        self.socket_path = Path(f"/tmp/moorage-{os.getpid()}-{id(self):x}.sock")
        self._binary = find_redis_server()
        self._options = options or ("--appendonly", "yes", "--appendfsync", "always")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = subprocess.Popen(
            [
                self._binary,
                *("--port", "0", "--unixsocket", str(self.socket_path), "--save", ""),
                *("--dir", str(self.directory), "--maxmemory-policy", "noeviction"),
                *("--logfile", str(self.log_path)),
                *self._options,
            ],
            env=os.environ | ({"LD_PRELOAD": str(self._preload)} if self._preload else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start in {self.directory}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self.socket_path.unlink(missing_ok=True)

    def pause(self) -> None:
        """Stop it without closing its sockets, as a machine that hangs."""
        assert self.process is not None
        stop_now(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            try:
                client.connect(str(self.socket_path))
                client.sendall(b"PING\r\n")
                return client.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False
