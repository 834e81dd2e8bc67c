# SPDX-License-Identifier: Apache-2.0
"""Quick launches take the form that the analysis chose, and ask again where facts differ."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# A kernel stands in whose analysis is counted; a child process, as it loads triton.
_SCRIPT = """
import types
import torch
from kernels._triton import triton
from kernels.triton.quick_launch import quick_launch

class Driver:
    def get_current_device(self):
        return 0

triton.runtime.driver.set_active(Driver())
analysed, launched = [], []

class Form:
    def __init__(self, number):
        self.number = number
    def __getitem__(self, grid):
        return lambda *arguments: launched.append((self.number, grid, arguments))

class Jitted:
    params = [types.SimpleNamespace(name=name) for name in ("x", "n", "scale", "B", "A")]
    def run(self, *arguments, grid, warmup, **options):
        analysed.append(arguments)
        return Form(len(analysed))

kernel = quick_launch(Jitted())
memory = torch.zeros(64)
aligned, shifted = memory[:32], memory[1:32]

def launch(x, n, scale=0.5, **options):
    options = {"A": 1, "B": 2, "num_warps": 4, **options}
    kernel.run(x, n, scale, grid=(3, 2), warmup=False, **options)
    return len(analysed)

assert launch(aligned, 32) == 1
assert launch(memory[16:], 48, 0.25) == 1  # the same facts
form, grid, arguments = launched[-1]
assert (form, grid) == (1, (3, 2, 1))
assert arguments[0].data_ptr() == memory[16:].data_ptr()
assert arguments[1:] == (48, 0.25, 2, 1)  # constants in the kernel's order, options left out
assert launch(shifted, 32) == 2
assert launch(aligned, 33) == 3
assert launch(aligned, 1) == 4
assert launch(aligned, 1 << 40) == 5
assert launch(aligned.to(torch.bfloat16), 32) == 6
assert launch(aligned, 32, A=5) == 7
assert launch(aligned, 32, num_warps=8) == 8
assert launch(None, 32) == 9
assert launch(aligned, 32) == 9
assert launched[-1][0] == 1
print("ok")
"""


def test_a_launch_with_known_facts_skips_the_analysis_and_others_do_not() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "ok\n", done.stderr[-2000:]
