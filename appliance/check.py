# SPDX-License-Identifier: Apache-2.0
"""`moorage check`: everything that is wrong, before anything is started.

Does not know: how the appliance runs. Each finding is one line that names the setting.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from appliance.config import ApplianceConfig
from appliance.stores import store_problem
from appliance.supervisor import StartError, bind_listener

MIN_FREE_BYTES = 64 << 20
PROBE_BYTES = 4096


def find_problems(config: ApplianceConfig, *, port_is_ours: bool = False) -> list[str]:
    """Return every problem found, worst first; an empty list means it can start."""
    problems = [str(problem) for problem in config.problems()]
    if problems:
        return problems
    for name, directory in (
        ("server.state_dir", config.server.state_dir),
        ("server.run_dir", config.server.run_dir),
    ):
        problems.extend(_directory_problems(name, directory))
    if not problems:
        problems.extend(filter(None, [store_problem(config.sessions)]))
    if not port_is_ours:
        problems.extend(_port_problems(config))
    problems.extend(_environment_problems())
    return problems


def model_problem(config: ApplianceConfig) -> str | None:
    """What would keep an engine from loading its model; None where nothing would. Takes seconds.

    In a process of its own, as it needs torch, which nothing here may load.
    """
    done = subprocess.run(
        [sys.executable, "-m", "engine.check_model", "--config-json", "-"],
        input=config.engine.to_json(),
        capture_output=True,
    )
    if done.returncode == 0:
        return None
    said = done.stdout.decode().strip() or done.stderr.decode().strip().rpartition("\n")[2]
    said = said or f"the check ended with status {done.returncode}"
    return said if said.startswith("engine.") else f"engine.model: {said}"


def _port_problems(config: ApplianceConfig) -> Iterator[str]:
    try:
        bind_listener(config.server.host, config.server.port).close()
    except StartError as error:
        yield str(error)


def _directory_problems(name: str, directory: Path) -> Iterator[str]:
    """Create the directory, write and sync a probe: what a full disk lets pass until then."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(fd, b"\0" * PROBE_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
            probe.unlink()
        free_bytes = shutil.disk_usage(directory).free
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        yield f"{name}: cannot write to {directory}: {what}"
        return
    if free_bytes < MIN_FREE_BYTES:
        yield (
            f"{name}: the disk is full: {free_bytes >> 20} MiB free in {directory}, "
            f"at least {MIN_FREE_BYTES >> 20} needed"
        )


def _environment_problems() -> Iterator[str]:
    """Hugging Face's `kernels` wheel owns the same top-level package: one overwrites the other."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    yield (
        f"environment: the distribution `kernels` {version} is installed beside Moorage and its "
        "files overwrite Moorage's `kernels` package (hint: pip uninstall kernels, then "
        "reinstall moorage; an appliance lives in its own environment)"
    )
