# SPDX-License-Identifier: Apache-2.0
"""Runs `append_loop` in a process of its own and kills it with SIGKILL while it writes."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from sessions.config import SessionsConfig

_ROOT = Path(__file__).resolve().parents[2]


def acknowledged_until_killed(
    config: SessionsConfig, seed: int, *, max_turns: int = 80, num_sessions: int = 4
) -> dict[str, list[str]]:
    """The turns a writer saw acknowledged before it died, in order, by session."""
    arguments = [json.dumps(dataclasses.asdict(config)), str(num_sessions)]
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.append_loop", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    num_turns = random.Random(seed).randint(1, max_turns)
    lines = [writer.stdout.readline() for _ in range(num_turns)]
    writer.kill()
    # What it still printed before the signal reached it was acknowledged too.
    lines += [line for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    acknowledged: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        session_id, turn_id = line.split()
        acknowledged[session_id].append(turn_id)
    return acknowledged
