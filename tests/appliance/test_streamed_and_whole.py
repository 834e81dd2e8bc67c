# SPDX-License-Identifier: Apache-2.0
"""A streamed answer says the same as the whole one, in every dialect, wherever it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fakes.appliance import Json, RunningApp, ids_of, says, sse_events
from tests.fakes.thinking_assets import thinking_assets

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "%s", "n": [1, 2.5]}}\n</tool_call>'
THOUGHT = "Which? \u00e9\n</think>\n\n"
ANSWER = f"{THOUGHT}I look.\n{CALL % 'a'}\n{CALL % 'b c'}"
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "array", "items": {"type": "number"}},
    },
}
FUNCTION: Json = {"name": "ls", "parameters": SCHEMA}
USER: list[Any] = [{"role": "user", "content": "Hi"}]
NUM_TOKENS = len(ids_of(ANSWER)) + 1
# Every place to be cut in, and the end; "b c" stops inside the second call, "look" in the text.
ENDINGS: list[Json] = [
    *({"limit": limit} for limit in range(1, NUM_TOKENS + 1)),
    *({"stop": text} for text in ("look", "Which", '"b c"', "nowhere")),
]


@pytest.fixture(scope="module")
def shared_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    with RunningApp(tmp_path_factory.mktemp("w"), assets=thinking_assets()) as running:
        yield running


@pytest.fixture
def app(shared_thinker: RunningApp) -> RunningApp:
    shared_thinker.engine.script = says(ANSWER)
    return shared_thinker


def told(value: Any) -> Any:
    """The answer without what is each one's own: ids, times, what the cache held."""
    text = re.sub(r'"(call|toolu|msg|rs|fc|resp|chatcmpl|cmpl)[-_][0-9A-Za-z]+"', '"id"', value)
    return json.loads(re.sub(r'"(created_at|created)": ?[0-9.]+', '"at": 0', text))


def chat_of_chunks(chunks: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    end = ""
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({k: v for k, v in part.items() if k != "index"})
            else:
                call = message["tool_calls"][part["index"]]
                call["function"]["arguments"] += part["function"]["arguments"]
        end = choice["finish_reason"] or end
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk["usage"])
    return {"message": message, "finish_reason": end, "usage": usage}


def test_chat(app: RunningApp) -> None:
    for ending in ENDINGS:
        check_chat(app, ending)


def check_chat(app: RunningApp, ending: Json) -> None:
    body: Json = {
        "model": "default",
        "messages": USER,
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": ending.get("limit"),
        "stop": ending.get("stop"),
        "seed": 7,
    }
    whole = app.post("/v1/chat/completions", body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with app.http.stream("POST", "/v1/chat/completions", json=streamed) as reply:
        chunks = list(sse_events(reply))
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    ChatCompletion.model_validate_json(json.dumps(whole), strict=True)
    seen = chat_of_chunks(chunks)
    choice = whole["choices"][0]
    message = choice["message"]
    shaped = {
        "message": {
            "role": "assistant",
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "tool_calls": message.get("tool_calls", []),
        },
        "finish_reason": choice["finish_reason"],
        "usage": whole["usage"],
    }
    for answer in (seen, shaped):
        answer["usage"].pop("prompt_tokens_details")
        answer["usage"].pop("x_cache")
    assert told(json.dumps(seen)) == told(json.dumps(shaped)), ending
    is_cut = ending.get("limit", NUM_TOKENS) < NUM_TOKENS
    is_stopped = ending.get("stop", "nowhere") != "nowhere"
    end = "length" if is_cut else "stop" if is_stopped else "tool_calls"
    assert choice["finish_reason"] == end, ending


def test_messages(app: RunningApp) -> None:
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        for ending in (*ENDINGS[:NUM_TOKENS:3], *ENDINGS[NUM_TOKENS - 1 :]):
            check_messages(client, ending)


def check_messages(client: anthropic.Anthropic, ending: Json) -> None:
    stop = ending.get("stop")
    ask: Json = {
        "model": "default",
        "messages": USER,
        "tools": [{"name": "ls", "input_schema": SCHEMA}],
        "max_tokens": ending.get("limit", 500),
        **({"stop_sequences": [stop]} if stop else {}),
    }
    whole: Any = client.messages.create(**ask).to_dict()
    with client.messages.stream(**ask) as stream:
        seen: Any = stream.get_final_message().to_dict()
    seen.pop("stop_details", None)  # the client's own
    shown = []
    for answer in (whole, seen):
        usage = answer["usage"]
        num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
        answer["usage"] = {"input": num_input, "output": usage["output_tokens"]}
        shown.append(told(json.dumps(answer)))
    assert shown[0] == shown[1], ending
    is_cut = ending.get("limit", NUM_TOKENS) < NUM_TOKENS
    is_stopped = ending.get("stop", "nowhere") != "nowhere"
    end = "max_tokens" if is_cut else "stop_sequence" if is_stopped else "tool_use"
    assert shown[0]["stop_reason"] == end, ending


def test_responses(app: RunningApp) -> None:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as client:
        for limit in (*range(1, NUM_TOKENS, 3), NUM_TOKENS):
            check_responses(client, limit)


def check_responses(client: openai.OpenAI, limit: int) -> None:
    ask: Json = {
        "model": "default",
        "input": "Hi",
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "max_output_tokens": limit,
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    whole: Any = client.responses.create(**ask).to_dict()
    events: Any = [event.to_dict() for event in client.responses.create(**ask, stream=True)]
    seen = events[-1]["response"]
    deltas = [""] * len(seen["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    shown = []
    for answer in (whole, seen):
        answer["usage"].pop("input_tokens_details")
        answer["usage"].pop("x_cache")
        shown.append(told(json.dumps(answer)))
    assert shown[0] == shown[1], limit
    said = [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in seen["output"]
    ]
    assert deltas == said, limit


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"stop": "look"}, {"logprobs": 1},
                                    {"echo": True}, {"n": 2}])  # fmt: skip
def test_completions(app: RunningApp, fields: Json) -> None:
    body: Json = {"model": "default", "prompt": ["x", "y z"], "max_tokens": 99, "seed": 1, **fields}
    body["return_token_ids"] = True
    whole = app.post("/v1/completions", body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with app.http.stream("POST", "/v1/completions", json=streamed) as reply:
        chunks = list(sse_events(reply))
    for answer in (whole, *chunks):
        Completion.model_validate_json(json.dumps(_as_typed(answer)), strict=True)
    num_choices = 2 * fields.get("n", 1)
    assert len(whole["choices"]) == num_choices
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if "logprobs" in fields:
            tokens = [t for part in parts for t in part["logprobs"]["tokens"]]
            offsets = [t for part in parts for t in part["logprobs"]["text_offset"]]
            assert tokens == choice["logprobs"]["tokens"]
            assert offsets == choice["logprobs"]["text_offset"]
    for usage in (whole["usage"], chunks[-1]["usage"]):
        usage.pop("prompt_tokens_details")
        usage.pop("x_cache")
    assert chunks[-1]["usage"] == whole["usage"]


def _as_typed(answer: Json) -> Json:
    """A chunk has no end yet, as OpenAI's own chunks; its type there is that of the whole."""
    choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in answer["choices"]]
    return {**answer, "choices": choices}
