# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the session API: status, code and the path of the field at fault; the session
stays usable after each, and nothing that was refused reached the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.appliance import Json, RunningApp, says

TURN_CASES: list[tuple[str, Json, int, str, str | None]] = [
    ("unknown field", {"input": "x", "temprature": 1}, 400, "unknown_field", "temprature"),
    ("wrong type", {"input": "x", "stream": "yes"}, 400, "invalid_type", "stream"),
    ("number as text", {"input": "x", "max_output_tokens": "5"}, 400, "invalid_type",
     "max_output_tokens"),
    ("input no list", {"input": 5}, 400, "invalid_type", "input"),
    ("out of range", {"input": "x", "top_p": 0}, 400, "invalid_value", "top_p"),
    ("no output", {"input": "x", "max_output_tokens": 0}, 400, "invalid_value",
     "max_output_tokens"),
    ("item type", {"input": [{"type": "image", "url": "x"}]}, 400, "unknown_item_type",
     "input[0].type"),
    ("part type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400,
     "unknown_item_type", "input[0].content[0].type"),
    ("item field", {"input": [{"role": "user", "content": "x", "nmae": "y"}]}, 400,
     "unknown_field", "input[0].nmae"),
    ("item no object", {"input": ["x"]}, 400, "invalid_type", "input[0]"),
    ("role", {"input": [{"role": "robot", "content": "x"}]}, 400, "invalid_type",
     "input[0].role"),
    ("call id", {"input": [{"type": "function_call_output", "call_id": "call_x", "output": "y"}]},
     422, "unknown_call_id", "input[0].call_id"),
    ("empty stop", {"input": "x", "stop": [""]}, 400, "invalid_value", "stop"),
    ("response format", {"input": "x", "response_format": {"type": "yaml"}}, 400,
     "invalid_schema", "response_format.type"),
    ("response schema", {"input": "x", "response_format": {"type": "json_schema",
     "json_schema": {"schema": {"type": "objekt"}}}}, 400, "invalid_schema",
     "response_format.json_schema.schema.type"),
    ("tool choice", {"input": "x", "tool_choice": "sometimes"}, 400, "invalid_tool_choice",
     "tool_choice"),
    ("named tool", {"input": "x", "tool_choice": {"type": "function", "name": "rm"}}, 400,
     "invalid_tool_choice", "tool_choice.name"),
    ("required without tools", {"input": "x", "tool_choice": "required"}, 400,
     "invalid_tool_choice", "tool_choice"),
    ("revision", {"input": "x", "expect_revision": 99}, 409, "revision_conflict",
     "expect_revision"),
    ("nothing to answer", {"input": [], "tool_choice": "none"}, 400, "invalid_value", "input"),
    ("too long", {"input": "word " * 9000}, 400, "context_length_exceeded", "input"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("case", TURN_CASES, ids=[case[0] for case in TURN_CASES])
def test_a_bad_turn_is_refused_and_the_session_stays_usable(
    app: RunningApp, case: tuple[str, Json, int, str, str | None], stream: bool
) -> None:
    _, body, status, code, param = case
    session_id = app.session()
    num_requests = len(app.engine.requests)
    if "stream" not in body:
        body = {**body, "stream": stream}
    reply = app.post(f"/v1/sessions/{session_id}/turns", body)
    assert app.error(reply) == (status, code, param)
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert len(app.engine.requests) == num_requests
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert (session["revision"], session["status"], session["num_tokens"]) == (0, "idle", 0)
    assert app.turn(session_id, "hello")["status"] == "completed"


CREATE_CASES: list[tuple[str, Json, int, str, str | None]] = [
    ("model", {"model": "gpt-9"}, 404, "model_not_found", "model"),
    ("no model", {}, 400, "missing_field", "model"),
    ("unknown field", {"model": "default", "cache": {"hodl": {}}}, 400, "unknown_field",
     "cache.hodl"),
    ("hold", {"model": "default", "cache": {"hold": {"l1": "soon"}}}, 400, "invalid_setting",
     "cache.hold.l1"),
    ("expiry", {"model": "default", "expires_after": "7 days"}, 400, "invalid_setting",
     "expires_after"),
    ("tool name", {"model": "default", "tools": [{"type": "function", "name": "a b"}]}, 400,
     "invalid_schema", "tools[0].name"),
    ("tool schema", {"model": "default", "tools": [{"type": "function", "name": "f",
     "parameters": {"type": "object", "properties": {"p": {"type": "strng"}}}}]}, 400,
     "invalid_schema", "tools[0].parameters.properties.p.type"),
    ("two tools of one name", {"model": "default", "tools": [{"type": "function", "name": "f"},
     {"type": "function", "name": "f"}]}, 400, "invalid_schema", "tools[1].name"),
    ("initial items", {"model": "default", "initial_items": [{"type": "video"}]}, 400,
     "unknown_item_type", "initial_items[0].type"),
    ("parent", {"model": "default", "parent_session_id": "sess_x"}, 404, "session_not_found",
     "parent_session_id"),
    ("metadata", {"model": "default", "metadata": {"n": 1}}, 400, "invalid_type", "metadata.n"),
    ("conflict policy", {"model": "default", "on_conflict": "wait"}, 400, "invalid_value",
     "on_conflict"),
    ("no such switch", {"model": "default", "reasoning": {"effort": "high"}}, 400,
     "unsupported_parameter", "reasoning.effort"),
    ("effort", {"model": "default", "reasoning": {"effort": "huge"}}, 400, "invalid_value",
     "reasoning.effort"),
    ("too long", {"model": "default", "instructions": "word " * 9000}, 400,
     "context_length_exceeded", "initial_items"),
]  # fmt: skip


@pytest.mark.parametrize("case", CREATE_CASES, ids=[f"{c[0]}-{c[4]}" for c in CREATE_CASES])
def test_a_bad_session_is_refused(
    app: RunningApp, case: tuple[str, Json, int, str, str | None]
) -> None:
    _, body, status, code, param = case
    assert app.error(app.post("/v1/sessions", body)) == (status, code, param)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("POST", "", {"priority": 1}),
        ("GET", "/items", None),
        ("GET", "/tokens", None),
        ("GET", "/cache", None),
        ("GET", "/turns", None),
        ("POST", "/turns", {"input": "x"}),
        ("POST", "/items", {"items": "x"}),
        ("POST", "/fork", {}),
        ("GET", "/turns/turn_x", None),
        ("GET", "/turns/turn_x/events", None),
        ("POST", "/turns/turn_x/cancel", None),
    ],
)
def test_an_unknown_session_is_404(app: RunningApp, method: str, path: str, body: Any) -> None:
    reply = app.http.request(method, f"/v1/sessions/sess_unknown{path}", json=body)
    assert app.error(reply)[:2] == (404, "session_not_found")


@pytest.mark.parametrize("path", ["", "/events"])
def test_an_unknown_turn_is_404(app: RunningApp, path: str) -> None:
    reply = app.get(f"/v1/sessions/{app.session()}/turns/turn_unknown{path}")
    assert app.error(reply)[:2] == (404, "turn_not_found")


@pytest.mark.parametrize("at", ["turn_unknown", "item_unknown"])
def test_a_fork_at_an_unknown_point_is_404(app: RunningApp, at: str) -> None:
    reply = app.post(f"/v1/sessions/{app.session()}/fork", {"at": at})
    assert reply.status_code == 404


def test_malformed_json_is_named_as_such(app: RunningApp) -> None:
    path = f"/v1/sessions/{app.session()}/turns"
    reply = app.http.post(path, content=b'{"input": ', headers={"Content-Type": "application/json"})
    assert app.error(reply)[:2] == (400, "invalid_json")
    reply = app.http.post(path, content=b"[1]", headers={"Content-Type": "application/json"})
    assert app.error(reply)[:2] == (400, "invalid_type")


def test_unresolved_tool_calls_are_named_and_may_be_closed_on_request(app: RunningApp) -> None:
    tool = {"type": "function", "name": "ls", "parameters": {"type": "object", "properties": {}}}
    app.engine.script = says('<tool_call>[{"name": "ls", "arguments": {}}]</tool_call>', "ok")
    session_id = app.session(tools=[tool])
    call_id = app.turn(session_id, "go", tool_choice="required")["output"][0]["call_id"]
    reply = app.post(f"/v1/sessions/{session_id}/turns", {"input": "never mind"})
    assert app.error(reply) == (422, "unresolved_tool_calls", "input")
    assert reply.json()["error"]["call_ids"] == [call_id]
    reply = app.post(f"/v1/sessions/{session_id}/items", {"items": "never mind"})
    assert app.error(reply) == (422, "unresolved_tool_calls", "items")
    turn = app.turn(session_id, "never mind", auto_close_calls=True)
    assert turn["input"][0]["status"] == "interrupted"
    assert turn["input"][0]["call_id"] == call_id


def test_a_second_turn_while_one_runs_is_409_with_the_turn_s_id(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session()
    body = {"input": "x", "stream": True}
    with app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as first:
        turn_id = first.headers["x-turn-id"]
        for path, second in (("turns", {"input": "y"}), ("items", {"items": "y"})):
            reply = app.post(f"/v1/sessions/{session_id}/{path}", second)
            assert app.error(reply)[:2] == (409, "turn_in_progress")
            assert reply.json()["error"]["turn_id"] == turn_id
        reply = app.post(f"/v1/sessions/{session_id}", {"instructions": "new"})
        assert app.error(reply)[:2] == (409, "turn_in_progress")
        app.engine.resume()
        first.read()
    assert app.turn(session_id, "y")["status"] == "completed"


def test_an_unknown_route_and_method_answer_in_the_same_envelope(app: RunningApp) -> None:
    assert app.error(app.get("/v1/nothing"))[:2] == (404, "not_found")
    for path, methods in (
        ("/v1/sessions", "GET, POST"),
        ("/v1/sessions/sess_x", "DELETE, GET, POST"),
        ("/v1/chat/completions", "POST"),
        ("/v1/messages", "POST"),
        ("/health", "GET"),
    ):
        reply = app.http.put(path)
        assert reply.status_code == 405
        assert reply.json()["error"]["message"].endswith(f"(allowed: {methods})")
        assert reply.headers["Allow"] == methods


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("turns", {"input": {"role": "user"}},
         'input: expected an array or a string; got {"role": "user"}'),
        ("turns", {"input": "x", "stop": 5}, "stop: expected a string or an array; got 5"),
        ("turns", {"input": "x", "top_p": "1"}, 'top_p: expected a number; got "1"'),
        ("turns", {"input": "x", "stream": None}, "stream: expected true or false; got null"),
        ("turns", {"input": "x", "top_k": 1.5}, "top_k: expected an integer; got 1.5"),
        ("turns", [True], "body: expected an object; got [true]"),
        ("/v1/chat/completions", {"model": "default", "messages": "x"},
         'messages: expected an array; got "x"'),
        ("/v1/sessions", {"model": "default", "metadata": []},
         "metadata: expected an object; got []"),
        ("turns", {"input": "x", "max_tokens": 5},
         "max_tokens: unknown field (hint: did you mean max_output_tokens?)"),
        ("/v1/sessions", {"model": "default", "cache": {"hodl": {}}},
         "cache.hodl: unknown field (hint: did you mean hold?)"),
        ("/v1/sessions", {"model": "default", "cache": {"lease": {"ttl": "1m", "x": 1}}},
         "cache.lease.x: unknown field (known: tier, ttl, renew_on_use)"),
        ("fork", {"when": "head"}, "when: unknown field (known: at, n, metadata)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_refusal_says_what_was_expected_in_words_of_json(
    app: RunningApp, path: str, body: Any, message: str
) -> None:
    where = path if path.startswith("/") else f"/v1/sessions/{app.session()}/{path}"
    reply = app.http.post(where, json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


def test_a_browser_is_led_to_the_page_and_nowhere_else(app: RunningApp) -> None:
    reply = app.get("/")
    assert (reply.status_code, reply.headers["Location"]) == (307, "/dashboard")
    for path in ("/docs", "/redoc"):  # pages that would run scripts from another origin
        assert app.error(app.get(path))[:2] == (404, "not_found")
    assert app.get("/openapi.json").json()["info"]["title"] == "Moorage"


def test_a_cursor_that_is_no_number_is_refused(app: RunningApp) -> None:
    session_id = app.session()
    turn_id = app.turn(session_id)["id"]
    path = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
    assert app.error(app.get(path, headers={"Last-Event-ID": "abc"}))[:2] == (400, "invalid_value")
    reply = app.get(path, params={"starting_after": "abc"})
    assert app.error(reply) == (400, "invalid_type", "starting_after")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_that_is_not_called_json_is_told_how_to_be(
    app: RunningApp, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for path in ("/v1/sessions", "/v1/chat/completions"):
        reply = app.http.post(path, content=b'{"model": "m"}', headers=headers)
        assert app.error(reply)[:2] == (400, "invalid_type")
        assert "Content-Type: application/json" in reply.json()["error"]["message"]


def test_a_session_past_its_time_is_410(app: RunningApp) -> None:
    session_id = app.session(expires_after="1ms")
    reply = app.post(f"/v1/sessions/{session_id}/turns", {"input": "x"})
    assert app.error(reply)[:2] == (410, "session_expired")


def test_a_session_past_its_time_is_expired_before_any_sweep(app: RunningApp) -> None:
    session_id = app.session(expires_after="1ms")
    path = f"/v1/sessions/{session_id}"
    assert app.get(path).json()["status"] == "expired"
    listed = app.get("/v1/sessions").json()["data"]
    assert next(s for s in listed if s["id"] == session_id)["status"] == "expired"
    asks: list[tuple[str, Json]] = [
        ("", {"priority": 1}),
        ("/fork", {}),
        ("/items", {"items": "x"}),
        ("/rollback", {"to": 0}),
        ("/turns", {"input": "x"}),
        ("/leases", {"ttl": "5s"}),
        ("/signals", {"type": "idle"}),
        ("/compact", {}),
        ("/suspend", {}),
        ("/resume", {}),
    ]
    for end, body in asks:
        assert app.error(app.post(path + end, body))[:2] == (410, "session_expired"), end
    assert app.http.delete(path).status_code == 200


def test_a_tool_choice_that_no_turn_could_follow_is_refused_when_it_is_set(
    app: RunningApp,
) -> None:
    tool = {"type": "function", "name": "ls", "parameters": {"type": "object", "properties": {}}}
    for choice, param in (("bogus", "tool_choice"), ({"type": "function", "name": "rm"}, None)):
        body = {"model": "default", "tools": [tool], "tool_choice": choice}
        reply = app.post("/v1/sessions", body)
        assert app.error(reply)[:2] == (400, "invalid_tool_choice")
        assert app.error(reply)[2] == (param or "tool_choice.name")
    session_id = app.session(tools=[tool], tool_choice={"type": "function", "name": "ls"})
    path = f"/v1/sessions/{session_id}"
    for change in ({"tool_choice": "bogus"}, {"tools": []}):
        assert app.error(app.post(path, change))[:2] == (400, "invalid_tool_choice")
    assert app.post(path, {"tool_choice": "auto", "tools": []}).status_code == 200


def test_one_stop_string_too_many_is_named_as_such(app: RunningApp) -> None:
    stops = [f"s{number}" for number in range(17)]
    reply = app.post(f"/v1/sessions/{app.session()}/turns", {"input": "x", "stop": stops})
    assert app.error(reply) == (400, "invalid_value", "stop")
    assert "16" in reply.json()["error"]["message"]
    reply = app.post(f"/v1/sessions/{app.session()}/turns", {"input": "x", "stop": [1]})
    assert app.error(reply)[1] == "invalid_type"


def test_the_dialects_name_their_own_fields(app: RunningApp) -> None:
    long = app.post("/v1/completions", {"model": "default", "prompt": "word " * 9000})
    assert app.error(long) == (400, "context_length_exceeded", "prompt")
    for role in ("user", "system", "tool"):
        body = {"model": "default", "messages": [{"role": role}]}
        reply = app.post("/v1/chat/completions", body)
        assert app.error(reply) == (400, "missing_field", "messages[0].content")
    reply = app.post("/detokenize", {"tokens": [1, 49152]})
    assert app.error(reply) == (400, "invalid_value", "tokens[1]")
    assert "49151" in reply.json()["error"]["message"]
    items = app.post(f"/v1/sessions/{app.session()}/items", {"items": []})
    assert app.error(items) == (400, "invalid_value", "items")


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/sessions?statuz=idle", "statuz"),
        ("GET", "/v1/sessions?metadata=x", "metadata"),
        ("GET", "/v1/sessions?metadata[]=x", "metadata[]"),
        ("GET", "/v1/sessions/{id}?metadata[a]=1", "metadata[a]"),
        ("DELETE", "/v1/sessions/{id}?release=1", "release"),
        ("GET", "/v1/sessions/{id}/items?offset=1", "offset"),
        ("POST", "/v1/sessions/{id}/turns?stream=true", "stream"),
        ("GET", "/v1/sessions/{id}/turns/turn_x/events?after=1", "after"),
        ("POST", "/v1/sessions/{id}/fork?n=3", "n"),
        ("GET", "/v1/sessions/{id}/cache?tier=l1", "tier"),
        ("GET", "/admin/cache/tree?nodes=3", "nodes"),
    ],
)
def test_a_query_parameter_that_nobody_knows_is_refused_and_not_ignored(
    app: RunningApp, method: str, path: str, param: str
) -> None:
    session_id = app.session()
    reply = app.http.request(
        method, path.format(id=session_id), json={} if method == "POST" else None
    )
    assert app.error(reply) == (400, "unknown_field", param), reply.text
    assert app.get(f"/v1/sessions/{session_id}").status_code == 200


def test_a_list_goes_on_after_any_session_and_after_nothing_else(app: RunningApp) -> None:
    first, second = app.session(), app.session()
    app.http.delete(f"/v1/sessions/{second}")  # went between two pages
    page = app.get("/v1/sessions", params={"after": second, "limit": 1}).json()
    assert page["data"][0]["id"] == first
    reply = app.get("/v1/sessions", params={"after": "zzz"})
    assert app.error(reply) == (400, "invalid_value", "after")


@pytest.mark.parametrize("unknown", ["item_x", "turn_x", "x", "\0"])
def test_a_point_of_the_history_that_is_not_there_is_blamed_on_its_field(
    app: RunningApp, unknown: str
) -> None:
    path = f"/v1/sessions/{app.session()}"
    for reply, field in (
        (app.post(f"{path}/fork", {"at": unknown}), "at"),
        (app.post(f"{path}/rollback", {"to": unknown}), "to"),
        (app.post(f"{path}/leases", {"ttl": "5m", "upto": unknown}), "upto"),
        (app.get(f"{path}/items", params={"after": unknown}), "after"),
    ):
        assert app.error(reply)[0] == 404
        assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/sessions/" + "s" * 20_000, None),
        ("POST", "/v1/sessions", {"model": "default", "metadata": {"k" * 20_000: "v"}}),
        ("POST", "/v1/sessions", {"model": "default", "parent_session_id": "s" * 20_000}),
        ("POST", "/v1/messages", {"model": "m" * 20_000, "max_tokens": 1, "messages": []}),
        ("POST", "/v1/chat/completions", {"model": "m" * 20_000, "messages": []}),
    ],
)
def test_what_was_sent_is_shown_in_part(
    app: RunningApp, method: str, path: str, body: Json | None
) -> None:
    reply = app.http.request(method, path, json=body)
    assert 400 <= reply.status_code < 500
    assert 20 < len(reply.json()["error"]["message"]) <= 2000
