# SPDX-License-Identifier: Apache-2.0
"""What agents do beside their turns, against the same server: looks, counts, titles, long texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.agents.conftest import Json, ScriptedAppliance
from tests.agents.running_agents import Agent
from tests.fakes.scripted_answers import SIDE_ANSWER, Turn
from tests.fakes.scripted_model_serve import CONTEXT_LEN

SHELL: Json = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOL: Json = {"type": "function", "function": {"name": "bash", "parameters": SHELL}}
NUM_TITLES = 8


def post(served: ScriptedAppliance, path: str, body: Json, **headers: str) -> Json:
    reply = served.http.post(path, json={"model": "default", **body}, headers=headers)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def chat(served: ScriptedAppliance, name: str, messages: list[Json], **fields: Any) -> Json:
    body = {"messages": messages, **fields}
    return post(served, "/v1/chat/completions", body, **{"x-session-id": name})


def gone_on(messages: list[Json], answer: Json, output: str) -> list[Json]:
    """The history as a client sends it back, a result behind the call of the answer."""
    message = answer["choices"][0]["message"]
    call = message["tool_calls"][0]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    call = {**call, "function": {**call["function"], "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": output}
    return [*messages, {**message, "tool_calls": [call]}, result]


def share(usage: Json) -> float:
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_agents_find_the_server_and_its_model(served: ScriptedAppliance) -> None:
    assert served.http.head("/").status_code == 200
    models = served.http.get("/v1/models").json()["data"]
    assert "default" in [model["id"] for model in models]
    assert served.http.get("/v1/models/default").json()["max_model_len"] == CONTEXT_LEN
    assert CONTEXT_LEN >= 128 * 1024


def test_counted_tokens_are_those_a_request_then_has(served: ScriptedAppliance) -> None:
    body: Json = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0a1b2;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": "How many tokens are these?"}],
        "tools": [{"name": "Bash", "input_schema": SHELL}],
    }
    counted = post(served, "/v1/messages/count_tokens", body)["input_tokens"]
    usage = post(served, "/v1/messages?beta=true", {**body, "max_tokens": 50})["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_titles_asked_for_at_the_same_time_leave_a_conversation_cached(
    served: ScriptedAppliance,
) -> None:
    turns = [Turn(commands=(f"echo {index}",)) for index in range(4)]
    mark = served.scenario("beside-titles", turns)
    messages: list[Json] = [
        {"role": "system", "content": "You work in a shell. " * 100},
        {"role": "user", "content": f"Do it. {mark}"},
    ]

    def title(index: int) -> str:
        asked = [
            {"role": "system", "content": "You write titles."},
            {"role": "user", "content": f"Title number {index} for: {mark}"},
        ]
        answer = chat(served, "busy", asked)
        return str(answer["choices"][0]["message"]["content"])

    shares = []
    with ThreadPoolExecutor(NUM_TITLES) as pool:
        for turn in range(4):
            titles = [pool.submit(title, index) for index in range(NUM_TITLES)]
            answer = chat(served, "busy", messages, tools=[CHAT_TOOL])
            shares.append(share(answer["usage"]))
            messages = gone_on(messages, answer, f"{turn}\n")
            assert {done.result() for done in titles} == {SIDE_ANSWER}
    assert min(shares[1:]) >= 0.95, shares
    session = served.http.get("/v1/implicit_sessions/busy").json()
    assert session["branches"] == 1 + NUM_TITLES
    assert session["requests"] == 4 + 4 * NUM_TITLES


def test_a_conversation_of_more_than_128k_tokens_is_cached(served: ScriptedAppliance) -> None:
    mark = served.scenario("long", [Turn(commands=("cat log",)), Turn(text="A long log.")])
    messages: list[Json] = [{"role": "user", "content": f"Read the log. {mark}"}]
    answer = chat(served, "long", messages, tools=[CHAT_TOOL])
    lines = [f"{line:06d} the tide is {line * 7919 % 1000} cm" for line in range(9000)]
    messages = gone_on(messages, answer, "\n".join(lines))
    answer = chat(served, "long", messages, tools=[CHAT_TOOL])
    assert answer["usage"]["prompt_tokens"] > 128 * 1024
    message = answer["choices"][0]["message"]
    messages = [*messages, message, {"role": "user", "content": "Thank you."}]
    answer = chat(served, "long", messages, tools=[CHAT_TOOL])
    assert share(answer["usage"]) > 0.99


def test_agents_that_run_at_the_same_time_get_their_own_answers(
    served: ScriptedAppliance, agent_at: Callable[[str, str, str], Agent]
) -> None:
    runs: dict[str, Any] = {}
    threads = []
    for place, name in enumerate(("codex", "claude", "codex")):
        mark = served.scenario(
            f"together-{place}",
            [Turn(commands=(f"echo is-{place} > own.txt",)), Turn(text=f"Done {place}.")],
        )
        agent = agent_at(name, served.url, f"agent-{place}")

        def work(agent: Agent = agent, mark: str = mark, place: int = place) -> None:
            runs[f"{place}"] = (agent, agent.run(f"Do it. {mark}"))

        threads.append(threading.Thread(target=work))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for place in range(3):
        agent, run = runs[f"{place}"]
        assert run.code == 0 and f"Done {place}." in run.output, run.output
        assert (agent.work / "own.txt").read_text() == f"is-{place}\n"
        assert len(served.asked(f"together-{place}")) == 2
