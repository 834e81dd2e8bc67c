# SPDX-License-Identifier: Apache-2.0
"""Responses that go on without a reader, and what may be asked of stored ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.fakes.appliance import Json, RunningApp, says, sse_events, until

BASE: Json = {"model": "default", "input": "Hi"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(app: RunningApp) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def when(client: Any, response_id: str, is_so: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 60
    while not is_so(found := client.responses.retrieve(response_id)):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_it_is_answered_at_once_and_read_when_it_is_done(app: RunningApp, client: Any) -> None:
    app.engine.pause()
    reply = client.responses.create(**BASE, background=True)
    Response.model_validate_json(reply.to_json(), strict=True)
    assert (reply.status, reply.background, reply.output) == ("queued", True, [])
    assert reply.usage is None
    when(client, reply.id, lambda found: found.status == "in_progress")
    with pytest.raises(openai.BadRequestError) as early:
        client.responses.create(**BASE, previous_response_id=reply.id)
    assert early.value.param == "previous_response_id"
    app.engine.resume()
    done = when(client, reply.id, lambda found: found.status == "completed")
    assert done.output_text == "Hello there." and done.usage.output_tokens > 0
    assert client.responses.create(**BASE, previous_response_id=reply.id).status == "completed"


def test_its_stream_outlives_its_reader_and_is_read_again_from_any_event(
    app: RunningApp, client: Any
) -> None:
    app.engine.script = says("one two three four five six seven eight")
    app.engine.hold_at = 3
    stream = client.responses.create(**BASE, background=True, stream=True)
    seen = [next(iter(stream)) for _ in range(5)]
    response_id = seen[0].response.id
    stream.close()
    app.engine.hold_at = None
    with client.responses.retrieve(response_id, stream=True, starting_after=3) as again:
        rest = list(again)
    assert [event.sequence_number for event in rest] == list(range(4, 4 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "one two three four five six seven eight"
    path = f"/v1/responses/{response_id}?stream=true"
    with app.http.stream("GET", path) as reply:
        whole = list(sse_events(reply))
    for event in whole:
        EVENT.validate_json(json.dumps(event), strict=True)
    assert [event["sequence_number"] for event in whole] == list(range(4 + len(rest)))
    reader = app.get(f"/v1/responses/{client.responses.create(**BASE).id}?stream=true")
    assert app.error(reply=reader) == (400, "unsupported_parameter", "stream")


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("verb", ["cancel", "delete"])
def test_it_stops_when_it_is_told_to(
    app: RunningApp, client: Any, verb: str, is_paused: bool
) -> None:
    app.engine.script = says("word " * 2000)
    app.engine.hold_at = 5
    if is_paused:
        app.engine.pause()
    response_id = client.responses.create(**BASE, background=True).id
    if not is_paused:
        when(client, response_id, lambda found: found.status == "in_progress")
    if verb == "cancel":
        assert client.responses.cancel(response_id).status == "cancelled"
    else:
        client.responses.delete(response_id)
    app.engine.resume()
    until(lambda: response_id in app.engine.aborted)
    if verb == "cancel":
        with client.responses.retrieve(response_id, stream=True) as stream:
            last = list(stream)[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert client.responses.retrieve(response_id).status == "cancelled"


def test_a_whole_answer_that_is_cancelled_from_elsewhere_says_so(
    app: RunningApp, client: Any
) -> None:
    app.engine.pause()
    num_before = len(app.engine.requests)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.responses.create, **BASE)
        until(lambda: len(app.engine.requests) > num_before)
        response_id = app.engine.requests[-1].request_id
        assert client.responses.cancel(response_id).status == "cancelled"
        reply = asked.result(60)
    assert (reply.id, reply.status) == (response_id, "cancelled")


def test_one_that_the_engine_refuses_has_failed(app: RunningApp, client: Any) -> None:
    app.engine.grammar_check = lambda spec: ("queue_full", "too many")
    wanted = {"format": {"type": "json_object"}}
    response_id = client.responses.create(**BASE, background=True, text=wanted).id
    found = when(client, response_id, lambda found: found.status == "failed")
    assert found.error.code == "rate_limit_exceeded" and "too many" in found.error.message


def test_one_ends_with_its_process(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("word " * 2000)) as app:
        app.engine.hold_at = 5
        reply = app.post("/v1/responses", {**BASE, "background": True}).json()
        until(lambda: len(app.engine.requests) == 1)
        app.restart()
        until(lambda: reply["id"] in app.engine.aborted)
        assert app.get(f"/v1/responses/{reply['id']}").status_code == 404


def test_the_items_of_an_input_are_listed(app: RunningApp, client: Any) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "x.py"},
    ]
    response_id = client.responses.create(model="default", input=items).id
    listed = list(client.responses.input_items.list(response_id, order="asc", limit=2))
    assert [item.type for item in listed] == [item.get("type", "message") for item in items]
    assert listed[0].content[0].text == "Be brief." and listed[2].id == "rs_1"
    assert len({item.id for item in listed}) == 5 and listed[3].id.startswith("fc_")
    newest = client.responses.input_items.list(response_id).data
    assert [item.id for item in newest] == [item.id for item in listed][::-1]
    hello = client.responses.create(**BASE).id
    assert client.responses.input_items.list(hello).data[0].content[0].text == "Hi"
    path = f"/v1/responses/{response_id}/input_items"
    assert app.error(app.get(f"{path}?after=nobody"))[:2] == (404, "item_not_found")
    assert app.error(app.get(f"{path}?limit=0")) == (400, "invalid_value", "limit")


def test_the_tokens_of_an_input_are_counted_as_they_are_rendered(client: Any) -> None:
    tools = [{"type": "function", "name": "ls", "parameters": {"type": "object"}}]
    ask: Json = {**BASE, "instructions": "Be brief.", "tools": tools}
    counted = client.responses.input_tokens.count(**ask)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**ask).usage.input_tokens


def test_items_have_ids_by_their_kind(app: RunningApp, client: Any) -> None:
    call = '<tool_call>[{"name": "ls", "arguments": {}}]</tool_call>'
    app.engine.script = says(f"I look. {call}")
    tools = [{"type": "function", "name": "ls", "parameters": {"type": "object"}}]
    output = client.responses.create(**BASE, tools=tools).output
    assert [item.id.partition("_")[0] for item in output] == ["msg", "fc"]
    assert output[1].call_id.startswith("call_")
