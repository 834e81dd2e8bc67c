# SPDX-License-Identifier: Apache-2.0
"""What a step made goes when the step ends, not when garbage is collected: on a GPU a prefill's
scratch is a gigabyte, and collections come by the number of objects, not by their bytes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from kernels.selection import set_override
from kernels.step_work import StepWork
from tests.engine.test_prefill_pieces import _ids, _runner
from tests.fakes.paged_driver import PagedDriver


def num_alive(kind: type) -> int:
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("form", ["expanded", "absorbed", None])
def test_steps_leave_no_tensors_behind(tmp_path: Path, pieces: bool, form: str | None) -> None:
    runner = _runner(tmp_path, pieces=pieces)
    driver = PagedDriver(runner, seed=1)
    rows = [driver.open(slot) for slot in range(4)]

    def run_steps() -> None:
        driver.step([(rows[0], _ids(20, 1)), (rows[1], _ids(9, 2))])
        driver.step([(rows[2], _ids(12, 3)), (rows[0], [5]), (rows[1], [6])])
        driver.step([(rows[3], _ids(7, 4))])
        driver.step([(rows[0], [1]), (rows[2], [2])])

    set_override("mla_prefill_form", form)
    try:
        run_steps()  # what is kept for good comes once
        gc.collect()
        gc.disable()
        before = num_alive(torch.Tensor)
        for _ in range(3):
            run_steps()
        assert num_alive(StepWork) == 0
        assert num_alive(torch.Tensor) <= before
    finally:
        gc.enable()
        set_override("mla_prefill_form", None)
