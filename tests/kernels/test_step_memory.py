# SPDX-License-Identifier: Apache-2.0
"""What a model says a token of a prefill step takes of memory, against what a step's operations
hold at once. The KV pool leaves that free for a larger step.

In a process of its own: kernels are chosen as on an H200, tensors have sizes and no bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class HeldBytes(TorchDispatchMode):
    """`most`: bytes that results of operations held at once while it lasted."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and each.device.type == "meta":
                storage = each.untyped_storage()
                held = (StorageWeakRef(storage), storage.nbytes())
                self._held.setdefault(storage._cdata, held)
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(num_bytes for _, num_bytes in self._held.values()))
        return result


def _bytes_per_token(shape: str, kv: str) -> tuple[float, int]:
    """(measured, told). Call it before Triton is imported."""
    from benchmarks.gpu.host_time import HostStep, prefill_rows
    from benchmarks.gpu.stub_device import stub_device

    most: list[int] = []
    with stub_device() as launches:
        step = HostStep(launches, shape, 2, kv)
        for num in (4096, 8192):  # of one context: its prefix is expanded in both
            rows = prefill_rows([(16384 - num, num)], 0)
            step.run(rows)
            with HeldBytes() as held:
                step.run(rows)
            most.append(held.most)
        return (most[1] - most[0]) / 4096, step._model.step_bytes_per_token


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_larger_step_holds_no_more_than_the_model_says(kv: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_step_memory", "v2-lite", kv],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured, told = json.loads(done.stdout)
    assert measured <= told <= 1.3 * measured


if __name__ == "__main__":
    print(json.dumps(_bytes_per_token(*sys.argv[1:])))
