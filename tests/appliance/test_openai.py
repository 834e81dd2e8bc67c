# SPDX-License-Identifier: Apache-2.0
"""The OpenAI dialects, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from sessions.token_codec import decode_ids
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says, until

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "List a folder",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
CALL_TEXT = (
    '<tool_call>[{"name": "ls", "arguments": {"path": "a"}}, '
    '{"name": "ls", "arguments": {"path": "b"}}]</tool_call>'
)
USER: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(app: RunningApp) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def test_models_are_listed_by_name_and_alias(client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert names == [default_assets().name, "default"]
    assert client.models.retrieve("default").id == "default"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_a_chat_answer_has_content_finish_reason_and_usage(app: RunningApp, client: Any) -> None:
    reply = client.chat.completions.create(model="default", messages=USER)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there.", "stop")
    assert choice.message.tool_calls is None and reply.model == "default"
    assert reply.usage is not None
    prompt = default_assets().chat_template.render(USER, add_generation_prompt=True)
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(ids_of("Hello there.")) + 1
    again = client.chat.completions.create(model="default", messages=USER).usage
    assert again is not None and again.prompt_tokens_details is not None
    assert again.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_a_streamed_chat_answer_is_the_same_text_and_usage_comes_last(
    client: Any,
) -> None:
    chunks = list(
        client.chat.completions.create(
            model="default", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_tool_calls_come_whole_and_streamed_with_one_name_and_an_id_each(
    app: RunningApp, client: Any
) -> None:
    app.engine.script = says(CALL_TEXT)
    common: Json = {"model": "default", "messages": USER, "tools": [TOOL]}
    reply = client.chat.completions.create(**common, tool_choice="required")
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert [c.function.arguments for c in choice.message.tool_calls] == [
        '{"path": "a"}',
        '{"path": "b"}',
    ]
    with client.chat.completions.stream(**common) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    calls = final.message.tool_calls
    assert [c.function.arguments for c in calls] == ['{"path": "a"}', '{"path": "b"}']
    assert len({c.id for c in calls}) == 2 and all(c.id.startswith("call_") for c in calls)


def test_a_tool_round_trip_renders_calls_and_results_as_the_model_writes_them(
    app: RunningApp, client: Any
) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "ls", "arguments": '{"path":"a"}'}}  # fmt: skip
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "x.py"},
    ]
    client.chat.completions.create(model="default", messages=messages, tools=[TOOL])
    prompt = decode_ids(app.engine.requests[-1].token_ids)
    text = default_assets().tokenizer.decode(prompt, with_control=True)
    assert text.count("<|im_start|>system") == 1 and "Be brief." in text
    assert '<tool_call>[{"name": "ls", "arguments": {"path":"a"}}]</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nx.py\n</tool_response><|im_end|>" in text


def test_json_schema_output_is_constrained(app: RunningApp, client: Any) -> None:
    app.engine.script = says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    reply = client.chat.completions.create(
        model="default",
        messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(reply.choices[0].message.content or "") == {"a": 1}
    assert app.engine.requests[-1].grammar is not None


def test_logprobs_follow_the_tokens(client: Any) -> None:
    reply = client.chat.completions.create(
        model="default", messages=USER, logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == len(ids_of("Hello there.")) + 1
    assert logprobs.content[0].token == "Hello" and logprobs.content[0].logprob == -0.5
    assert len(logprobs.content[0].top_logprobs) == 2
    streamed = client.chat.completions.create(
        model="default", messages=USER, logprobs=True, stream=True
    )
    num = sum(
        len(c.choices[0].logprobs.content or ())
        for c in streamed
        if c.choices and c.choices[0].logprobs
    )
    assert num == len(logprobs.content)


def test_stop_and_limits_end_an_answer(app: RunningApp, client: Any) -> None:
    app.engine.script = says("one two STOP three")
    ask: Json = {"model": "default", "messages": USER}
    stopped = client.chat.completions.create(**ask, stop="STOP").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("one two ", "stop")
    cut = client.chat.completions.create(**ask, max_completion_tokens=2).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("one two", "length")
    roomy = client.chat.completions.create(**ask, max_tokens=10**6).choices[0]
    assert roomy.finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"n": 17}, "invalid_value", "n"),
        ({"temperature": 99}, "invalid_value", "temperature"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "unsupported_parameter", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]},
         "context_length_exceeded", "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_schema",
         "tools[0].function.name"),
        ({"tool_choice": "required"}, "invalid_tool_choice", "tool_choice"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
        ({"logit_bias": {"99999999": 1}}, "invalid_value", "logit_bias"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_that_names_the_field(
    app: RunningApp, extra: Json, code: str, param: str
) -> None:
    num_requests = len(app.engine.requests)
    body = {"model": "default", "messages": USER, **extra}
    assert app.error(app.post("/v1/chat/completions", body)) == (400, code, param)
    assert len(app.engine.requests) == num_requests


def test_unknown_fields_of_agents_are_tolerated(app: RunningApp) -> None:
    body = {"model": "default", "messages": USER, "prompt_cache_key": "k", "x_new": [1]}
    assert app.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [
        ("chat/completions", {"messages": USER}, 1),
        ("completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2000}, 4),
        ("responses", {"input": "Hi"}, 1),
        ("messages", {"messages": USER, "max_tokens": 2000}, 1),
    ],
)
def test_hanging_up_aborts_the_requests_in_the_engine(
    app: RunningApp, path: str, body: Json, num_requests: int, stream: bool
) -> None:
    app.engine.script = says("word " * 2000)
    app.engine.hold_at = 20
    num_before, num_aborted = len(app.engine.requests), len(app.engine.aborted)
    body = {"model": "default", "stream": stream, **body}

    def until_all_are_there() -> None:
        until(lambda: len(app.engine.requests) == num_before + num_requests)

    if stream:
        with app.http.stream("POST", f"/v1/{path}", json=body) as reply:
            next(line for line in reply.iter_lines() if "word" in line)
            until_all_are_there()
    else:
        with app.caller(f"/v1/{path}", body):
            until_all_are_there()
    until(lambda: len(app.engine.aborted) >= num_aborted + num_requests)
    asked = {request.request_id for request in app.engine.requests[num_before:]}
    assert set(app.engine.aborted[num_aborted:]) == asked


def test_an_engine_error_in_a_stream_is_an_error_frame(app: RunningApp, client: Any) -> None:
    app.engine.fail_at = 1
    with pytest.raises(openai.APIError, match="it broke"):
        list(client.chat.completions.create(model="default", messages=USER, stream=True))
    with pytest.raises(openai.APIError, match="it broke"):
        list(client.completions.create(model="default", prompt="x", stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_at_once_has_a_status(
    app: RunningApp, client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("appliance.generation.FIRST_WORD_S", 60.0)  # at once on any machine
    app.engine.grammar_check = lambda spec: ("queue_full", "too many")
    with pytest.raises(openai.RateLimitError, match="too many") as refused:
        client.chat.completions.create(
            model="default",
            messages=USER,
            stream=stream,
            response_format={"type": "json_object"},
        )
    assert refused.value.response.headers["retry-after"] == "1"


def test_a_completion_continues_text_or_ids(app: RunningApp, client: Any) -> None:
    app.engine.script = says(" upon a time")
    reply = client.completions.create(model="default", prompt="Once", max_tokens=3)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" upon a time", "length")
    ids = ids_of("Once")
    reply = client.completions.create(
        model="default", prompt=ids, extra_body={"return_token_ids": True}
    )
    choice: Any = reply.choices[0]
    assert choice.text == " upon a time" and choice.finish_reason == "stop"
    assert choice.token_ids == [*ids_of(" upon a time"), 2]
    assert choice.prompt_token_ids == ids
    assert decode_ids(app.engine.requests[-1].token_ids) == ids


def test_a_streams_prompt_ids_do_not_wait_for_its_first_token(app: RunningApp, client: Any) -> None:
    """A context of ids takes longer to write and to read than the first token may."""
    app.engine.script = says("x")
    app.engine.pause()
    stream = client.completions.create(
        model="default", prompt=[7, 8], stream=True, extra_body={"return_token_ids": True}
    )
    chunks = iter(stream)
    first = next(chunks).choices[0]
    assert (first.text, first.finish_reason, first.token_ids) == ("", None, [])
    assert first.prompt_token_ids == [7, 8]
    app.engine.resume()
    rest = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in rest) == "x"
    assert all("prompt_token_ids" not in choice.model_extra for choice in rest)


def test_load_clients_fields_reach_the_engine_and_their_stream_carries_ids_and_usage(
    app: RunningApp, client: Any
) -> None:
    app.engine.script = says("a b c d e f g")
    chunks: list[Any] = list(
        client.completions.create(
            model="default",
            prompt=ids_of("Once"),
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={
                "ignore_eos": True,
                "min_tokens": 5,
                "return_token_ids": True,
                "top_k": 3,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "stop_token_ids": [7],
            },
        )
    )
    sampling = app.engine.requests[-1].sampling
    assert (sampling.ignore_eos, sampling.min_new_tokens, sampling.top_k) == (True, 5, 3)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert sampling.stop_token_ids == (7,)
    ids = [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids]
    assert ids == ids_of("a b c d e f g")[:5]
    assert chunks[-1].usage.completion_tokens == 5


def test_completion_logprobs_have_the_legacy_shape(client: Any) -> None:
    reply = client.completions.create(model="default", prompt="x", logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens[:-1]) == reply.choices[0].text
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.tokens)


@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"echo": True, "logprobs": 1}, "unsupported_parameter", "logprobs"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"prompt": ["a"] * 129}, "invalid_value", "prompt"),
        ({"prompt": "word " * 9000}, "context_length_exceeded", "prompt"),
        ({"prompt": ["a", "word " * 9000]}, "context_length_exceeded", "prompt[1]"),
        ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
        ({"prompt": [[1], [2, 10**6]]}, "invalid_value", "prompt[1][1]"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": [1, 10**6]}, "invalid_value", "prompt[1]"),
        ({"prompt": [1, 2**40]}, "invalid_value", "prompt[1]"),
        ({"prompt": [1, 2, -1]}, "invalid_value", "prompt[2]"),
        ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
    ],
)
def test_what_a_completion_cannot_do_is_a_400(
    app: RunningApp, extra: Json, code: str, param: str
) -> None:
    body = {"model": "default", "prompt": "x", **extra}
    assert app.error(app.post("/v1/completions", body)) == (400, code, param)


def test_tokenize_and_detokenize_round_trip(app: RunningApp) -> None:
    text = "def f(x):\n    return x  # 123 \u00e9\u4e2d"
    ids = app.post("/tokenize", {"prompt": text}).json()
    assert ids["tokens"] == ids_of(text) and ids["count"] == len(ids["tokens"])
    assert app.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    rendered = app.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert rendered == default_assets().chat_template.render(USER, add_generation_prompt=True)
    assert app.error(app.post("/tokenize", {}))[:2] == (400, "invalid_value")
    assert app.error(app.post("/detokenize", {"tokens": [10**7]}))[:2] == (400, "invalid_value")


def test_request_ids_are_echoed_and_errors_never_retry_by_themselves(app: RunningApp) -> None:
    reply = app.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert app.get("/v1/models").headers["x-request-id"].startswith("req_")
