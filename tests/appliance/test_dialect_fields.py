# SPDX-License-Identifier: Apache-2.0
"""Each field of a dialect is honoured, let pass with a word in the log, or refused by its name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from appliance.api.known_fields import (
    REFUSED_CHAT,
    REFUSED_COMPLETIONS,
    REFUSED_MESSAGES,
    REFUSED_RESPONSES,
)
from appliance.api.wire import ChatRequest, CompletionRequest
from appliance.api.wire_agents import MessagesRequest, ResponsesRequest
from sessions.token_codec import decode_ids
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says
from tests.fakes.thinking_assets import thinking_assets

USER: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"model": "default", "messages": USER},
    "/v1/completions": {"model": "default", "prompt": "x"},
    "/v1/responses": {"model": "default", "input": "Hi"},
    "/v1/messages": {"model": "default", "messages": USER, "max_tokens": 50},
}
REFUSED = {
    "/v1/chat/completions": REFUSED_CHAT,
    "/v1/completions": REFUSED_COMPLETIONS,
    "/v1/responses": REFUSED_RESPONSES,
    "/v1/messages": REFUSED_MESSAGES,
}
MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
TOOL: Json = {"name": "ls", "parameters": {"type": "object"}}
TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": TOOL}],
    "/v1/responses": [{"type": "function", **TOOL}],
    "/v1/messages": [{"name": "ls", "input_schema": {"type": "object"}}],
}
OPEN, CLOSED = "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def shared_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    with RunningApp(tmp_path_factory.mktemp("f"), assets=thinking_assets()) as running:
        yield running


@pytest.fixture
def thinker(shared_thinker: RunningApp) -> RunningApp:
    shared_thinker.engine.script = says("Hm.\n</think>\n\nHello.")
    return shared_thinker


def prompt_text(app: RunningApp) -> str:
    prompt = decode_ids(app.engine.requests[-1].token_ids)
    return default_assets().tokenizer.decode(prompt, with_control=True)


@pytest.mark.parametrize("path", BODIES)
def test_what_would_change_the_answer_is_refused_by_name_and_what_asks_for_nothing_passes(
    app: RunningApp, path: str
) -> None:
    num_requests = len(app.engine.requests)
    for name, harmless in REFUSED[path].items():
        value: Any = {"x": 1}
        reply = app.post(path, {**BODIES[path], name: value})
        assert app.error(reply) == (400, "unsupported_parameter", name)
        assert name in reply.json()["error"]["message"]
        assert value not in harmless
    assert len(app.engine.requests) == num_requests
    nothing = {name: harmless[-1] for name, harmless in REFUSED[path].items()}
    assert app.post(path, {**BODIES[path], **nothing}).status_code == 200
    one = app.post(path, {**BODIES[path], "skip_special_tokens": 1})
    assert app.error(one)[2] == "skip_special_tokens"


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_good_as_absent(app: RunningApp, path: str) -> None:
    """Some clients write every field that they know."""
    nulls = dict.fromkeys(set(MODELS[path].model_fields) - set(BODIES[path]))
    assert {"stream", "temperature", "seed", "ignore_eos"} <= set(nulls)
    reply = app.post(path, {**nulls, **BODIES[path]})
    assert reply.status_code == 200, reply.text
    required = next(name for name in ("messages", "prompt", "model") if name in BODIES[path])
    none = app.post(path, {**BODIES[path], required: None})
    assert app.error(none) == (400, "missing_field", required)
    assert app.error(app.post(path, [])) == (400, "invalid_type", None)


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_logged_once(
    app: RunningApp, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    name = f"x_new_{path[4:]}"
    with caplog.at_level(logging.WARNING, "appliance.api.dialect"):
        for _ in range(2):
            assert app.post(path, {**BODIES[path], name: [1]}).status_code == 200
    assert sum(name in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_tokens": 60, "max_tokens": 50, "max_output_tokens": 50}, "min_tokens"),
    ],
)
def test_a_value_out_of_range_is_refused_before_the_engine_hears_of_it(
    app: RunningApp, path: str, fields: Json, param: str
) -> None:
    num_requests = len(app.engine.requests)
    reply = app.post(path, {**BODIES[path], **fields})
    assert app.error(reply) == (400, "invalid_value", param)
    assert len(app.engine.requests) == num_requests


@pytest.mark.parametrize("path", BODIES)
def test_sampling_reaches_the_engine_from_every_dialect(app: RunningApp, path: str) -> None:
    fields: Json = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"5": -2.5},
        "seed": -(2**63),
        "stop_token_ids": [9],
        "min_tokens": 3,
    }
    assert app.post(path, {**BODIES[path], **fields}).status_code == 200
    sampling = app.engine.requests[-1].sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"):
        assert getattr(sampling, name) == fields[name]
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert sampling.logit_bias == {5: -2.5} and sampling.stop_token_ids == (9,)
    assert sampling.min_new_tokens == 3


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("name", ["ignore_eos", "min_tokens"])
def test_an_answer_that_goes_on_behind_its_end_has_no_tools(
    app: RunningApp, path: str, name: str
) -> None:
    body = {**BODIES[path], name: 1 if name == "min_tokens" else True}
    reply = app.post(path, {**body, "tools": TOOLS[path]})
    assert app.error(reply) == (400, "unsupported_parameter", name)
    assert app.post(path, body).status_code == 200


def test_nor_has_a_turn_of_a_session(app: RunningApp) -> None:
    session_id = app.session(tools=TOOLS["/v1/responses"])
    path = f"/v1/sessions/{session_id}/turns"
    for extra in ({}, {"tool_choice": "none"}):
        reply = app.post(path, {"input": "Hi", "ignore_eos": True, **extra})
        assert app.error(reply) == (400, "unsupported_parameter", "ignore_eos")
    reply = app.post(path, {"input": "Hi", "ignore_eos": True, "max_output_tokens": 5})
    assert app.error(reply)[0] == 400
    assert app.turn(session_id, "Hi")["status"] == "completed"


def test_a_benchmark_of_a_model_that_reasons_may_ignore_its_end(thinker: RunningApp) -> None:
    for path in TOOLS:
        body = {**BODIES[path], "ignore_eos": True, "max_tokens": 9, "max_output_tokens": 9}
        assert thinker.post(path, body).status_code == 200
        request = thinker.engine.requests[-1]
        assert request.sampling.ignore_eos and request.grammar is None
        reply = thinker.post(path, {**body, "thinking_token_budget": 3})
        assert thinker.error(reply) == (400, "unsupported_parameter", "ignore_eos")


# Reasoning --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "tail", "effort"),
    [
        ("/v1/chat/completions", {}, OPEN, None),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, CLOSED, "low"),
        ("/v1/chat/completions", {"reasoning_effort": "minimal"}, OPEN, "low"),
        ("/v1/chat/completions", {"reasoning_effort": "max"}, OPEN, "high"),
        ("/v1/chat/completions", {"reasoning": {"effort": "high"}}, OPEN, "high"),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}}, CLOSED, "low"),
        ("/v1/chat/completions", {"thinking": {"type": "enabled"}}, OPEN, "medium"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, CLOSED,
         None),
        ("/v1/chat/completions", {"chat_template_kwargs": {"thinking": False}}, CLOSED, None),
        ("/v1/chat/completions",
         {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, CLOSED,
         "high"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, CLOSED, "low"),
        ("/v1/responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}}, OPEN, "high"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, CLOSED, "low"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, OPEN, None),
        ("/v1/messages", {"output_config": {"effort": "low"}}, OPEN, "low"),
        ("/v1/messages",
         {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, CLOSED, "low"),
    ],
)  # fmt: skip
def test_an_effort_reaches_the_template(
    thinker: RunningApp, path: str, fields: Json, tail: str, effort: str | None
) -> None:
    reply = thinker.post(path, {**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    text = prompt_text(thinker)
    assert text.endswith(tail)
    assert (f"Effort: {effort}" in text) if effort else ("Effort" not in text)


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "most"}, "invalid_value",
         "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning": {"effort": 3}}, "invalid_type",
         "reasoning.effort"),
        ("/v1/chat/completions", {"thinking": {"type": "on"}}, "invalid_value", "thinking.type"),
        ("/v1/messages", {"thinking": {"type": [{}]}}, "invalid_value", "thinking.type"),
        ("/v1/messages", {"thinking": {}}, "invalid_value", "thinking.type"),
        ("/v1/chat/completions", {"thinking_token_budget": -1}, "invalid_value",
         "thinking_token_budget"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"mood": "good"}},
         "unsupported_parameter", "chat_template_kwargs.mood"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}},
         "unsupported_parameter", "chat_template_kwargs.messages"),
        ("/v1/responses", {"reasoning": {"effort": "most"}}, "invalid_value",
         "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "most"}}, "invalid_value",
         "output_config.effort"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": "9"}},
         "invalid_value", "thinking.budget_tokens"),
    ],
)  # fmt: skip
def test_an_effort_nobody_knows_is_refused(
    thinker: RunningApp, path: str, fields: Json, code: str, param: str
) -> None:
    assert thinker.error(thinker.post(path, {**BODIES[path], **fields})) == (400, code, param)


def test_where_the_template_has_no_switch_an_effort_is_a_wish(app: RunningApp) -> None:
    chat = "/v1/chat/completions"
    for fields in ({"reasoning_effort": "high"}, {"thinking": {"type": "disabled"}}):
        assert app.post(chat, {**BODIES[chat], **fields}).status_code == 200
    # The default model does not reason: that much can be promised, no more.
    off, on = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
    assert app.post(chat, {**BODIES[chat], **off}).status_code == 200
    assert app.error(app.post(chat, {**BODIES[chat], **on})) == (
        400,
        "unsupported_parameter",
        "chat_template_kwargs.enable_thinking",
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"thinking_token_budget": 12}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 12}}),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 12}}),
        ("/v1/responses", {"thinking_token_budget": 12}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 12}}),
    ],
)
def test_a_budget_of_reasoning_is_held_by_the_grammar(
    thinker: RunningApp, path: str, fields: Json
) -> None:
    assert thinker.post(path, {**BODIES[path], **fields}).status_code == 200
    grammar = thinker.engine.requests[-1].grammar
    assert grammar is not None and '"max_tokens":12' in grammar.text
    longer = json.loads(json.dumps(fields).replace("12", "50"))
    assert thinker.post(path, {**BODIES[path], **longer, "max_output_tokens": 50,
                               "max_tokens": 50}).status_code == 200  # fmt: skip
    grammar = thinker.engine.requests[-1].grammar
    assert grammar is None or "max_tokens" not in grammar.text


def test_a_conversation_of_another_effort_is_another_tree(thinker: RunningApp) -> None:
    history = [{"role": "user", "content": "two efforts"}]
    chat: Json = {"model": "default", "messages": history, "reasoning_effort": "high"}
    reply = thinker.post("/v1/chat/completions", chat).json()
    message = reply["choices"][0]["message"]
    del message["reasoning_content"]
    chat["messages"] = [*history, message, {"role": "user", "content": "more"}]
    thinker.post("/v1/chat/completions", chat)
    same = prompt_text(thinker)
    thinker.post("/v1/chat/completions", {**chat, "reasoning_effort": "low"})
    other = prompt_text(thinker)
    # The tokens of this server's own answer, reasoning and all, stand in the first alone.
    assert "Effort: high" in same and "Hm.\n</think>" in same
    assert "Effort: low" in other and "Hm." not in other


# What an answer may look like -------------------------------------------------------------


def test_several_choices_have_seeds_of_their_own_and_one_prompt(app: RunningApp) -> None:
    app.engine.script = says("One.", "Two.", "Three.")
    num_before = len(app.engine.requests)
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as client:
        reply = client.chat.completions.create(model="default", messages=USER, n=3, seed=2**63 - 1)
        asked = app.engine.requests[num_before:]
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        said = sorted(choice.message.content or "" for choice in reply.choices)
        assert said == ["One.", "Three.", "Two."]
        assert [r.sampling.seed for r in asked] == [2**63 - 1, -(2**63), 1 - 2**63]
        assert len({r.request_id for r in asked}) == 3
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(decode_ids(asked[0].token_ids))
        num_said = sum(len(ids_of(text)) + 1 for text in said)
        assert reply.usage.completion_tokens == num_said
        app.engine.script = says("One.", "Two.")
        chunks = list(
            client.chat.completions.create(model="default", messages=USER, n=2, stream=True)
        )
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert sorted(texts) == ["One.", "Two."]
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [0, 1]


def test_one_choice_that_fails_ends_them_all(app: RunningApp) -> None:
    app.engine.script = says("word " * 50)
    app.engine.fail_at = 5
    body = {**BODIES["/v1/chat/completions"], "n": 3}
    assert app.post("/v1/chat/completions", body).status_code == 500
    reply = app.post("/v1/chat/completions", {**body, "stream": True})
    assert '"error"' in reply.text and reply.text.endswith("data: [DONE]\n\n")


def test_several_prompts_are_completed_in_order_and_echoed(app: RunningApp) -> None:
    def script(request: Any) -> list[int]:
        return ids_of(f" {len(decode_ids(request.token_ids))}")

    app.engine.script = script
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as client:
        prompts = ["a b", "a b c d e"]
        reply = client.completions.create(model="default", prompt=prompts, n=2, echo=True)
        lens = [len(ids_of(text)) for text in prompts]
        assert [c.text for c in reply.choices] == [
            f"{text} {size}" for text, size in zip(prompts, lens, strict=True) for _ in range(2)
        ]
        assert reply.usage is not None and reply.usage.prompt_tokens == sum(lens)
        ids = client.completions.create(model="default", prompt=[ids_of("q"), ids_of("r s")],
                                        echo=True)  # fmt: skip
        assert [c.text for c in ids.choices] == ["q 1", "r s 2"]


@pytest.mark.parametrize(
    ("wanted", "node"),
    [
        ({"choice": ["yes", "no"]}, '{"type":"const_string","value":"yes"}'),
        ({"regex": "[0-9]{3}"}, '{"type":"regex","pattern":"[0-9]{3}"}'),
        ({"json": {"type": "object", "properties": {"q": {"type": "string"}}}}, '"json_schema"'),
        ({"json": '{"type": "integer"}'}, '"integer"'),
        ({"json_object": True}, '"json_schema"'),
    ],
)
def test_structured_outputs_are_held_by_the_grammar(
    app: RunningApp, wanted: Json, node: str
) -> None:
    body = {**BODIES["/v1/chat/completions"], "structured_outputs": wanted}
    assert app.post("/v1/chat/completions", body).status_code == 200
    grammar = app.engine.requests[-1].grammar
    assert grammar is not None and node in grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs"),
    ],
)  # fmt: skip
def test_structured_outputs_that_cannot_be_held_are_refused(
    app: RunningApp, fields: Json, param: str
) -> None:
    reply = app.post("/v1/chat/completions", {**BODIES["/v1/chat/completions"], **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_pattern_that_does_not_compile_is_never_loosened(app: RunningApp) -> None:
    app.engine.grammar_check = lambda spec: ("invalid_grammar", "no lookahead")
    body = {**BODIES["/v1/chat/completions"], "structured_outputs": {"regex": "(?=x)y"}}
    reply = app.post("/v1/chat/completions", body)
    assert app.error(reply) == (400, "invalid_schema", "structured_outputs.regex")
