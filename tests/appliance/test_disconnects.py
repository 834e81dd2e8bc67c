# SPDX-License-Identifier: Apache-2.0
"""`on_disconnect: cancel`: a turn ends with its last reader, whoever that is, and not before."""

from __future__ import annotations

import concurrent.futures
import time

import httpx
import pytest

from tests.fakes.appliance import Json, RunningApp, says, sse_events


def post_and_hang_up(
    app: RunningApp, path: str, body: Json, headers: dict[str, str] | None = None
) -> None:
    with httpx.Client(base_url=app.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post(path, json=body, headers=headers)


def ended(app: RunningApp, path: str, turn_id: str) -> Json:
    deadline = time.monotonic() + 20
    while (turn := app.get(f"{path}/{turn_id}").json())["status"] in ("queued", "running"):
        assert time.monotonic() < deadline, "the turn goes on"
        time.sleep(0.02)
    return dict(turn)


def test_a_queued_turn_whose_reader_has_left_never_runs(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue", on_disconnect="cancel")
    path = f"/v1/sessions/{session_id}/turns"
    body = {"input": "one", "stream": True}
    with app.http.stream("POST", path, json=body) as first:
        events = sse_events(first)
        next(events)
        num_requests = len(app.engine.requests)
        with app.http.stream("POST", path, json={"input": "two", "stream": True}) as second:
            turn_id = next(sse_events(second))["turn_id"]
        post_and_hang_up(app, path, {"input": "three"})
        assert ended(app, path, turn_id)["status"] == "cancelled"
        app.engine.resume()
        assert list(events)[-1]["type"] == "turn.completed"
    assert app.turn(session_id, "four")["status"] == "completed"
    assert len(app.engine.requests) <= num_requests + 2
    listed = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    assert [i["content"][0]["text"] for i in listed if i["role"] == "user"] == ["one", "four"]


def test_a_second_caller_under_the_same_key_that_hangs_up_leaves_the_turn_to_its_reader(
    app: RunningApp,
) -> None:
    app.engine.pause()
    session_id = app.session(on_disconnect="cancel")
    path = f"/v1/sessions/{session_id}/turns"
    headers = {"Idempotency-Key": "k"}
    body = {"input": "go", "stream": True}
    with app.http.stream("POST", path, json=body, headers=headers) as reply:
        events = sse_events(reply)
        next(events)
        post_and_hang_up(app, path, {"input": "go"}, headers)
        app.engine.resume()
        assert list(events)[-1]["type"] == "turn.completed"


def test_a_plain_caller_that_hangs_up_leaves_the_turn_to_whoever_watches_its_events(
    app: RunningApp,
) -> None:
    app.engine.script = says("word " * 400)
    app.engine.tokens_per_s = 100
    session_id = app.session(on_disconnect="cancel")
    path = f"/v1/sessions/{session_id}/turns"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        caller = pool.submit(post_and_hang_up, app, path, {"input": "go"})
        while (turn_id := app.get(f"/v1/sessions/{session_id}").json()["current_turn"]) is None:
            time.sleep(0.01)
        with app.http.stream("GET", f"{path}/{turn_id}/events") as watcher:
            events = sse_events(watcher)
            next(events)
            caller.result()
            time.sleep(0.3)
            assert app.get(f"{path}/{turn_id}").json()["status"] == "running"
    # The last one has gone now.
    assert ended(app, path, turn_id)["status"] == "cancelled"
