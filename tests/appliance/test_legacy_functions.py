# SPDX-License-Identifier: Apache-2.0
"""Chat completions with `functions`, as clients older than `tools` send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes.appliance import Json, RunningApp, says
from tests.fakes.prompts import prompt_text

FUNCTION: Json = {
    "name": "ls",
    "description": "List a folder",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
CALL_TEXT = '<tool_call>[{"name": "ls", "arguments": {"path": "a"}}]</tool_call>'
USER: list[Any] = [{"role": "user", "content": "Hi"}]
CALLED = {"role": "assistant", "content": None,
          "function_call": {"name": "ls", "arguments": '{"path": "a"}'}}  # fmt: skip
PATH = "/v1/chat/completions"


@pytest.fixture
def client(app: RunningApp) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def test_a_call_comes_back_as_function_call_whole_and_streamed(
    app: RunningApp, client: Any
) -> None:
    app.engine.script = says(CALL_TEXT)
    ask = {"model": "default", "messages": USER, "functions": [FUNCTION]}
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.name == "ls"
    assert json.loads(choice.message.function_call.arguments) == {"path": "a"}
    name, arguments, ends = "", "", []
    for chunk in client.chat.completions.create(**ask, stream=True):
        delta = chunk.choices[0].delta
        assert delta.tool_calls is None
        if delta.function_call is not None:
            name += delta.function_call.name or ""
            arguments += delta.function_call.arguments or ""
        ends.append(chunk.choices[0].finish_reason)
    assert (name, json.loads(arguments), ends[-1]) == ("ls", {"path": "a"}, "function_call")


def test_text_ends_as_ever(app: RunningApp, client: Any) -> None:
    app.engine.script = says("Hello there.")
    ask = {"model": "default", "messages": USER, "functions": [FUNCTION]}
    choice = client.chat.completions.create(**ask, function_call="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there.", "stop")
    assert choice.message.function_call is None


def test_the_model_reads_what_it_reads_with_tools(app: RunningApp) -> None:
    """A round trip in the old spelling and in the new one is the same prompt and grammar."""
    call = {"id": "c", "type": "function", "function": CALLED["function_call"]}
    rest = {"model": "default", "max_tokens": 5}
    old = {
        "messages": [*USER, CALLED, {"role": "function", "name": "ls", "content": "x.py"}],
        "functions": [FUNCTION],
    }
    new = {
        "messages": [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x.py"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "parallel_tool_calls": False,
    }
    for choice_old, choice_new in (
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ({"name": "ls"}, {"type": "function", "function": {"name": "ls"}}),
    ):
        texts, grammars = [], []
        for body in (
            {**rest, **old, "function_call": choice_old},
            {**rest, **new, "tool_choice": choice_new},
        ):
            assert app.post(PATH, body).status_code == 200
            texts.append(prompt_text(app))
            grammars.append(app.engine.requests[-1].grammar)
        assert texts[0] == texts[1] and "x.py" in texts[0]
        assert grammars[0] == grammars[1]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"functions": [{"name": "a b"}]}, "invalid_schema", "functions[0].name"),
        ({"functions": [{**FUNCTION, "parameters": {"type": 5}}]}, "invalid_schema",
         "functions[0].parameters.type"),
        ({"functions": [FUNCTION, FUNCTION]}, "invalid_schema", "functions[1].name"),
        ({"functions": [FUNCTION], "function_call": {"name": "rm"}}, "invalid_tool_choice",
         "function_call.name"),
        ({"functions": [FUNCTION], "function_call": {}}, "invalid_tool_choice",
         "function_call.name"),
        ({"function_call": {"name": "ls"}}, "invalid_tool_choice", "function_call.name"),
        ({"functions": [FUNCTION], "function_call": "required"}, "invalid_value",
         "function_call"),
        ({"functions": 5}, "invalid_type", "functions"),
        ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]},
         "invalid_value", "functions"),
        ({"function_call": "auto", "tool_choice": "none"}, "invalid_value", "function_call"),
        ({"messages": [*USER, {"role": "function", "name": "ls", "content": "x"}]},
         "invalid_value", "messages[1].role"),
        ({"messages": [*USER, {**CALLED, "function_call": {"name": "ls"}}]}, "invalid_type",
         "messages[1].function_call.arguments"),
        ({"messages": [*USER, {**CALLED, "function_call": "ls"}]}, "invalid_type",
         "messages[1].function_call.name"),
        ({"messages": [{**CALLED, "role": "user"}]}, "invalid_value",
         "messages[0].function_call"),
        ({"messages": [{**CALLED, "tool_calls": [{"id": "c"}]}]}, "invalid_value",
         "messages[0].function_call"),
        ({"messages": [*USER, CALLED, {"role": "function", "name": "ls"}]}, "missing_field",
         "messages[2].content"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_the_client_s_own_path(
    app: RunningApp, fields: Json, code: str, param: str
) -> None:
    num_requests = len(app.engine.requests)
    reply = app.post(PATH, {"model": "default", "messages": USER, **fields})
    assert app.error(reply) == (400, code, param), reply.text
    assert reply.json()["error"]["message"].startswith(param)
    assert len(app.engine.requests) == num_requests
