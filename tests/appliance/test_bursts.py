# SPDX-License-Identifier: Apache-2.0
"""Several tokens in one engine message, as speculation gives them: every dialect says the same as
of single tokens, and of what came together it makes one delta."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.text.chat_template import ChatTemplate
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says

# ChatML with hermes tools; the prompt opens the reasoning.
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
THOUGHT = "Two folders, then; one after the other."
TEXT = "I look at both \u00e4nd say what is there \U0001f9ed."
ARGUMENTS = ('{"path": "src/a"}', '{"path": "src/b", "deep": true}')
ANSWER = f"{THOUGHT}\n</think>\n\n{TEXT}\n" + "\n".join(
    f'<tool_call>\n{{"name": "ls", "arguments": {arguments}}}\n</tool_call>'
    for arguments in ARGUMENTS
)
FUNCTION: Json = {"name": "ls", "parameters": {"type": "object"}}
USER: Json = {"role": "user", "content": "Hi"}
BURSTS = (2, 3, 7, 1000)


@dataclass
class Said:
    """An answer as a client puts it together from its stream."""

    thought: str = ""
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    end: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    num_deltas: int = field(default=0, compare=False)

    def add(self, kind: str, piece: str) -> None:
        self.num_deltas += bool(piece)
        setattr(self, kind, getattr(self, kind) + piece)

    def add_arguments(self, piece: str) -> None:
        self.num_deltas += bool(piece)
        self.calls[-1][1] += piece


def stream(app: RunningApp, path: str, body: Json) -> Iterator[Json]:
    with app.http.stream("POST", path, json={"model": "default", **body}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def take_response_event(said: Said, event: Json) -> None:
    match event["type"]:
        case "response.reasoning_text.delta":
            said.add("thought", event["delta"])
        case "response.output_text.delta":
            said.add("text", event["delta"])
        case "response.function_call_arguments.delta":
            said.add_arguments(event["delta"])
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            said.calls.append([event["item"]["name"], ""])


def counts(usage: Json, total: str, detail: str) -> dict[str, Any]:
    """What is sampled, which what is cached by then does not change."""
    return {"output": usage[total], "reasoning": usage[detail]["reasoning_tokens"]}


def of_session(app: RunningApp, stop: list[str]) -> Said:
    said = Said()
    tool = {"type": "function", **FUNCTION}
    session_id = app.session(tools=[tool])
    for event in app.stream(session_id, "Hi", stop=stop):
        take_response_event(said, event)
        if event["type"] == "turn.completed":
            said.end = event["stop_reason"]
            said.usage = counts(event["usage"], "output_tokens", "output_tokens_details")
    return said


def of_responses(app: RunningApp, stop: list[str]) -> Said:
    said = Said()
    body: Json = {"input": "Hi", "stream": True, "tools": [{"type": "function", **FUNCTION}]}
    for event in stream(app, "/v1/responses", body):
        take_response_event(said, event)
        if event["type"] == "response.completed":
            said.end = event["response"]["status"]
            usage = event["response"]["usage"]
            said.usage = counts(usage, "output_tokens", "output_tokens_details")
    return said


def of_chat(app: RunningApp, stop: list[str]) -> Said:
    said = Said()
    body: Json = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    tools = [{"type": "function", "function": FUNCTION}]
    for chunk in stream(app, "/v1/chat/completions", {**body, "stop": stop, "tools": tools}):
        if chunk["usage"]:
            said.usage = counts(chunk["usage"], "completion_tokens", "completion_tokens_details")
        for choice in chunk["choices"]:
            said.end = choice["finish_reason"] or said.end
            said.add("thought", choice["delta"].get("reasoning_content") or "")
            said.add("text", choice["delta"].get("content") or "")
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    said.calls.append([call["function"]["name"], ""])
                said.add_arguments(call["function"]["arguments"])
    return said


def of_completion(app: RunningApp, stop: list[str]) -> Said:
    said = Said()
    body: Json = {"prompt": "Hi", "max_tokens": 500, "stream": True, "stop": stop}
    for chunk in stream(
        app, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    ):
        if chunk["usage"]:
            said.usage = {"output": chunk["usage"]["completion_tokens"]}
        for choice in chunk["choices"]:
            said.end = choice["finish_reason"] or said.end
            said.add("text", choice["text"])
    return said


def of_messages(app: RunningApp, stop: list[str]) -> Said:
    said = Said()
    tool = {"name": "ls", "input_schema": {"type": "object"}}
    body: Json = {"messages": [USER], "max_tokens": 500, "stream": True, "tools": [tool]}
    for event in stream(app, "/v1/messages", {**body, "stop_sequences": stop}):
        match event["type"], event.get("delta", {}).get("type"):
            case _, "thinking_delta":
                said.add("thought", event["delta"]["thinking"])
            case _, "text_delta":
                said.add("text", event["delta"]["text"])
            case _, "input_json_delta":
                said.add_arguments(event["delta"]["partial_json"])
            case "content_block_start", _ if event["content_block"]["type"] == "tool_use":
                said.calls.append([event["content_block"]["name"], ""])
            case "message_delta", _:
                said.end = event["delta"]["stop_reason"]
                said.usage = {"output": event["usage"]["output_tokens"]}
    return said


DIALECTS = {
    read.__name__.removeprefix("of_"): read
    for read in (of_session, of_responses, of_chat, of_completion, of_messages)
}
WITH_STOP = [name for name in DIALECTS if name != "responses"]  # which has no stop strings
Read = Callable[[RunningApp, list[str]], Said]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    assets = default_assets()
    thinking = dataclasses.replace(assets, chat_template=ChatTemplate(TEMPLATE, assets.tokenizer))
    with RunningApp(tmp_path_factory.mktemp("b"), says(ANSWER), assets=thinking) as running:
        yield running


def read_in_bursts(app: RunningApp, read: Read, burst: int, stop: list[str]) -> Said:
    app.engine.burst = burst
    return read(app, stop)


@pytest.mark.parametrize("read", DIALECTS.values(), ids=DIALECTS)
def test_tokens_that_come_together_say_what_they_say_singly(
    thinker: RunningApp, read: Read
) -> None:
    singly = read_in_bursts(thinker, read, 1, [])
    assert singly.usage["output"] == len(ids_of(ANSWER)) + 1  # and the end of the turn
    if read is of_completion:
        assert (singly.text, singly.end) == (ANSWER, "stop")
    else:
        assert (singly.thought, singly.text) == (THOUGHT, TEXT)
        assert singly.calls == [["ls", arguments] for arguments in ARGUMENTS]
    if "reasoning" in singly.usage:
        assert 0 < singly.usage["reasoning"] <= len(ids_of(f"{THOUGHT}\n</think>"))
    for burst in BURSTS:
        assert read_in_bursts(thinker, read, burst, []) == singly


@pytest.mark.parametrize("read", DIALECTS.values(), ids=DIALECTS)
def test_what_comes_together_is_one_delta_of_each_kind(thinker: RunningApp, read: Read) -> None:
    said = read_in_bursts(thinker, read, 1000, [])
    parts = 1 if read is of_completion else 2 + len(ARGUMENTS)
    assert said.num_deltas == parts


@pytest.mark.parametrize("name", WITH_STOP)
@pytest.mark.parametrize("stop", [["both"], ["there", "s"], ["\u00e4nd say"]])
def test_a_stop_string_inside_a_burst_cuts_where_it_cuts_singly(
    thinker: RunningApp, name: str, stop: list[str]
) -> None:
    singly = read_in_bursts(thinker, DIALECTS[name], 1, stop)
    assert singly.usage["output"] < len(ids_of(ANSWER))
    for burst in BURSTS:
        assert read_in_bursts(thinker, DIALECTS[name], burst, stop) == singly


def test_a_burst_has_the_logprobs_of_its_tokens(thinker: RunningApp) -> None:
    found = []
    for burst in (1, 5, 1000):
        thinker.engine.burst = burst
        body: Json = {"messages": [USER], "stream": True, "logprobs": True, "top_logprobs": 1}
        chunks = stream(thinker, "/v1/chat/completions", {**body, "return_token_ids": True})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ids = [i for choice in choices for i in choice.get("token_ids") or []]
        probs = [p for c in choices if c["logprobs"] for p in c["logprobs"]["content"]]
        assert len(ids) == len(probs) == len(ids_of(ANSWER)) + 1
        found.append((ids, probs))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("burst", BURSTS)
def test_a_limit_in_mid_burst_is_kept(thinker: RunningApp, burst: int) -> None:
    thinker.engine.burst = burst
    body: Json = {"messages": [USER], "stream": True, "max_tokens": 4}
    chunks = list(stream(thinker, "/v1/chat/completions", {**body, "return_token_ids": True}))
    ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids") or []]
    assert ids == ids_of(ANSWER)[:4]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
