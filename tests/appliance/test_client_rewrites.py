# SPDX-License-Identifier: Apache-2.0
"""However a client writes a history back, the server's own tokens stand in the next prompt."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.appliance import Json, RunningApp, ids_of, says

ARGUMENTS = (
    '{ "text":"\\u00e9 \\"q\\" \\\\ \\ud83d\\ude00\\n\\t<b>","whole": 3.0 ,"big":1e2,"none":null,'
    '"list":[ 1,2.50,true ],"deep":{"z":{},"a":[ ]}}'
)
CALLS = f'[{{"name": "put", "arguments": {ARGUMENTS}}}, {{"name": "ls", "arguments": {{}}}}]'
ANSWER = f" I look.\n\n<tool_call>{CALLS}</tool_call>"
SCHEMA: Json = {"type": "object", "additionalProperties": True}
NAMES = ("put", "ls")
numbers = itertools.count()


def verbatim(arguments: str) -> str:
    return arguments


def as_python(arguments: str) -> str:
    return json.dumps(json.loads(arguments))


def as_javascript(arguments: str) -> str:
    """Compact, not escaped, and numbers as doubles print."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps(plain(json.loads(arguments)), separators=(",", ":"), ensure_ascii=False)


WRITERS: tuple[Callable[[str], str], ...] = (verbatim, as_python, as_javascript)


def check_recalled(app: RunningApp, name: str) -> None:
    """Every turn began with all tokens of the turn before and of its answer."""
    recent = app.get(f"/v1/implicit_sessions/{name}").json()["recent"]
    assert len(recent) == 3
    num_sampled = len(ids_of(ANSWER)) + 1
    for before, after in itertools.pairwise(recent):
        known = before["usage"]["input_tokens"] + num_sampled
        assert after["usage"]["recalled_tokens"] == known, after
        assert after["branches_at"] is None


def fresh_name(app: RunningApp) -> str:
    app.engine.script = says(ANSWER)
    return f"rewrites-{next(numbers)}"


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("content", ["same", "stripped", "parts"])
def test_chat_clients(app: RunningApp, write: Callable[[str], str], content: str) -> None:
    name = fresh_name(app)
    history: list[Json] = [{"role": "user", "content": f"chat {name}"}]
    tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]
    for _ in range(3):
        body = {"model": "default", "messages": history, "tools": tools}
        reply = app.post("/v1/chat/completions", body, headers={"x-session-affinity": name})
        message = reply.json()["choices"][0]["message"]
        text = message["content"]
        shaped: Json = {
            "same": message,
            "stripped": {"role": "assistant", "content": text.strip(), "refusal": None},
            "parts": {"role": "assistant", "content": [{"type": "text", "text": text}]},
        }[content]
        calls = [
            {
                "id": call["id"],
                "index": index,
                "type": "function",
                "function": {**call["function"], "arguments": write(call["function"]["arguments"])},
            }
            for index, call in enumerate(message["tool_calls"])
        ]
        history.append({**shaped, "tool_calls": calls})
        history += [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in calls]
    check_recalled(app, name)


def test_chat_clients_without_text_send_null_or_nothing(app: RunningApp) -> None:
    only_calls = ANSWER[ANSWER.index("<") :]
    for content in ({"content": None}, {"content": ""}, {}):
        name = fresh_name(app)
        app.engine.script = says(only_calls)
        user = {"role": "user", "content": f"chat {name}"}
        tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]
        body: Json = {"model": "default", "messages": [user], "tools": tools}
        headers = {"x-session-id": name}
        reply = app.post("/v1/chat/completions", body, headers=headers)
        calls = reply.json()["choices"][0]["message"]["tool_calls"]
        body["messages"] = [user, {"role": "assistant", "tool_calls": calls, **content}]
        body["messages"] += [
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "x"}]}
            for call in calls
        ]
        assert app.post("/v1/chat/completions", body, headers=headers).is_success
        recent = app.get(f"/v1/implicit_sessions/{name}").json()["recent"]
        assert recent[1]["recalled_messages"] == 2, content


def test_messages_clients(app: RunningApp) -> None:
    """Cache markers move, a header changes each time, results come as blocks."""
    name = fresh_name(app)
    history: list[Json] = [{"role": "user", "content": f"messages {name}"}]
    for turn in range(3):
        marked = [dict(message) for message in history]
        if isinstance(marked[-1]["content"], list):
            marker = {"cache_control": {"type": "ephemeral", "ttl": f"{turn}m"}}
            last = marked[-1]["content"]
            marked[-1]["content"] = [*last[:-1], {**last[-1], **marker}]
        billing = f"x-anthropic-billing-header: cc_version=1; cch={turn:05x};"
        body: Json = {
            "model": "default",
            "max_tokens": 500,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": "Be brief."}],
            "messages": marked,
            "tools": [{"name": n, "input_schema": SCHEMA} for n in NAMES],
            "metadata": {"user_id": json.dumps({"session_id": name, "device_id": str(turn)})},
        }
        reply = app.post("/v1/messages?beta=true", body)
        assert reply.status_code == 200, reply.text
        content = reply.json()["content"]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": [{"type": "text", "text": "ok"}],
            }
            for block in content
            if block["type"] == "tool_use"
        ]
        history += [
            {"role": "assistant", "content": json.loads(as_javascript(json.dumps(content)))},
            {"role": "user", "content": results},
        ]
    check_recalled(app, name)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("keeps_ids", [True, False])
def test_responses_clients(app: RunningApp, write: Callable[[str], str], keeps_ids: bool) -> None:
    name = fresh_name(app)
    items: list[Json] = [{"role": "user", "content": f"responses {name}"}]
    tools = [{"type": "function", "name": n, "parameters": SCHEMA, "strict": False} for n in NAMES]
    for turn in range(3):
        body = {
            "model": "default",
            "instructions": "Be brief.",
            "input": items,
            "tools": [*tools, {"type": "web_search"}],
            "store": False,
            "prompt_cache_key": name,
            "client_metadata": {"turn": str(turn)},
        }
        reply = app.post("/v1/responses", body)
        assert reply.status_code == 200, reply.text
        for item in reply.json()["output"]:
            if item["type"] == "function_call":
                item["arguments"] = write(item["arguments"])
            if not keeps_ids:
                item = {k: v for k, v in item.items() if k not in ("id", "status")}
            items.append(item)
        items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
            for item in items[-2:]
        ]
    check_recalled(app, name)
