# SPDX-License-Identifier: Apache-2.0
"""Builds what stands before libc in a process that a test starts (LD_PRELOAD)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def build_shim(path: Path, source: str, **strings: Path | str) -> Path:
    """Compile C into a shared object at `path`, which is returned; skips without a compiler.

    Args:
        strings: macros of the source, each a string literal in C.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    defines = [f'-D{name}="{value}"' for name, value in strings.items()]
    subprocess.run(
        [compiler, "-shared", "-fPIC", *defines, "-xc", "-", "-o", path, "-ldl"],
        input=source.encode(),
        check=True,
    )
    return path
