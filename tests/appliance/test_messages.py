# SPDX-License-Identifier: Apache-2.0
"""Anthropic's dialect, through Anthropic's own client, every event against its typed model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from appliance.api.messages_input import chat_messages_of
from sessions.token_codec import count, decode_ids
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says

TOOL: Json = {
    "name": "ls",
    "description": "List a folder",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
CALLS = (
    '<tool_call>[{"name": "ls", "arguments": {"path": "a"}}, '
    '{"name": "ls", "arguments": {"path": "b"}}]</tool_call>'
)
USER: list[Any] = [{"role": "user", "content": "Hi"}]
BASE: Json = {"model": "default", "max_tokens": 200, "messages": USER}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(app: RunningApp) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as made:
        yield made


def raw_events(app: RunningApp, **fields: Any) -> list[Json]:
    """The events of a streamed answer, each checked strictly and framed under its own name."""
    reply = app.post("/v1/messages?beta=true", {**BASE, **fields, "stream": True})
    assert reply.status_code == 200, reply.text
    events = []
    for frame in reply.text.strip().split("\n\n"):
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_json(json.dumps(event), strict=True)
        events.append(event)
    return events


def prompt_text(app: RunningApp) -> str:
    prompt = decode_ids(app.engine.requests[-1].token_ids)
    return default_assets().tokenizer.decode(prompt, with_control=True)


def test_an_answer_is_a_message_and_cached_tokens_are_no_input_tokens(
    app: RunningApp, client: Any
) -> None:
    reply = client.messages.create(**BASE)
    Message.model_validate_json(reply.to_json(), strict=True)
    assert [block.text for block in reply.content] == ["Hello there."]
    assert (reply.stop_reason, reply.role, reply.model) == ("end_turn", "assistant", "default")
    again = client.messages.create(**BASE).usage
    num_prompt = count(app.engine.requests[-1].token_ids)
    assert (again.input_tokens, again.cache_read_input_tokens) == (1, num_prompt - 1)
    assert again.output_tokens == len(ids_of("Hello there.")) + 1


def test_a_stream_has_its_events_in_order(app: RunningApp) -> None:
    events = raw_events(app)
    kinds = [event["type"] for event in events]
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(deltas) == "Hello there."
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[2:-3] == ["content_block_delta"] * len(deltas)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ids_of("Hello there.")) + 1


def test_text_and_calls_stream_as_blocks_of_their_own(app: RunningApp, client: Any) -> None:
    app.engine.script = says(f"I look. {CALLS}")
    with client.messages.stream(**BASE, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[0].text.strip() == "I look."
    assert [block.input for block in final.content[1:]] == [{"path": "a"}, {"path": "b"}]
    assert len({block.id for block in final.content[1:]}) == 2
    events = raw_events(app, tools=[TOOL])
    opened = [e["index"] for e in events if e["type"] == "content_block_start"]
    closed = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2]


def test_a_whole_answer_has_the_calls_of_the_streamed_one(app: RunningApp, client: Any) -> None:
    app.engine.script = says(CALLS)
    reply = client.messages.create(**BASE, tools=[TOOL])
    assert [block.input for block in reply.content] == [{"path": "a"}, {"path": "b"}]
    assert reply.stop_reason == "tool_use"


def test_a_tool_round_trip_is_rendered_as_the_model_writes_it(app: RunningApp, client: Any) -> None:
    marker = {"type": "ephemeral"}
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": marker}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "x.py"}],
                    "cache_control": marker,
                },
                {"type": "text", "text": "and now?"},
            ],
        },
        {"role": "system", "content": "Be quick."},
    ]
    system: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=7f3a;"},
        {"type": "text", "text": "Be brief.", "cache_control": marker},
    ]
    client.messages.create(**{**BASE, "messages": conversation}, system=system, tools=[TOOL])
    text = prompt_text(app)
    assert "Be brief." in text and "billing" not in text and "cch=" not in text
    assert (
        'I look.<tool_call>[{"name": "ls", "arguments": {"path": "é"}}]</tool_call><|im_end|>'
        in text
    )
    assert "<tool_response>\nx.py\n</tool_response>" in text
    assert text.index("x.py") < text.index("and now?") < text.index("Be quick.")
    plain = json.loads(json.dumps([system, conversation]).replace("cache_control", "x"))
    assert chat_messages_of(*plain) == chat_messages_of(system, conversation)


def test_the_billing_header_is_logged_once(
    client: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.api.dialect._logged", set())
    with caplog.at_level(logging.WARNING, "appliance.api.dialect"):
        for nonce in ("1", "2"):
            client.messages.create(**BASE, system=f"x-anthropic-billing-header: {nonce}\nBe brief.")
    assert [r.message for r in caplog.records if "billing" in r.message] == [
        "ignored: system block 'x-anthropic-billing-header:'"
    ]


@pytest.mark.parametrize(
    ("choice", "least", "most"),
    [({"type": "auto"}, 0, 2), ({"type": "any"}, 1, 2),
     ({"type": "tool", "name": "ls", "disable_parallel_tool_use": True}, 1, 1)],
)  # fmt: skip
def test_a_tool_choice_reaches_the_grammar(
    app: RunningApp, client: Any, choice: Json, least: int, most: int
) -> None:
    one = '<tool_call>[{"name": "ls", "arguments": {"path": "a"}}]</tool_call>'
    app.engine.script = says(one if most == 1 else CALLS)
    reply = client.messages.create(**BASE, tools=[TOOL], tool_choice=choice)
    assert least <= len(reply.content) <= most
    grammar = app.engine.requests[-1].grammar
    assert grammar is not None
    assert grammar.text.startswith('{"type":"structural_tag"')


def test_without_a_choice_of_tools_markup_is_text(app: RunningApp, client: Any) -> None:
    app.engine.script = says(CALLS)
    reply = client.messages.create(**BASE, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in reply.content] == ["text"]
    assert reply.stop_reason == "end_turn"


def test_limits_and_stop_sequences_are_stop_reasons(app: RunningApp, client: Any) -> None:
    cut = client.messages.create(**{**BASE, "max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = client.messages.create(**BASE, stop_sequences=["the"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "the")
    assert stopped.content[0].text == "Hello "
    app.engine.script = says(CALLS)
    head = CALLS[: CALLS.index('"a"')]
    events = raw_events(app, max_tokens=len(ids_of(head)), tools=[TOOL])
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert [event["type"] for event in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_tokens_are_counted_as_they_are_rendered(app: RunningApp, client: Any) -> None:
    fields: Json = {"messages": USER, "system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(model="default", **fields)
    MessageTokensCount.model_validate_json(counted.to_json(), strict=True)
    client.messages.create(**{**BASE, **fields})
    assert counted.input_tokens == count(app.engine.requests[-1].token_ids)


def test_fields_that_steer_other_servers_are_taken(app: RunningApp) -> None:
    extra: Json = {
        "metadata": {"user_id": '{"session_id":"s"}'},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "k"}
    reply = app.post("/v1/messages?beta=true", {**BASE, **extra}, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "web_search" not in prompt_text(app)


def test_a_schema_of_the_output_is_honoured(app: RunningApp, client: Any) -> None:
    app.engine.script = says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    reply = client.messages.create(**BASE, output_config=wanted)
    assert json.loads(reply.content[0].text) == {"a": 1}
    assert app.engine.requests[-1].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "ls", "input": "x"}]}]},
         "messages[0].content[0].input"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice.name"),
        ({"tools": [{"name": "ls", "input_schema": {"type": 5}}]}, "tools[0].input_schema.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages[1].role"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_anthropic_s_envelope(
    app: RunningApp, fields: Json, param: str
) -> None:
    reply = app.post("/v1/messages", {**BASE, **fields})
    body = reply.json()
    assert (reply.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param and param in body["error"]["message"]


def test_errors_are_the_client_s_own_classes(app: RunningApp, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**BASE, "model": "claude-9"})
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    reply = app.http.post("/v1/messages", content=b"{", headers={"content-type": "text/plain"})
    assert reply.json()["type"] == "error"
    too_long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**{**BASE, "messages": too_long})
    body = long.value.body
    assert body["error"]["code"] == "context_length_exceeded"


def test_an_engine_error_in_a_stream_is_an_error_event(app: RunningApp) -> None:
    app.engine.fail_at = 1
    events = raw_events(app)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "it broke" in events[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_at_once_has_a_status(
    app: RunningApp, client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("appliance.generation.FIRST_WORD_S", 60.0)  # at once on any machine
    app.engine.grammar_check = lambda spec: ("queue_full", "too many")
    wanted = {"format": {"type": "json_schema", "schema": {}}}
    with pytest.raises(anthropic.RateLimitError) as refused:
        client.messages.create(**BASE, output_config=wanted, stream=stream)
    assert refused.value.response.headers["retry-after"] == "1"
    body: Any = refused.value.body
    assert body["error"]["type"] == "rate_limit_error"


def test_an_agent_may_ask_whether_somebody_is_there(app: RunningApp) -> None:
    reply = app.http.head("/")
    assert (reply.status_code, reply.content) == (200, b"")
