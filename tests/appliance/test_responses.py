# SPDX-License-Identifier: Apache-2.0
"""The Responses dialect, through OpenAI's own client, every event against its typed model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from appliance.api.responses_input import chat_messages_of, seal, unseal
from appliance.errors import ApiError
from appliance.response_store import ResponseStore, StoredResponse
from sessions.token_codec import count, decode_ids
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says, sse_events, until

TOOL: Json = {
    "type": "function",
    "name": "ls",
    "description": "List a folder",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
    "strict": False,
}
CALLS = (
    '<tool_call>[{"name": "ls", "arguments": {"path": "a"}}, '
    '{"name": "ls", "arguments": {"path": "b"}}]</tool_call>'
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BASE: Json = {"model": "default", "input": "Hi"}


@pytest.fixture
def client(app: RunningApp) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def raw_events(app: RunningApp, **fields: Any) -> list[Json]:
    """The events of a streamed answer, each checked strictly, numbered without a gap."""
    with app.http.stream("POST", "/v1/responses", json={**BASE, **fields, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        events = list(sse_events(reply))
    for number, event in enumerate(events):
        EVENT.validate_json(json.dumps(event), strict=True)
        assert event["sequence_number"] == number
    return events


def prompt_text(app: RunningApp) -> str:
    prompt = decode_ids(app.engine.requests[-1].token_ids)
    return default_assets().tokenizer.decode(prompt, with_control=True)


def test_an_answer_is_a_response_object(app: RunningApp, client: Any) -> None:
    reply = client.responses.create(**BASE, instructions="Be brief.", metadata={"a": "b"})
    Response.model_validate_json(reply.to_json(), strict=True)
    assert (reply.status, reply.output_text) == ("completed", "Hello there.")
    assert (reply.instructions, reply.metadata) == ("Be brief.", {"a": "b"})
    assert reply.usage.output_tokens == len(ids_of("Hello there.")) + 1
    num_prompt = count(app.engine.requests[-1].token_ids)
    again = client.responses.create(**BASE, instructions="Be brief.").usage
    assert again.input_tokens == num_prompt
    assert again.input_tokens_details.cached_tokens == num_prompt - 1


def test_a_stream_has_its_events_in_order(app: RunningApp) -> None:
    events = raw_events(app)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert final["output"][0]["content"][0]["text"] == "Hello there."
    assert {event["response"]["id"] for event in (events[0], events[1], events[-1])} == {
        final["id"]
    }


def test_text_and_calls_stream_as_items_and_end_as_the_whole_answer_has_them(
    app: RunningApp, client: Any
) -> None:
    app.engine.script = says(f"I look. {CALLS}")
    with client.responses.stream(**BASE, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in final.output[1:]] == ['{"path": "a"}', '{"path": "b"}']
    assert len({item.call_id for item in final.output[1:]}) == 2
    whole = client.responses.create(**BASE, tools=[TOOL])
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    kinds = [event["type"] for event in raw_events(app, tools=[TOOL])]
    assert kinds.count("response.function_call_arguments.done") == 2


def test_what_codex_sends_is_taken_and_its_history_is_rendered(app: RunningApp) -> None:
    tools = [
        TOOL,
        {"type": "namespace", "name": "mcp", "tools": []},
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    history: list[Json] = [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"path": "a"}'},
        {"type": "function_call", "call_id": "c2", "name": "ls", "arguments": '{"path": "b"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "x.py"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "y.py"}]},
    ]  # fmt: skip
    events = raw_events(
        app,
        instructions="You are Codex.",
        input=history,
        tools=tools,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
        service_tier="auto",
    )
    assert events[-1]["type"] == "response.completed"
    assert [tool["name"] for tool in events[-1]["response"]["tools"]] == ["ls"]
    text = prompt_text(app)
    assert text.count("<|im_start|>system") == 1
    assert text.index("You are Codex.") < text.index("Sandboxed.")
    assert "apply_patch" not in text and "gAAAA" not in text
    assert (
        'I look.<tool_call>[{"name": "ls", "arguments": {"path": "a"}}, '
        '{"name": "ls", "arguments": {"path": "b"}}]</tool_call><|im_end|>' in text
    )
    assert text.index("x.py") < text.index("y.py")


def test_a_schema_of_the_text_is_honoured(app: RunningApp, client: Any) -> None:
    app.engine.script = says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    reply = client.responses.create(**BASE, text=wanted)
    Response.model_validate_json(reply.to_json(), strict=True)
    assert json.loads(reply.output_text) == {"a": 1}
    assert app.engine.requests[-1].grammar is not None


def test_a_limit_ends_a_response_as_incomplete(app: RunningApp, client: Any) -> None:
    reply = client.responses.create(**BASE, max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].status == "incomplete"
    app.engine.script = says(CALLS)
    head = CALLS[: CALLS.index('"a"')]
    events = raw_events(app, max_output_tokens=len(ids_of(head)), tools=[TOOL])
    assert events[-1]["type"] == "response.incomplete"
    call = events[-1]["response"]["output"][-1]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    again = raw_events(app, previous_response_id=events[-1]["response"]["id"], tools=[TOOL])
    assert again[-1]["type"] == "response.completed"
    assert "arguments" not in prompt_text(app).split("Hi<|im_end|>", 1)[1]


def test_an_engine_error_ends_the_stream_as_failed(app: RunningApp) -> None:
    app.engine.fail_at = 1
    events = raw_events(app)
    assert [event["type"] for event in events][-1] == "response.failed"
    error = events[-1]["response"]["error"]
    assert (error["code"], error["x_code"]) == ("server_error", "internal_error")
    assert "it broke" in error["message"]
    assert events[-1]["response"]["output"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_at_once_has_a_status(app: RunningApp, stream: bool) -> None:
    app.engine.grammar_check = lambda spec: ("queue_full", "too many")
    body = {**BASE, "text": {"format": {"type": "json_object"}}, "stream": stream}
    reply = app.post("/v1/responses", body)
    assert app.error(reply)[:2] == (429, "queue_full")
    assert reply.headers["retry-after"] == "1"


def test_a_stored_response_is_continued(app: RunningApp, client: Any) -> None:
    app.engine.script = says("One.", "Two.", "Three.")
    first = client.responses.create(**BASE, instructions="Old rules.")
    second = client.responses.create(
        model="default", input="More", previous_response_id=first.id, instructions="New rules."
    )
    assert second.previous_response_id == first.id
    client.responses.create(model="default", input="End", previous_response_id=second.id)
    text = prompt_text(app)
    said = ["Hi<|im_end|>", "One.<|im_end|>", "More<|im_end|>", "Two.<|im_end|>", "End<|im_end|>"]
    places = [text.index(part) for part in said]
    assert places == sorted(places)
    assert "Old rules." not in text and "New rules." not in text
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(first.id)
    assert gone.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as lost:
        client.responses.create(**BASE, previous_response_id=first.id)
    assert (lost.value.code, lost.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_a_response_that_shall_not_be_stored_is_not(client: Any) -> None:
    reply = client.responses.create(**BASE, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_a_running_response_is_cancelled(app: RunningApp, client: Any) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    stream = client.responses.create(**BASE, stream=True)
    response_id = next(iter(stream)).response.id
    for event in stream:
        if event.type == "response.output_text.delta":
            assert client.responses.retrieve(response_id).status == "in_progress"
            assert client.responses.cancel(response_id).status == "cancelled"
            break
    rest = list(stream)
    assert rest[-1].type == "response.incomplete" and rest[-1].response.status == "cancelled"
    assert client.responses.retrieve(response_id).status == "cancelled"
    assert client.responses.cancel(response_id).status == "cancelled"
    assert response_id in app.engine.aborted


def test_a_reader_that_hangs_up_ends_its_response(app: RunningApp, client: Any) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    stream = client.responses.create(**BASE, stream=True)
    response_id = next(iter(stream)).response.id
    stream.close()
    until(lambda: client.responses.retrieve(response_id).status != "in_progress")
    assert client.responses.retrieve(response_id).status == "cancelled"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"background": True, "store": False}, "invalid_value", "background"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"top_logprobs": 3}, "unsupported_parameter", "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include[0]"),
        ({"input": [{"type": "item_reference"}]}, "missing_field", "input[0].id"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "unsupported_parameter", "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "ls", "arguments": "{}"}]},
         "missing_field", "input[0].call_id"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "rm"}},
         "invalid_tool_choice", "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_schema", "text.format.type"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"input": "word " * 9000}, "context_length_exceeded", "input"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_path(
    app: RunningApp, fields: Json, code: str, param: str
) -> None:
    reply = app.post("/v1/responses", {**BASE, **fields})
    assert app.error(reply) == (400, code, param)


def test_items_in_a_row_are_one_message_of_the_assistant() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "ok"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    chat = chat_messages_of([thought, said, call, result, thought, call])
    assert [message["role"] for message in chat] == ["assistant", "tool", "assistant"]
    assert (chat[0]["reasoning_content"], chat[0]["content"]) == ("hm", "ok")
    assert [m.get("reasoning_content") for m in chat] == ["hm", None, "hm"]
    assert [len(m.get("tool_calls", ())) for m in chat] == [1, 0, 1]


def test_sealed_reasoning_is_read_back_and_foreign_seals_are_lost() -> None:
    assert unseal(seal("über\n")) == "über\n"
    assert unseal("gAAAAB") == "" and unseal("moorage.v1.!") == ""


def test_the_store_is_bounded_by_number_size_age_and_tenant() -> None:
    now = [0.0]
    store = ResponseStore(max_responses=2, max_bytes=1000, ttl_s=10.0, clock_s=lambda: now[0])

    def put(name: str, text: str = "", tenant: str = "t", status: str = "completed") -> None:
        wire = {"id": name, "status": status, "text": text}
        store.put(StoredResponse(tenant=tenant, wire=wire))

    def has(name: str, tenant: str = "t") -> bool:
        try:
            return store.get(tenant, name).id == name
        except ApiError:
            return False

    for name in ("a", "b", "c"):
        put(name)
    assert [has(name) for name in "abc"] == [False, True, True]
    assert not has("c", tenant="other")
    put("d", "x" * 900)
    assert [has(name) for name in "bcd"] == [False, True, True]
    put("e", "x" * 500)
    assert [has(name) for name in "cde"] == [False, False, True]
    now[0] = 10.0
    assert not has("e")
    put("f", status="in_progress")
    for name in ("g", "h", "i"):
        put(name)
    now[0] = 20.0
    assert [has(name) for name in "fghi"] == [True, False, False, False]


TOOLS = [{"type": "function", "name": "ls", "parameters": {"type": "object"}}]


def test_stored_items_may_be_referred_to(app: RunningApp, client: Any) -> None:
    """The prompt is the one with the items themselves; a call's result finds its call."""
    app.engine.script = says(
        'Looking.<tool_call>[{"name": "ls", "arguments": {}}]</tool_call>', "Done."
    )
    ask: Json = {"model": "default", "tools": TOOLS}
    first = client.responses.create(**ask, input="look")
    said, call = first.output
    assert (said.type, call.type) == ("message", "function_call")
    asked = client.responses.input_items.list(first.id).data[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "x.py"}
    full = [{"role": "user", "content": "look"}, said.model_dump(), call.model_dump(), result]
    refs = [{"type": "item_reference", "id": item.id} for item in (asked, said, call)]
    client.responses.create(**ask, input=full)
    whole = prompt_text(app)
    second = client.responses.create(**ask, input=[*refs, result])
    assert prompt_text(app) == whole and "x.py" in whole and "Looking." in whole
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in listed][:3] == [asked.id, said.id, call.id]
    # An item is known as long as a response holds it.
    client.responses.delete(first.id)
    third = client.responses.create(**ask, input=[*refs, result])
    client.responses.delete(second.id)
    client.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(**ask, input=[*refs, result])
    assert (refused.value.code, refused.value.param) == ("item_not_found", "input[0].id")


def test_items_of_another_tenant_are_not_there(tmp_path: Path) -> None:
    settings = {"server": {"api_keys": {"ka": "a", "kb": "b"}}}
    with RunningApp(tmp_path, settings=settings) as app:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("ka", "kb")]
        body: Json = {"model": "default", "input": "x"}
        # The second tenant's own item of the same id is in nobody's way.
        made = app.post("/v1/responses", body, headers=keys[0]).json()["output"][0]["id"]
        taken = {"role": "user", "content": "y", "id": made}
        app.post("/v1/responses", {**body, "input": [taken]}, headers=keys[1])
        refer = {**body, "input": [{"type": "item_reference", "id": made}]}
        assert app.post("/v1/responses", refer, headers=keys[0]).status_code == 200
        assert "Hello there." in prompt_text(app)
        assert app.post("/v1/responses", refer, headers=keys[1]).status_code == 200
        assert "Hello there." not in prompt_text(app)


def test_the_store_forgets_the_items_of_what_it_drops() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(20):
        items = [{"id": f"in_{number}", "type": "message"}]
        wire = {"id": f"resp_{number}", "status": "completed", "output": [{"id": f"o_{number}"}]}
        store.put(StoredResponse(tenant="t", wire=wire, input_items=items))
    assert store.item("t", "o_19") == {"id": "o_19"}
    assert store.item("t", "in_18") is not None and store.item("t", "in_2") is None
    assert len(store._owners) == 6
