# SPDX-License-Identifier: Apache-2.0
"""Items parse strictly, say where they do not, and keep text exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from sessions.errors import ItemError
from sessions.ids import is_id
from sessions.items import (
    Compaction,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Message,
    OutputText,
    Reasoning,
    Refusal,
    item_to_wire,
    parse_items,
)


def test_string_input_is_one_user_message() -> None:
    (item,) = parse_items("hello")
    assert isinstance(item, Message)
    assert (item.role, item.content) == ("user", (InputText(text="hello"),))
    assert is_id(item.id, "item")


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("user", InputText(text="x")),
        ("system", InputText(text="x")),
        ("developer", InputText(text="x")),
        ("assistant", OutputText(text="x")),
    ],
)
def test_message_content_may_be_a_string_and_type_may_be_left_out(role: str, part: Any) -> None:
    (item,) = parse_items([{"role": role, "content": "x"}])
    assert isinstance(item, Message)
    assert item.content == (part,)
    assert parse_items([{"type": "message", "role": role, "content": "x", "id": item.id}]) == (
        item,
    )


def test_every_item_type_parses_to_its_struct() -> None:
    items = parse_items(
        [
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "no"},
                    {"type": "text", "text": "b"},
                ],
                "status": "incomplete",
            },
            {
                "type": "reasoning",
                "id": "item_r",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"z":1, "a":2}'},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "x"}, {"type": "text", "text": "y"}],
                "status": "interrupted",
            },
            {"type": "compaction", "summary": "old", "num_replaced": 4},
        ]
    )
    message, reasoning, call, output, parts, compaction = items
    assert isinstance(message, Message) and isinstance(reasoning, Reasoning)
    assert message.content == (OutputText(text="a"), Refusal(refusal="no"), InputText(text="b"))
    assert message.text == "anob" and message.status == "incomplete"
    assert reasoning.id == "item_r" and reasoning.text == "t"
    assert isinstance(call, FunctionCall) and call.arguments == '{"z":1, "a":2}'
    assert isinstance(output, FunctionCallOutput) and output.text == "done"
    assert isinstance(parts, FunctionCallOutput) and parts.text == "xy"
    assert parts.status == "interrupted"
    assert isinstance(compaction, Compaction) and compaction.num_replaced == 4


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (7, "invalid_type", "input"),
        (None, "invalid_type", "input"),
        ({"role": "user"}, "invalid_type", "input"),
        (["hi"], "invalid_type", "input[0]"),
        ([{}], "invalid_type", "input[0].type"),
        ([{"type": 3}], "invalid_type", "input[0].type"),
        ([{"type": "image"}], "unknown_item_type", "input[0].type"),
        ([{"type": "message", "content": "x"}], "invalid_type", "input[0].role"),
        ([{"role": "robot", "content": "x"}], "invalid_type", "input[0].role"),
        ([{"role": ["user"], "content": "x"}], "invalid_type", "input[0].role"),
        ([{"role": "user"}], "invalid_type", "input[0].content"),
        ([{"role": "user", "content": 1}], "invalid_type", "input[0].content"),
        ([{"role": "user", "content": [1]}], "invalid_type", "input[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": 1}]}],
            "invalid_type",
            "input[0].content[0].text",
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "unknown_item_type",
            "input[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "x", "cache": 1}]}],
            "unknown_field",
            "input[0].content[0].cache",
        ),
        ([{"role": "user", "content": "x", "nmae": "y"}], "unknown_field", "input[0].nmae"),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "", "annotations": [1]}],
                }
            ],
            "unknown_field",
            "input[0].content[0].annotations",
        ),
        (
            [{"role": "user", "content": "a"}, {"type": "function_call_output", "output": "x"}],
            "invalid_type",
            "input[1].call_id",
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}],
            "invalid_type",
            "input[0].output",
        ),
        (
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}],
            "invalid_type",
            "input[0].arguments",
        ),
        (
            [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}],
            "invalid_type",
            "input[0].name",
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "", "status": "odd"}],
            "invalid_type",
            "input[0].status",
        ),
        ([{"type": "compaction", "summary": "", "num_replaced": -1}], "invalid_type", None),
        ([{"role": "user", "content": "\ud800"}], "invalid_type", "input[0].content"),
        ([{"role": "user", "content": "a", "id": 5}], "invalid_type", "input[0].id"),
        (
            [
                {"role": "user", "content": "a", "id": "x"},
                {"role": "user", "content": "b", "id": "x"},
            ],
            "invalid_type",
            "input[1].id",
        ),
    ],
)
def test_bad_items_are_refused_with_code_and_path(
    raw: object, code: str, param: str | None
) -> None:
    with pytest.raises(ItemError) as caught:
        parse_items(raw)
    assert caught.value.code == code
    assert caught.value.param == (param or "input[0].num_replaced")
    assert str(caught.value).startswith(str(caught.value.param))
    assert isinstance(caught.value, ValueError)


def test_path_starts_where_the_caller_says() -> None:
    with pytest.raises(ItemError, match=r"^initial_items\[0\]\.role"):
        parse_items([{"role": 1, "content": ""}], path="initial_items")


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    with pytest.raises(ItemError) as caught:
        parse_items([{"role": "x" * 10_000, "content": ""}])
    assert len(str(caught.value)) < 300


@settings(deadline=None)
@given(st.text(), st.text(min_size=1, max_size=20), st.text())
def test_text_survives_the_wire_exactly(text: str, call_id: str, arguments: str) -> None:
    items = parse_items(
        [
            {"role": "user", "content": text},
            {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": text},
        ]
    )
    wire = json.loads(json.dumps([item_to_wire(item) for item in items]))
    assert parse_items(wire) == items
    assert wire[0]["content"][0]["text"] == text
    assert wire[1]["arguments"] == arguments


def test_wire_items_are_what_the_openai_client_reads() -> None:
    _, reasoning, call = parse_items(
        [
            {"role": "user", "content": "x"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
    )
    read = ResponseFunctionToolCall.model_validate(item_to_wire(call), strict=True)
    assert (read.call_id, read.name, read.arguments) == ("c", "f", "{}")
    thought = ResponseReasoningItem.model_validate(item_to_wire(reasoning))
    assert thought.content is not None and thought.content[0].text == "t"
