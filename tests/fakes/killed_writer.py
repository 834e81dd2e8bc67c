# SPDX-License-Identifier: Apache-2.0
"""Runs `append_loop` in a process of its own and kills it with SIGKILL while it writes."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

from sessions.config import SessionsConfig

_ROOT = Path(__file__).resolve().parents[2]


def acknowledged_until_killed(
    config: SessionsConfig, seed: int, *, max_turns: int = 40
) -> tuple[str, list[str]]:
    """The session and the turns a writer saw acknowledged before it died, in order."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.append_loop", json.dumps(dataclasses.asdict(config))],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    session_id = writer.stdout.readline().strip()
    num_turns = random.Random(seed).randint(1, max_turns)
    turn_ids = [writer.stdout.readline().strip() for _ in range(num_turns)]
    writer.kill()
    # What it still printed before the signal reached it was acknowledged too.
    turn_ids += [line.strip() for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    return session_id, turn_ids
