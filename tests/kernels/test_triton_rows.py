# SPDX-License-Identifier: Apache-2.0
"""Row-wise Triton kernels without a GPU: the interpreter runs them against their references."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_row_kernels_agree_with_their_references() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.kernels.triton_rows_interpreted"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "ok\n"
