# SPDX-License-Identifier: Apache-2.0
"""What the soak of the engine draws reaches the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.soak.engine_soak import Run, Setting
from engine.loop.event_loop import RunAhead


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
