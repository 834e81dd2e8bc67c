# SPDX-License-Identifier: Apache-2.0
"""Reasoning, as the rendered prompt opens it, in every dialect and in sessions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from appliance.services import tool_format_of
from engine.text.chat_template import ChatTemplate
from sessions.token_codec import decode_ids
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says, sse_events
from tools_schema.formats.registry import get_format

# ChatML with hermes tools, as reasoning models have it: the prompt opens the reasoning.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call></tool_call> XML tags"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
ANSWER = f"A folder.\n</think>\n\nI look.\n{CALL}"
SCHEMA: Json = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION: Json = {"name": "ls", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def shared_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    assets = default_assets()
    template = ChatTemplate(TEMPLATE, assets.tokenizer)
    thinking = dataclasses.replace(assets, chat_template=template)
    with RunningApp(tmp_path_factory.mktemp("r"), assets=thinking) as running:
        yield running


@pytest.fixture
def app(shared_thinker: RunningApp) -> RunningApp:
    shared_thinker.engine.script = says(ANSWER)
    return shared_thinker


def prompt_text(app: RunningApp) -> str:
    prompt = decode_ids(app.engine.requests[-1].token_ids)
    return default_assets().tokenizer.decode(prompt, with_control=True)


def test_a_template_s_own_words_win_over_the_loader_s_guess(app: RunningApp) -> None:
    assert app.services.assets.tool_format == "smollm2"
    assert tool_format_of(app.services.assets) is get_format("hermes")
    assert tool_format_of(default_assets()) is get_format("smollm2")


def test_chat_has_reasoning_beside_its_content(app: RunningApp) -> None:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as client:
        reply: Any = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"type": "function", "function": FUNCTION}],  # type: ignore[typeddict-item]
        )
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("A folder.", "I look.")
    assert [c.function.arguments for c in message.tool_calls] == ['{"path": "a"}']
    grammar = app.engine.requests[-1].grammar
    assert grammar is not None and "</think>" in grammar.text
    num_thought = reply.usage.completion_tokens_details.reasoning_tokens
    assert 0 < num_thought <= len(ids_of("A folder.\n</think>"))


def test_messages_have_a_thinking_block_that_is_rendered_again(app: RunningApp) -> None:
    tool: Any = {"name": "ls", "input_schema": SCHEMA}
    base: Json = {"model": "default", "max_tokens": 200, "tools": [tool]}
    turn: list[Any] = [{"role": "user", "content": "Hi"}]
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        with client.messages.stream(**base, messages=turn) as stream:
            for _ in stream:
                pass
            final = stream.get_final_message()
        whole = client.messages.create(**base, messages=turn)
        kinds = ["thinking", "text", "tool_use"]
        assert [b.type for b in final.content] == [b.type for b in whole.content] == kinds
        thought: Any = final.content[0]
        assert thought.thinking == "A folder."
        turn.append({"role": "assistant", "content": [b.to_dict() for b in final.content]})
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "x"}  # type: ignore[union-attr]
        turn.append({"role": "user", "content": [result]})
        client.messages.create(**base, messages=turn)
    assert "assistant\n<think>\nA folder.\n</think>\n\nI look." in prompt_text(app)
    body = {**base, "messages": turn[:1], "stream": True}
    event_type: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    with app.http.stream("POST", "/v1/messages", json=body) as reply:
        for event in sse_events(reply):
            event_type.validate_json(json.dumps(event), strict=True)


def test_responses_have_a_reasoning_item_that_a_client_may_carry(app: RunningApp) -> None:
    body: Json = {
        "model": "default",
        "input": "Hi",
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    with app.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        events = list(sse_events(reply))
    for event in events:
        event_type.validate_json(json.dumps(event), strict=True)
    response = events[-1]["response"]
    Response.model_validate_json(json.dumps(response), strict=True)
    assert [i["type"] for i in response["output"]] == ["reasoning", "message", "function_call"]
    thought = "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta")
    assert thought == "A folder."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    call = response["output"][2]
    carried = [{**response["output"][0], "content": []}, *response["output"][1:]]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    user = {"role": "user", "content": "Hi"}
    again = app.post("/v1/responses", {**body, "input": [user, *carried, result]})
    assert again.status_code == 200, again.text
    assert "assistant\n<think>\nA folder.\n</think>\n\nI look." in prompt_text(app)


def test_a_session_s_turn_has_reasoning_items(app: RunningApp) -> None:
    session_id = app.session(tools=[{"type": "function", **FUNCTION}])
    turn = app.turn(session_id)
    assert [item["type"] for item in turn["output"]] == ["reasoning", "message", "function_call"]
    assert turn["output"][0]["content"][0]["text"] == "A folder."


def test_a_prompt_that_closes_its_reasoning_expects_none(app: RunningApp) -> None:
    tokenizer = default_assets().tokenizer
    for tail, expected in (
        ("<|im_start|>assistant\n<think>\n", "on"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "off"),
        ("<|im_start|>assistant\n", "auto"),
    ):
        prompt = b"".join(
            token.to_bytes(4, "little") for token in tokenizer.encode_with_control(tail)
        )
        assert app.services.reasoning_of(prompt) == expected
