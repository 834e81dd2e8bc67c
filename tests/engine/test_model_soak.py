# SPDX-License-Identifier: Apache-2.0
"""The soak of a real model passes here, and finds pages that hold another history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.model_soak import ModelRun
from engine.execution import device_launcher

SEEDS = (100, 101, 102)


@pytest.mark.parametrize("is_usual", [False, True])
def test_a_run_of_the_soak_ends_with_every_token_right(tmp_path: Path, is_usual: bool) -> None:
    run = ModelRun(SEEDS[0], tmp_path, "cpu", is_usual)
    run.run()
    assert run.num_tokens > 0
    assert sum(watch.num_steps for watch in run.watches) > 0
    assert bool(run.gaps) == is_usual


def test_the_soak_finds_copies_that_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(seed: int) -> Any:
        (tmp_path / str(seed)).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(device_launcher, "copy_pages", lambda pool, copies: None)
            try:
                ModelRun(seed, tmp_path / str(seed), "cpu", False).run()
            except AssertionError as error:
                return error
        return None

    assert any(found(seed) for seed in SEEDS)
