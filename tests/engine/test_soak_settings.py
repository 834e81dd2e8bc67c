# SPDX-License-Identifier: Apache-2.0
"""What the soak of the engine draws reaches the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.soak.engine_soak import Run, Setting
from engine.loop.event_loop import RunAhead


def test_runs_differ_in_what_a_lone_prompt_gets(tmp_path: Path) -> None:
    settings = [Setting(seed, overlap_loads=False) for seed in range(60)]
    wide = [s.seed for s in settings if s.lone_token_budget > s.token_budget]
    assert 15 < len(wide) < 45
    run = Run(wide[0], tmp_path, overlap_loads=False)
    config, setting = run.engine.config, settings[wide[0]]
    assert config.tokens_per_step("cpu") == setting.token_budget
    assert config.tokens_per_lone_step("cpu") == setting.lone_token_budget
    run.plain.close()
    os.close(run.l2_fd)


def test_runs_differ_in_when_a_step_gets_its_successor(tmp_path: Path) -> None:
    """Steps of the soak's model are too short for what serves: nearly all runs draw less."""
    ways = [Setting(seed, overlap_loads=False).run_ahead for seed in range(60)]
    assert RunAhead() in ways and len(set(ways)) >= 4
    short = [way for way in ways if way.tokens < 4 and way.timed_tokens <= 4]
    assert len(short) > 30
    for number, seed in enumerate((ways.index(short[0]), ways.index(RunAhead()))):
        (tmp_path / str(number)).mkdir()
        run = Run(seed, tmp_path / str(number), overlap_loads=False)
        with run.engine:
            assert run.engine.server._loop.run_ahead == ways[seed]
        run.dump(tmp_path / "dump.json")
        assert json.loads((tmp_path / "dump.json").read_text())["setting"]["seed"] == seed
        run.plain.close()
        os.close(run.l2_fd)
