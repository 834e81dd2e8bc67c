# SPDX-License-Identifier: Apache-2.0
"""What a second turn does while one runs: `queue` waits in line, `interrupt` stops the first."""

from __future__ import annotations

import concurrent.futures

import httpx

from tests.fakes.appliance import Json, RunningApp, says, sse_events, until


def start(app: RunningApp, session_id: str, text: str, upto: str = "turn.created") -> str:
    """Start a turn and leave it running behind its first event of this type; its id."""
    path = f"/v1/sessions/{session_id}/turns"
    with app.http.stream("POST", path, json={"input": text, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        return str(next(e for e in sse_events(reply) if e["type"] == upto)["turn_id"])


def follow(app: RunningApp, session_id: str, turn_id: str) -> list[Json]:
    path = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
    with app.http.stream("GET", path) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


def texts(app: RunningApp, session_id: str) -> list[str]:
    listed = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    return [item["content"][0]["text"] for item in listed if item["role"] == "user"]


def test_queued_turns_run_in_the_order_they_came(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    turn_ids = [start(app, session_id, text) for text in ("one", "two", "three")]
    waiting = app.get(f"/v1/sessions/{session_id}/turns/{turn_ids[2]}").json()
    assert waiting["status"] == "queued"
    app.engine.resume()
    for turn_id in turn_ids:
        events = follow(app, session_id, turn_id)
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(1, len(events) + 1))
        assert events[-1]["type"] == "turn.completed"
    kinds = [event["type"] for event in follow(app, session_id, turn_ids[2])]
    assert kinds[:3] == ["turn.created", "turn.queued", "turn.queued"]
    assert texts(app, session_id) == ["one", "two", "three"]
    # Each stands on all before it.
    assert app.turn(session_id, "four")["cache"]["miss"] is None


def test_a_queued_turn_may_be_cancelled_and_the_others_go_on(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    first, second, third = (start(app, session_id, text) for text in ("one", "two", "three"))
    path = f"/v1/sessions/{session_id}/turns/{second}"
    answer = app.post(f"{path}/cancel").json()
    assert (answer["status"], answer["committed_tokens"]) == ("cancelled", 0)
    assert app.get(path).json() == answer == app.post(f"{path}/cancel").json()
    assert follow(app, session_id, second)[-1]["turn"] == answer
    app.engine.resume()
    assert follow(app, session_id, third)[-1]["type"] == "turn.completed"
    assert texts(app, session_id) == ["one", "three"]
    assert follow(app, session_id, first)[-1]["type"] == "turn.completed"


def test_a_request_that_cannot_run_is_refused_at_once_and_stops_nobody(app: RunningApp) -> None:
    for policy in ("queue", "interrupt"):
        app.engine.pause()
        session_id = app.session(on_conflict=policy)
        turn_id = start(app, session_id, "one")
        reply = app.post(f"/v1/sessions/{session_id}/turns", {"input": "x", "stop": ""})
        assert app.error(reply) == (400, "invalid_value", "stop")
        app.engine.resume()
        assert follow(app, session_id, turn_id)[-1]["type"] == "turn.completed"


def test_a_queued_turn_whose_condition_fails_at_its_begin_fails_alone(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    start(app, session_id, "one")
    path = f"/v1/sessions/{session_id}/turns"
    body = {"input": "two", "expect_revision": 0}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(httpx.post, app.url + path, json=body, timeout=30)
        until(lambda: app.asgi.state.context.turns.queue.num_waiting == 1)
        third = start(app, session_id, "three")
        app.engine.resume()
        # By then the first turn has moved the session on to revision 1.
        assert app.error(second.result())[:2] == (409, "revision_conflict")
    assert follow(app, session_id, third)[-1]["type"] == "turn.completed"
    assert texts(app, session_id) == ["one", "three"]


def test_a_key_finds_its_turn_while_it_waits(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    start(app, session_id, "one")
    path = f"/v1/sessions/{session_id}/turns"
    headers = {"Idempotency-Key": "k"}
    seen = set()
    for _ in range(3):
        body = {"input": "two", "stream": True}
        with app.http.stream("POST", path, json=body, headers=headers) as reply:
            seen.add(next(sse_events(reply))["turn_id"])
    reply = app.post(path, {"input": "other"}, headers=headers)
    assert app.error(reply)[:2] == (422, "idempotency_key_reused")
    app.engine.resume()
    assert len(seen) == 1
    assert follow(app, session_id, seen.pop())[-1]["type"] == "turn.completed"
    assert texts(app, session_id) == ["one", "two"]


def test_closing_a_session_cancels_what_waits_in_it(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    start(app, session_id, "one")
    path = f"/v1/sessions/{session_id}/turns"
    with app.http.stream("POST", path, json={"input": "two", "stream": True}) as reply:
        events = sse_events(reply)
        next(events)
        assert app.http.delete(f"/v1/sessions/{session_id}").status_code == 200
        assert list(events)[-1]["type"] == "turn.cancelled"


def test_an_interrupting_turn_stops_the_running_one_and_keeps_its_text(app: RunningApp) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    session_id = app.session(on_conflict="interrupt")
    first = start(app, session_id, "one", "response.output_text.delta")
    app.engine.held.add(first)
    app.engine.script, app.engine.hold_at = says("Sure."), None
    turn = app.turn(session_id, "stop that")
    assert turn["status"] == "completed" and turn["cache"]["miss"] is None
    stopped = app.get(f"/v1/sessions/{session_id}/turns/{first}").json()
    assert stopped["status"] == "cancelled" and stopped["committed_tokens"] > 0
    assert texts(app, session_id) == ["one", "stop that"]


def test_an_interrupt_that_expects_another_revision_is_refused_and_stops_nobody(
    app: RunningApp,
) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="interrupt")
    first = start(app, session_id, "one")
    path = f"/v1/sessions/{session_id}/turns"
    reply = app.post(path, {"input": "two", "expect_revision": 7})
    assert app.error(reply)[:2] == (409, "revision_conflict")
    assert (reply.json()["error"]["expected"], reply.json()["error"]["actual"]) == (7, 0)
    app.engine.resume()
    assert follow(app, session_id, first)[-1]["type"] == "turn.completed"
    assert texts(app, session_id) == ["one"]


def test_an_interrupt_that_expects_the_right_revision_runs_behind_what_it_stopped(
    app: RunningApp,
) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    session_id = app.session(on_conflict="interrupt")
    first = start(app, session_id, "one", "turn.cache")  # the engine has it, and its script
    app.engine.held.add(first)
    app.engine.script, app.engine.hold_at = says("Sure."), None
    turn = app.turn(session_id, "two", expect_revision=0)
    assert (turn["status"], turn["revision"]) == ("completed", 2)
    assert follow(app, session_id, first)[-1]["type"] == "turn.cancelled"
    assert texts(app, session_id) == ["one", "two"]


def test_the_deadline_of_a_turn_runs_while_it_waits(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    first = start(app, session_id, "one")
    path = f"/v1/sessions/{session_id}/turns"
    body = {"input": "two", "deadline_ms": 200}
    late = app.post(path, body).json()
    assert (late["status"], late["reason"], late["committed"]) == ("incomplete", "deadline", False)
    app.engine.resume()
    assert follow(app, session_id, first)[-1]["type"] == "turn.completed"
    assert texts(app, session_id) == ["one"]
    assert app.get(f"{path}/{late['id']}").json() == late
