# SPDX-License-Identifier: Apache-2.0
"""Agents on models of other families: the model writes otherwise, the agents get the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.agents.conftest import ScriptedAppliance
from tests.agents.running_agents import Agent
from tests.fakes.scripted_answers import Turn


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_calls_as_tagged_parameters_reach_an_agent_as_its_schema_says(
    served_family: ScriptedAppliance, agent_at: Callable[[str, str, str], Agent], name: str
) -> None:
    text = "1 < 2 && 'x' \"q\" \\\\ é"
    agent = agent_at(name, served_family.url, "agent")
    typed = {  # a boolean and a number among the strings
        "codex": ("exec_command", {"cmd": "echo typed", "tty": False, "yield_time_ms": 2000}),
        "claude": ("Bash", {"command": "echo typed", "timeout": 2000, "run_in_background": False}),
    }[name]
    mark = served_family.scenario(
        f"family-{name}",
        [
            Turn(text="First:", commands=(f"cat > f.txt <<'END'\n{text}\n\nlast\nEND",)),
            Turn(calls=(typed,)),
            Turn(commands=("cat f.txt",)),
            Turn(text="Done."),
        ],
    )
    run = agent.run(f"Do it. {mark}")
    assert run.code == 0, run.output
    assert (agent.work / "f.txt").read_text() == f"{text}\n\nlast\n"
    asked = served_family.asked(f"family-{name}")
    assert "typed" in asked[2]["said_last"] and text in asked[3]["said_last"]
    for before, after in zip(asked, asked[1:], strict=False):
        known = before["num_prompt"] + before["num_answer"]
        assert after["num_cached"] >= 0.99 * known, (before, after)
