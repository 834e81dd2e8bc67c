# SPDX-License-Identifier: Apache-2.0
"""`on_disconnect: cancel`: a turn ends with its last reader, whoever that is, and not before."""

from __future__ import annotations

import contextlib

from tests.fakes.appliance import Json, RunningApp, sse_events, until


def ended(app: RunningApp, path: str, turn_id: str) -> Json:
    def look() -> Json:
        return dict(app.get(f"{path}/{turn_id}").json())

    until(lambda: look()["status"] not in ("queued", "running"))
    return look()


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
        assert ended(app, path, turn_id)["status"] == "cancelled"
        queue = app.asgi.state.context.turns.queue
        with app.caller(path, {"input": "three"}):
            until(lambda: queue.num_waiting == 1)
        until(lambda: queue.num_waiting == 0)
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
        turn_id = next(events)["turn_id"]
        with app.caller(path, {"input": "go"}, headers):
            until(lambda: app.num_readers(session_id, turn_id) == 2)
        until(lambda: app.num_readers(session_id, turn_id) == 1)
        app.engine.resume()
        assert list(events)[-1]["type"] == "turn.completed"


def test_a_plain_caller_that_hangs_up_leaves_the_turn_to_whoever_watches_its_events(
    app: RunningApp,
) -> None:
    app.engine.pause()
    session_id = app.session(on_disconnect="cancel")
    path = f"/v1/sessions/{session_id}/turns"

    def turn_id() -> str:
        return str(app.get(f"/v1/sessions/{session_id}").json()["current_turn"] or "")

    with contextlib.ExitStack() as watching:
        with app.caller(path, {"input": "go"}):
            until(lambda: bool(turn_id()))
            running = turn_id()
            until(lambda: app.num_readers(session_id, running) == 1)
            watcher = watching.enter_context(app.http.stream("GET", f"{path}/{running}/events"))
            events = sse_events(watcher)  # kept: the reader is gone with it
            next(events)
            assert app.num_readers(session_id, running) == 2
        until(lambda: app.num_readers(session_id, running) == 1)
        assert app.get(f"{path}/{running}").json()["status"] == "running"
    # The last one has gone now.
    assert ended(app, path, running)["status"] == "cancelled"
