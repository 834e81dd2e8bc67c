# SPDX-License-Identifier: Apache-2.0
"""The table of docs/gpu-kernels.md has every kernel of a GPU, and none that is not there."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/gpu-kernels.md"
SCRIPT = """
import json
from benchmarks.gpu.stub_device import stub_device
from kernels.registry import REGISTRY
with stub_device():
    for family in REGISTRY.families():
        for spec in REGISTRY.specs(family):
            if spec.device == "cuda" or "kernels.triton" in spec.fn.__module__:
                print(json.dumps([family, spec.name]))
"""


def _documented() -> set[tuple[str, str]]:
    """Families and kernels of the first table's rows, each with each."""
    rows = re.findall(r"^\| ([a-z_0-9, ]+) \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    found = set()
    for families, kernels in rows:
        for name in re.findall(r"`([a-z_0-9]+)`", kernels):
            found |= {(family.strip(), name) for family in families.split(",")}
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_table_of_gpu_kernels_is_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    registered = {tuple(json.loads(line)) for line in done.stdout.splitlines()}
    assert len(registered) > 30
    # Forms and compositions that run anywhere stand there where they are what a GPU may run.
    elsewhere = {(family, name) for family, name in _documented() if name in _ANYWHERE}
    assert _documented() - elsewhere == registered


_ANYWHERE = {"rows", "folded", "expanded", "apart"}
