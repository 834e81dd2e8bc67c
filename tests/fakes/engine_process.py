# SPDX-License-Identifier: Apache-2.0
"""A real engine process for tests: started, killed, waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.config import EngineConfig

REPOSITORY = Path(__file__).resolve().parents[2]


class EngineProcess:
    """`python -m engine.process` with a configuration; a context manager.

    l2_fd: shared memory that outlives it. module: what is run instead.
    """

    def __init__(
        self, config: EngineConfig, l2_fd: int | None = None, module: str = "engine.process"
    ) -> None:
        self.config = config
        self.module = module
        self.l2_fd = l2_fd
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str] | None = None) -> EngineProcess:
        keeper = ["--l2-fd", str(self.l2_fd)] if self.l2_fd is not None else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "--config-json", "-", *keeper],
            cwd=REPOSITORY,
            env=os.environ | (env or {}),
            pass_fds=() if self.l2_fd is None else (self.l2_fd,),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(self.config.to_json())
        self.process.stdin.close()
        return self

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """As a crash: nothing is said to anybody."""
        assert self.process is not None
        self.process.kill()
        self.wait()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> tuple[int, str]:
        """The exit code, and what it said on stderr."""
        assert self.process is not None and self.process.stderr is not None
        said = self.process.stderr.read().decode()
        self.process.stderr.close()
        code = self.process.wait()
        self.process = None
        return code, said

    def __enter__(self) -> EngineProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.kill()
