# SPDX-License-Identifier: Apache-2.0
"""An agent's conversation that was pushed out of the device, or outlived its engine.

The scripted model reads every token's id and position back from its page: KV that came back from
a lower tier wrong, or in the wrong place, would fail the agent's next turn.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

from tests.agents.conftest import Json, ScriptedAppliance
from tests.agents.running_agents import Agent
from tests.fakes.scripted_answers import Turn

READY_WAIT_S = 60.0
NUM_TURNS = 2


def goes_on(served: ScriptedAppliance, agent: Agent, name: str) -> tuple[Json, Json]:
    """Two more turns of the agent's conversation: what the server says of the first, and its
    model's record of it."""
    mark = served.scenario(name, [Turn(commands=(f"echo seen-{name}",)), Turn(text="Done.")])
    run = agent.run(f"Go on. {mark}", goes_on=name != "moored")
    assert run.code == 0, run.output
    asked = served.asked(name)
    assert len(asked) == NUM_TURNS and f"seen-{name}" in asked[1]["said_last"]
    return served.last_session()["recent"][-NUM_TURNS], asked[0]


def crowd_out(served: ScriptedAppliance) -> None:
    """Fill the device pool with other text."""
    for place in range(2):
        text = "\n".join(f"{place} {line:06d} other words" for line in range(2400))
        body = {"model": "default", "messages": [{"role": "user", "content": text}]}
        reply = served.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] > 20_000


def kill_engine(served: ScriptedAppliance) -> None:
    before = json.loads(served.state.read_text())
    os.kill(before["pids"]["engine"], signal.SIGKILL)
    deadline = time.monotonic() + READY_WAIT_S
    while True:
        now = json.loads(served.state.read_text())
        is_new = now["restarts"]["engine"] > before["restarts"]["engine"]
        if is_new and served.http.get("/ready").status_code == 200:
            return
        assert time.monotonic() < deadline, served.log.read_text()[-3000:]
        time.sleep(0.1)


def test_a_conversation_comes_back_from_lower_tiers(
    served_small: ScriptedAppliance, agent_at: Callable[[str, str, str], Agent]
) -> None:
    agent = agent_at("claude", served_small.url, "agent")
    _, first = goes_on(served_small, agent, "moored")
    assert first["num_prompt"] > 15_000
    crowd_out(served_small)
    said, record = goes_on(served_small, agent, "crowded-out")
    assert said["usage"]["x_cache"]["l2"] > 0.9 * first["num_prompt"], said
    assert record["num_cached"] >= 0.95 * record["num_prompt"]
    kill_engine(served_small)
    said, record = goes_on(served_small, agent, "killed")
    below = said["usage"]["x_cache"]["l2"] + said["usage"]["x_cache"]["l3"]
    assert below > 0.9 * first["num_prompt"], said
    assert record["num_cached"] >= 0.95 * record["num_prompt"]
