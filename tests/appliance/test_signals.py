# SPDX-License-Identifier: Apache-2.0
"""Signals: what they answer, what they tell the engine; they are never more than advice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.holds import AFTER_A_TURN
from appliance.signals import expected_return
from engine.transport import unpack_ids
from tests.fakes.appliance import Json, RunningApp, says, until

TEXT = "a question long enough to fill a page or two of the cache " * 8
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
    assert (hint.hold_l1_ms, hint.hold_l2_ms, hint.hold_l3_ms) == (30_000, 3_600_000, 86_400_000)
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
    app.engine.hints.clear()
    app.engine.pause()
    with app.http.stream("POST", f"{path}/turns", json={"input": "b", "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        answer = app.post(f"{path}/signals", {"type": "tool.started"}).json()
        assert (answer["decision"], answer["reason"]) == ("ignored", "turn_running")
        app.engine.resume()
        list(lines)
    assert not [hint for hint in app.engine.hints if hint.expected_return != AFTER_A_TURN]


def moves(app: RunningApp) -> list[str]:
    return [move.tier for move in app.engine.moves if move.tier != "none"]


def wait_for_moves(app: RunningApp, *tiers: str) -> None:
    until(lambda: len(moves(app)) >= len(tiers))
    assert moves(app) == list(tiers)


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[RunningApp]:
    """An app whose L1 is short of room."""
    with RunningApp(tmp_path, says("Hello there.")) as app:
        app.engine.free_pages = 1
        yield app


def test_a_long_gap_under_pressure_goes_down_and_comes_back_in_time(tight: RunningApp) -> None:
    session_id = tight.session()
    tight.turn(session_id, TEXT)
    path = f"/v1/sessions/{session_id}/signals"
    short = tight.post(path, {"type": "tool.started", "eta_ms": 10_000}).json()
    assert short["decision"] == "keep" and moves(tight) == []
    answer = tight.post(path, {"type": "tool.started", "eta_ms": 40_000}).json()
    assert answer["decision"] == "demote_l2"
    wait_for_moves(tight, "l2")
    cache = tight.get(f"/v1/sessions/{session_id}/cache").json()["resident"]
    assert cache["l1"] == 0 < cache["l2"]
    answer = tight.post(path, {"type": "tool.returning"}).json()
    assert answer["decision"] == "prefetch"
    wait_for_moves(tight, "l2", "l1")
    answer = tight.post(path, {"type": "idle", "eta_ms": 7_200_000}).json()
    assert answer["decision"] == "demote_l3"
    wait_for_moves(tight, "l2", "l1", "l3")
    turn = tight.turn(session_id, "again")
    assert turn["x_cache"]["l3"] > 0 and turn["cache"]["miss"]["missed_tokens"] < 64


def test_a_prefetch_by_eta_comes_by_itself_and_not_for_a_session_that_is_back(
    tight: RunningApp,
) -> None:
    hold = {"l1": "1s", "l2": "60m"}
    one, two = (tight.session(cache={"hold": hold}) for _ in range(2))
    returns = tight.asgi.state.context.signals._returns
    for session_id, eta_ms in ((two, 60_000), (one, 1500)):
        tight.turn(session_id, TEXT)
        body = {"type": "tool.started", "eta_ms": eta_ms}
        path = f"/v1/sessions/{session_id}/signals"
        assert tight.post(path, body).json()["decision"] == "demote_l2"
        if session_id == two:
            assert two in returns
            tight.turn(two, "back already")
            assert two not in returns
    wait_for_moves(tight, "l2", "l2", "l1")
    time.sleep(0.3)
    assert moves(tight) == ["l2", "l2", "l1"]
    assert tight.turn(one, "x")["x_cache"]["l1"] > 0


def test_times_beyond_all_measure_are_as_good_as_for_ever(app: RunningApp) -> None:
    app.engine.hints.clear()
    session_id = app.session(cache={"hold": {"l1": "999999999d", "l2": "999999999d"}})
    app.turn(session_id, TEXT)
    body = {"type": "tool.started", "eta_ms": 2**63}
    path = f"/v1/sessions/{session_id}/signals"
    assert app.post(path, body).json()["decision"] == "keep"
    # The real engine takes holds of up to 2**40 ms.
    assert all(hint.hold_l1_ms < 2**40 > hint.hold_l2_ms for hint in app.engine.hints)


def test_a_tier_that_is_down_is_nowhere_to_go(tight: RunningApp) -> None:
    tight.engine.tier_states = {"l1": "up", "l2": "off", "l3": "down"}
    session_id = tight.session()
    tight.turn(session_id, TEXT)
    body = {"type": "idle", "eta_ms": 100_000}
    answer = tight.post(f"/v1/sessions/{session_id}/signals", body).json()
    assert answer["decision"] == "keep" and moves(tight) == []


def test_hold_times_are_told_after_each_use_and_to_the_next_engine(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        hold = {"l1": "5m", "l2": "20m", "l3": "2h"}
        session_id = app.session(cache={"hold": hold})
        app.turn(session_id, TEXT)
        assert app.get(f"/v1/sessions/{session_id}").json()["cache"]["hold"] == hold
        ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
        until(lambda: len(app.engine.hints) == 1)
        hint = app.engine.hints[0]
        assert unpack_ids(hint.token_ids).tolist() == ids
        assert 240_000 < hint.hold_l1_ms <= 300_000
        assert 1_140_000 < hint.hold_l2_ms <= 1_200_000
        assert 7_140_000 < hint.hold_l3_ms <= 7_200_000
        app.engine.restart()
        until(lambda: len(app.engine.hints) == 2)
        assert 0 < app.engine.hints[1].hold_l3_ms < hint.hold_l3_ms


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
