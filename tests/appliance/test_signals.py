# SPDX-License-Identifier: Apache-2.0
"""Signals: what they answer, what they tell the engine; they are never more than advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.signals import expected_return
from engine.transport import unpack_ids
from tests.fakes.appliance import Json, RunningApp, says

TOOL: Json = {"type": "function", "name": "ls"}
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("kind", "chance"),
    [
        ("tool.started", 0.9),
        ("tool.progress", 0.9),
        ("tool.returning", 1.0),
        ("user.active", 1.0),
        ("idle", 0.25),
    ],
)
def test_a_signal_keeps_what_is_cached_and_weighs_it(
    app: RunningApp, kind: str, chance: float
) -> None:
    session_id = app.session()
    app.turn(session_id, "a")
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    answer = app.post(f"/v1/sessions/{session_id}/signals", {"type": kind}).json()
    assert (answer["decision"], answer["reason"]) == ("keep", None)
    assert answer["cached_tokens"] == len(ids) - 1
    hint = app.engine.hints[-1]
    assert hint.expected_return == chance
    assert unpack_ids(hint.token_ids).tolist() == ids


def test_a_tool_that_takes_longer_than_the_hold_is_no_reason_to_keep_others_out() -> None:
    assert expected_return("tool.started", 30_001, 30_000) == 0.5
    assert expected_return("tool.started", 30_000, 30_000) == 0.9
    assert expected_return("idle", 10**9, 30_000) == 0.25


def test_a_signal_that_changes_nothing_says_so(app: RunningApp) -> None:
    session_id = app.session()
    path = f"/v1/sessions/{session_id}"
    app.turn(session_id, "a")
    app.engine._cached.clear()
    answer = app.post(f"{path}/signals", {"type": "user.active"}).json()
    assert (answer["decision"], answer["reason"]) == ("ignored", "not_resident")
    num_hints = len(app.engine.hints)
    app.engine.pause()
    with app.http.stream("POST", f"{path}/turns", json={"input": "b", "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        answer = app.post(f"{path}/signals", {"type": "tool.started"}).json()
        assert (answer["decision"], answer["reason"]) == ("ignored", "turn_running")
        app.engine.resume()
        list(lines)
    assert len(app.engine.hints) == num_hints


def test_a_call_that_is_not_open_is_refused(app: RunningApp) -> None:
    app.engine.script = says(CALL, "done")
    session_id = app.session(tools=[TOOL])
    turn = app.turn(session_id, "list")
    call_id = turn["output"][-1]["call_id"]
    path = f"/v1/sessions/{session_id}/signals"
    body = {"type": "tool.started", "call_id": call_id, "tool_name": "ls", "eta_ms": 5000}
    assert app.post(path, body).json()["decision"] == "keep"
    reply = app.post(path, {**body, "call_id": "call_x"})
    assert app.error(reply) == (422, "unknown_call_id", "call_id")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_field", "type"),
        ({"type": "tool.exploded"}, "invalid_value", "type"),
        ({"type": "idle", "eta_ms": -1}, "invalid_value", "eta_ms"),
        ({"type": "idle", "eta": 1}, "unknown_field", "eta"),
    ],
)
def test_a_bad_signal_is_refused(app: RunningApp, body: Json, code: str, param: str) -> None:
    session_id = app.session()
    reply = app.post(f"/v1/sessions/{session_id}/signals", body)
    assert app.error(reply) == (400, code, param)


def test_without_an_engine_a_signal_is_ignored(tmp_path: Path) -> None:
    with RunningApp(tmp_path) as app:
        session_id = app.session()
        app.turn(session_id, "a")
        app.engine.stop()
        answer = app.post(f"/v1/sessions/{session_id}/signals", {"type": "idle"}).json()
        assert (answer["decision"], answer["reason"]) == ("ignored", "engine_unavailable")
