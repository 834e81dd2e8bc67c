# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch in compiled kernels: what stands in front of a kernel's wait.

Kernels are compiled for sm_90 without a GPU, and their PTX is read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]
FIRST_GEMMS = ("moe_gate_up", "moe_gate_up_rows")
SECOND_GEMMS = tuple(
    f"moe_down{combined}_{name}"
    for combined in ("", "_combined")
    for name in ("rows", "unsorted", "sorted")
)
OTHERS = ("w4_rows", "dense_rows", "absorb", "merge_values")
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_PTX = """
import json, sys
from tests.kernels.triton_compiled import KERNELS
print(json.dumps({name: KERNELS[name]().asm["ptx"] for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    """PTX by kernel."""
    names = (*FIRST_GEMMS, *SECOND_GEMMS, *OTHERS)
    done = subprocess.run(
        [sys.executable, "-c", _PTX, *names],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [*FIRST_GEMMS, *SECOND_GEMMS, *OTHERS])
def test_nothing_is_written_before_the_wait(code: dict[str, str], name: str) -> None:
    """The kernel in front may still read what lay there."""
    before, wait, _ = code[name].partition(WAIT)
    assert wait
    assert not re.search(r"\b(st\.global|red\.|atom\.|cp\.reduce)", before)


@pytest.mark.parametrize("name", [*FIRST_GEMMS, *SECOND_GEMMS])
def test_gemms_of_experts_read_nothing_before_the_wait(code: dict[str, str], name: str) -> None:
    """Which weights they want hangs on what kernels of this step made. The second one could read
    that earlier, as the first has waited for it: no faster."""
    before, wait, _ = code[name].partition(WAIT)
    assert wait and "ld.global" not in before
