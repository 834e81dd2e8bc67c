# SPDX-License-Identifier: Apache-2.0
"""What of a history may be written otherwise and is still the same, and what may not."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.appliance import Json, RunningApp, ids_of, says
from tests.fakes.prompts import prompt_text
from tests.fakes.thinking_assets import thinking_assets

ARGUMENTS = (
    '{"text": "caf\\u00e9 \\/ a", "n": 1, "on": true, "of": null, "list": [1, 2], "d": {"k": 0}}'
)
THOUGHT = "Where to?\n</think>\n\n"
SAID = "I look. "
CALL = f'<tool_call>\n{{"name": "put", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"{THOUGHT}{SAID}{CALL}"
SCHEMA: Json = {"type": "object", "additionalProperties": True}
numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    with RunningApp(tmp_path_factory.mktemp("c"), assets=thinking_assets()) as running:
        yield running


@pytest.fixture
def app(shared_thinker: RunningApp) -> RunningApp:
    shared_thinker.engine.script = says(ANSWER)
    return shared_thinker


def asked(app: RunningApp, path: str, name: str, body: Json) -> Json:
    """The answer, and what the implicit session says of the request."""
    reply = app.post(path, {"model": "default", **body}, headers={"x-session-id": name})
    assert reply.status_code == 200, reply.text
    answer = dict(reply.json())
    answer["asked"] = app.get(f"/v1/implicit_sessions/{name}").json()["recent"][-1]
    return answer


def chat_history(app: RunningApp, name: str) -> list[Json]:
    """A conversation that was answered, and the result of its call."""
    tools = [{"type": "function", "function": {"name": "put", "parameters": SCHEMA}}]
    history: list[Json] = [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": f"Put it  there, {name}"},
    ]
    answer = asked(app, "/v1/chat/completions", name, {"messages": history, "tools": tools})
    message = answer["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    return [*history, message, {"role": "tool", "tool_call_id": call_id, "content": " ok\n"}]


def gone_on(app: RunningApp, name: str, history: list[Json]) -> Json:
    tools = [{"type": "function", "function": {"name": "put", "parameters": SCHEMA}}]
    body = {"messages": history, "tools": tools}
    return dict(asked(app, "/v1/chat/completions", name, body)["asked"])


def with_arguments(change: Callable[[Json], Any]) -> Callable[[list[Json]], None]:
    """A history whose call has other arguments."""

    def edit(history: list[Json]) -> None:
        function = history[2]["tool_calls"][0]["function"]
        arguments = json.loads(function["arguments"])
        changed = change(arguments)
        changed = arguments if changed is None else changed
        function["arguments"] = changed if isinstance(changed, str) else json.dumps(changed)

    return edit


def with_field(index: int, **fields: Any) -> Callable[[list[Json]], None]:
    return lambda history: history[index].update(fields)


def without_reasoning(history: list[Json]) -> None:
    del history[2]["reasoning_content"]


SAME: dict[str, Callable[[list[Json]], Any]] = {
    "verbatim": lambda history: None,
    "reasoning dropped": without_reasoning,
    "reasoning changed": with_field(2, reasoning_content="Elsewhere."),
    "reasoning under its other name": with_field(2, reasoning_content=None, reasoning="Where to?"),
    "text stripped": with_field(2, content=SAID.strip()),
    "text in parts": with_field(
        2, content=[{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]
    ),
    "cache markers": with_field(
        1, content=[{"type": "text", "text": "Put it  there, NAME", "cache_control": {"x": 1}}]
    ),
    "unicode as it is": with_arguments(lambda a: json.dumps(a, ensure_ascii=False)),
    "unicode escaped": with_arguments(lambda a: json.dumps(a).replace("a", "\\u0061", 1)),
    "no blanks": with_arguments(lambda a: json.dumps(a, separators=(",", ":"))),
    "indented": with_arguments(lambda a: json.dumps(a, indent=2)),
    "keys sorted": with_arguments(lambda a: json.dumps(a, sort_keys=True)),
    "doubles": with_arguments(lambda a: json.dumps({**a, "n": 1.0, "list": [1.0, 2e0]})),
    "extra fields": with_field(2, refusal=None, annotations=[], name="x"),
}
OTHER: dict[str, tuple[int, Callable[[list[Json]], Any]]] = {
    "a blank behind the user's text": (1, with_field(1, content="Put it  there, NAME ")),
    "a blank in front of it": (1, with_field(1, content=" Put it  there, NAME")),
    "a blank less in it": (1, with_field(1, content="Put it there, NAME")),
    "a line less in the system's": (0, with_field(0, content="Be brief.")),
    "a result without its blank": (3, with_field(3, content="ok\n")),
    "a result in another form": (3, with_field(3, content=[{"type": "text", "text": "ok"}])),
    "another letter in the text": (2, with_field(2, content="I Look.")),
    "two blanks in the text": (2, with_field(2, content="I  look.")),
    "an accent composed otherwise": (2, with_arguments(lambda a: a.update(text="cafe\u0301 / a"))),
    "a blank in an argument": (2, with_arguments(lambda a: a.update(text=a["text"] + " "))),
    "a number as text": (2, with_arguments(lambda a: a.update(n="1"))),
    "a number as truth": (2, with_arguments(lambda a: a.update(n=True))),
    "a truth as number": (2, with_arguments(lambda a: a.update(on=1))),
    "a null left out": (2, with_arguments(lambda a: (a.pop("of"), None)[1])),
    "a list turned round": (2, with_arguments(lambda a: a.update(list=[2, 1]))),
    "a key more": (2, with_arguments(lambda a: a["d"].update(x=1))),
    "arguments that are no JSON": (2, with_arguments(lambda a: json.dumps(a)[:-1])),
    "arguments twice encoded": (2, with_arguments(lambda a: json.dumps(json.dumps(a)))),
    "a call less": (2, with_field(2, tool_calls=None)),
}


def named(history: list[Json], name: str) -> None:
    text = json.dumps(history[1]).replace("NAME", name)
    history[1] = json.loads(text)


@pytest.mark.parametrize("change", SAME)
def test_what_is_only_written_otherwise_is_the_same_prefix(app: RunningApp, change: str) -> None:
    name = f"same-{next(numbers)}"
    history = chat_history(app, name)
    first = app.get(f"/v1/implicit_sessions/{name}").json()["recent"][-1]
    SAME[change](history)
    named(history, name)
    found = gone_on(app, name, history)
    assert (found["known_messages"], found["branches_at"]) == (2, None)
    assert found["recalled_messages"] == 3
    known = first["usage"]["input_tokens"] + len(ids_of(ANSWER)) + 1
    assert found["usage"]["recalled_tokens"] == known
    assert found["usage"]["cached_tokens"] >= 0.99 * known
    assert CALL in prompt_text(app)  # byte for byte, as it was sampled


@pytest.mark.parametrize("change", OTHER)
def test_what_says_something_else_is_another_branch_from_there_on(
    app: RunningApp, change: str
) -> None:
    name = f"other-{next(numbers)}"
    history = chat_history(app, name)
    gone_on(app, name, copy.deepcopy(history))  # the branch that is there
    index, edit = OTHER[change]
    edit(history)
    named(history, name)
    found = gone_on(app, name, history)
    assert (found["known_messages"], found["branches_at"]) == (index, index)
    assert found["recalled_messages"] == (3 if index > 2 else 0)
    if index < 2:
        assert history[index]["content"] in prompt_text(app)


def test_other_tools_are_another_conversation(app: RunningApp) -> None:
    name = f"tools-{next(numbers)}"
    history = chat_history(app, name)
    tools = [{"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}]
    body = {"messages": history, "tools": tools}
    found = asked(app, "/v1/chat/completions", name, body)["asked"]
    assert (found["recalled_messages"], found["known_messages"]) == (0, 0)


def test_messages_without_their_thinking_are_the_same(app: RunningApp) -> None:
    name = f"messages-{next(numbers)}"
    user = {"role": "user", "content": f"there, {name}"}
    base: Json = {"max_tokens": 500, "tools": [{"name": "put", "input_schema": SCHEMA}]}
    content = asked(app, "/v1/messages", name, {**base, "messages": [user]})["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert content[0]["signature"].startswith("moorage.v1.")
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "ok"}
    for kept in (content, content[1:], [{**content[0], "thinking": "Else."}, *content[1:]],
                 [{"type": "redacted_thinking", "data": "x"}, *content[1:]]):  # fmt: skip
        history = [
            user,
            {"role": "assistant", "content": kept},
            {"role": "user", "content": [result]},
        ]
        found = asked(app, "/v1/messages", name, {**base, "messages": history})["asked"]
        assert found["recalled_messages"] == 2, kept


def test_responses_without_their_reasoning_are_the_same(app: RunningApp) -> None:
    name = f"responses-{next(numbers)}"
    user = {"role": "user", "content": f"there, {name}"}
    tools = [{"type": "function", "name": "put", "parameters": SCHEMA}]
    base: Json = {"tools": tools, "store": False, "include": ["reasoning.encrypted_content"]}
    output = asked(app, "/v1/responses", name, {**base, "input": [user]})["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "ok"}
    sealed = {**output[0], "content": []}
    for kept in (output, output[1:], [sealed, *output[1:]]):
        found = asked(app, "/v1/responses", name, {**base, "input": [user, *kept, result]})
        assert found["asked"]["recalled_messages"] == 2, kept


def test_the_first_of_the_names_a_client_sends_is_its_conversation_s(app: RunningApp) -> None:
    order = (
        "x-session-id",
        "x-session-affinity",
        "x-affinity",
        "session-id",
        "x-claude-code-session-id",
        "x-litellm-session-id",
        "prompt_cache_key",
        "metadata",
    )
    for place in range(len(order)):
        sent = order[place:]
        headers = {name: f"by-{name}" for name in sent if name.startswith(("x-", "session"))}
        body: Json = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
        if "prompt_cache_key" in sent:
            body["prompt_cache_key"] = "by-prompt_cache_key"
        body["metadata"] = {"user_id": json.dumps({"session_id": "by-metadata"})}
        reply = app.post("/v1/chat/completions", body, headers=headers)
        assert reply.headers["x-session-id"] == f"by-{sent[0]}"
