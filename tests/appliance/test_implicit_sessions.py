# SPDX-License-Identifier: Apache-2.0
"""Requests of one name are a tree of prefixes: what each shared, and where it branched off."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from appliance.implicit_sessions import MAX_MESSAGES, ImplicitSessions, SessionName
from tests.fakes.appliance import Json, RunningApp, ids_of, says

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "ls",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
ANSWER = 'I look.\n <tool_call>[{"name": "ls", "arguments": {  "path":"a" }}]</tool_call>'


def chat(app: RunningApp, name: str, messages: list[Json], **fields: Any) -> Json:
    body = {"model": "default", "messages": messages, **fields}
    reply = app.post("/v1/chat/completions", body, headers={"x-session-id": name} if name else {})
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0]["message"])


def run_turns(app: RunningApp, name: str, num_turns: int, between: Any = None) -> list[Json]:
    """An agent's turns: its calls re-serialised, a result behind each of them."""
    app.engine.script = says(ANSWER)
    history: list[Json] = [
        {"role": "system", "content": "You list files. " * 40},
        {"role": "user", "content": f"Look, {name}"},
    ]
    for _ in range(num_turns):
        message = chat(app, name, history, tools=[TOOL])
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        history += [message, result]
        if between is not None:
            between()
    return history


def shown(app: RunningApp, name: str) -> Json:
    reply = app.get(f"/v1/implicit_sessions/{name}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_each_turn_recalls_all_that_was_there_before_it(app: RunningApp) -> None:
    run_turns(app, "turns", 4)
    session = shown(app, "turns")
    assert (session["named_by"], session["requests"], session["branches"]) == ("client", 4, 1)
    recent = session["recent"]
    assert [asked["messages"] for asked in recent] == [2, 4, 6, 8]
    assert [asked["known_messages"] for asked in recent] == [0, 2, 4, 6]
    assert [asked["recalled_messages"] for asked in recent] == [0, 3, 5, 7]
    assert all(asked["branches_at"] is None for asked in recent)
    num_sampled = len(ids_of(ANSWER)) + 1
    for before, after in zip(recent, recent[1:], strict=False):
        known = before["usage"]["input_tokens"] + num_sampled
        assert after["usage"]["recalled_tokens"] == known
        assert after["usage"]["cached_tokens"] >= 0.99 * known
        assert sum(after["usage"]["x_cache"].values()) == after["usage"]["cached_tokens"]
        assert after["finish_reason"] == "tool_calls"


def test_title_requests_of_the_same_name_are_branches_that_disturb_nothing(
    app: RunningApp,
) -> None:
    def title(index: int) -> None:
        asked = [
            {"role": "system", "content": "You write titles."},
            {"role": "user", "content": f"A title for text {index}"},
        ]
        chat(app, "titled", asked)

    def titles() -> None:
        app.engine.script = says("A title")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(title, range(4)))
        app.engine.script = says(ANSWER)

    run_turns(app, "titled", 3, between=titles)
    session = shown(app, "titled")
    turns = [asked for asked in session["recent"] if asked["messages"] > 2]
    assert [asked["recalled_messages"] for asked in turns] == [3, 5]
    assert all(asked["branches_at"] is None for asked in turns)
    assert session["requests"] == 3 + 12
    assert session["branches"] == 1 + 4  # the same four titles each time
    assert app.engine.leases == {}


def test_a_history_that_was_changed_branches_at_the_changed_message(app: RunningApp) -> None:
    history = run_turns(app, "edited", 2)
    history[3] = {**history[3], "content": "[cleared]"}
    chat(app, "edited", history, tools=[TOOL])
    last = shown(app, "edited")["recent"][-1]
    assert (last["known_messages"], last["branches_at"]) == (3, 3)
    assert last["recalled_messages"] == 3  # up to the call whose result was cleared
    chat(app, "edited", [*history, {"role": "user", "content": "go on"}], tools=[TOOL])
    assert shown(app, "edited")["recent"][-1]["known_messages"] == len(history)


def test_a_client_without_a_name_is_told_by_how_its_conversation_begins(app: RunningApp) -> None:
    run_turns(app, "", 3)
    found = [s for s in app.get("/v1/implicit_sessions").json()["data"] if s["requests"] == 3]
    assert found[0]["named_by"] == "opening" and found[0]["branches"] == 1
    assert shown(app, found[0]["name"])["recent"][-1]["recalled_messages"] == 5


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_the_other_dialects_have_implicit_sessions_too(app: RunningApp, path: str) -> None:
    user = [{"role": "user", "content": "Hi"}]
    body: Json = {"model": "default", "max_tokens": 9, "messages": user, "input": "Hi"}
    for stream in (False, True):
        headers = {"session-id": f"by-{path}"}
        assert app.post(f"/v1/{path}", {**body, "stream": stream}, headers=headers).is_success
    recent = shown(app, f"by-{path}")["recent"]
    assert [asked["known_messages"] for asked in recent] == [0, 1]
    assert recent[1]["usage"]["cached_tokens"] > 0


def test_a_sub_agent_with_a_name_of_its_own_says_whose_it_is(app: RunningApp) -> None:
    body: Json = {"model": "default", "messages": [{"role": "user", "content": "Look it up"}]}
    for parent, shown_as in (("turns", "turns"), ("two\tparts", None)):
        name = f"below-{shown_as}"
        headers = {"x-session-id": name, "x-parent-session-id": parent}
        assert app.post("/v1/chat/completions", body, headers=headers).is_success
        assert shown(app, name)["parent"] == shown_as


def test_a_name_that_never_came_is_not_found(app: RunningApp) -> None:
    reply = app.get("/v1/implicit_sessions/nobody")
    assert app.error(reply)[:2] == (404, "implicit_session_not_found")


def test_trees_and_their_number_are_bounded() -> None:
    known = ImplicitSessions(max_sessions=2)
    for index in range(5):
        known.take("t", SessionName(name=f"s{index}"), b"k", index)
    assert [session.name for session in known.list("t")] == ["s4", "s3"]
    assert known.list("other") == []
    session = known.take("t", SessionName(name="s4"), b"k", 9)
    for index in range(4):
        keys = [b"%d-%d" % (index, place) for place in range(MAX_MESSAGES // 3)]
        session.ask(f"r{index}", keys, 0, (0, 0))
    assert int(session.as_wire()["messages"]) <= MAX_MESSAGES
