# SPDX-License-Identifier: Apache-2.0
"""The compiled extension as a citizen of its process: threads, idleness, imports, levels."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.decoder_cases import decoder_cases
from kernels.verify import error_of

cpu = pytest.importorskip("kernels.cpu")
DECODE = next(case for case in decoder_cases() if case.name == "decode rows q4_1")


def test_a_number_of_threads_out_of_range_is_refused() -> None:
    for bad in (0, -1, 65):
        with pytest.raises(ValueError, match=rf"num_threads: got {bad}; allowed: 1 to 64"):
            cpu.set_num_threads(bad)


def test_an_unknown_level_is_refused() -> None:
    import _cpu_kernels

    logits = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="level: got 'avx10'"):
        _cpu_kernels.apply_bitmask(
            logits.numpy(), torch.zeros(1, 1, dtype=torch.int32).numpy(), "avx10"
        )


def _cpu_s_of_native_threads() -> float:
    """CPU time of the threads that are not Python's: those may be left by other tests."""
    own = {str(thread.native_id) for thread in threading.enumerate()}
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name not in own:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_idle_pool_burns_no_cpu() -> None:
    DECODE.run()
    time.sleep(0.05)
    before = _cpu_s_of_native_threads()
    time.sleep(0.5)
    assert _cpu_s_of_native_threads() - before < 0.1


def test_calls_from_several_threads_take_turns_and_agree() -> None:
    expected = DECODE.run()
    results: list[torch.Tensor] = []

    def work() -> None:
        results.extend(DECODE.run() for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    assert all(error_of(result, expected) == 0.0 for result in results)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_kernels_on_a_cpu_loads_neither_triton_nor_torch_compile() -> None:
    code = (
        "import kernels, sys; assert 'torch' not in sys.modules\n"
        "import kernels.ops\n"
        "print(sorted(n for n in ('triton', 'torch._dynamo') if n in sys.modules))"
    )
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: its kernels are loaded")
    assert run_python(code) == "[]"


def test_the_process_ends_cleanly_with_live_threads() -> None:
    code = (
        "from kernels.decoder_cases import decoder_cases\n"
        "import kernels.cpu; kernels.cpu.set_num_threads(3)\n"
        "decoder_cases()[0].run(); print('ended')"
    )
    assert run_python(code) == "ended"


def test_masked_tokens_are_never_the_argmax() -> None:
    logits = torch.arange(100.0).repeat(2, 1)
    mask = torch.zeros(2, 4, dtype=torch.int32)
    mask[0, 0] = 1 << 7
    mask[1, 1] = -(2**31)
    ops.apply_bitmask(logits, mask)
    assert ops.argmax(logits).tolist() == [7, 63]
