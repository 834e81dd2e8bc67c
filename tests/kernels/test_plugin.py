# SPDX-License-Identifier: Apache-2.0
"""A kernel from another distribution: a wheel with an entry point, installed beside ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

_MODULE = """
import torch
from kernels.registry import Priority, register_kernel


def register():
    @register_kernel("argmax", "from_a_wheel", priority=Priority.PLUGIN)
    def argmax(logits):
        return torch.full((logits.shape[0],), 7, dtype=torch.int32)
"""
_FILES = {
    "fast_argmax.py": _MODULE,
    "fast_argmax-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: fast-argmax\nVersion: 1.0\n"
    ),
    "fast_argmax-1.0.dist-info/WHEEL": (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ),
    "fast_argmax-1.0.dist-info/entry_points.txt": (
        "[moorage.kernels]\nfast_argmax = fast_argmax:register\n"
    ),
}


def _python(*arguments: str, path: Path | None = None) -> str:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_installed_wheel_brings_a_kernel_that_is_chosen(tmp_path: Path) -> None:
    wheel, site = tmp_path / "fast_argmax-1.0-py3-none-any.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in _FILES.items():
            archive.writestr(name, text)
        record = "".join(f"{name},,\n" for name in _FILES)
        archive.writestr("fast_argmax-1.0.dist-info/RECORD", record)
    options = ("--quiet", "--no-index", "--no-deps", "--target", str(site))
    _python("-m", "pip", "install", *options, str(wheel))
    lines = [
        json.loads(line)
        for line in _python("-m", "kernels", "ls", "--json", path=site).split("\n")
        if line
    ]
    best = next(line for line in lines if line["family"] == "argmax")
    assert (best["name"], best["priority"]) == ("from_a_wheel", "PLUGIN")
    script = "import torch; from kernels import ops; print(ops.argmax(torch.zeros(2, 9)).tolist())"
    assert _python("-c", script, path=site).strip() == "[7, 7]"
    # By name too, before anything was selected; and `verify` finds it out.
    script = (
        "from engine.execution.model_runner import override_kernels\n"
        "override_kernels('argmax=from_a_wheel')\n" + script
    )
    assert _python("-c", script, path=site).strip() == "[7, 7]"
    script = (
        "from kernels.verify import verify_family as v; print(all(x.passes for x in v('argmax')))"
    )
    assert _python("-c", script, path=site).strip() == "False"
