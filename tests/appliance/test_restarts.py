# SPDX-License-Identifier: Apache-2.0
"""Either process may die in the middle of a turn: the turn ends once, as if nothing had been."""

from __future__ import annotations

import concurrent.futures
import time
from pathlib import Path

import httpx
import pytest

from tests.fakes.appliance import Json, RunningApp, says, sse_events

WORDS = " ".join(f"word{number}" for number in range(60))


@pytest.fixture
def own_app(tmp_path: Path) -> RunningApp:
    return RunningApp(tmp_path, says(WORDS), tokens_per_s=150)


def read_some(app: RunningApp, session_id: str, enough: int, key: str) -> list[Json]:
    """Start a turn and leave after so many events."""
    events: list[Json] = []
    path = f"/v1/sessions/{session_id}/turns"
    headers = {"Idempotency-Key": key}
    body = {"input": "go", "stream": True}
    with app.http.stream("POST", path, json=body, headers=headers) as reply:
        for event in sse_events(reply):
            events.append(event)
            if len(events) == enough:
                return events
    return events


def read_rest(app: RunningApp, session_id: str, seen: list[Json]) -> list[Json]:
    path = f"/v1/sessions/{session_id}/turns/{seen[0]['turn_id']}/events"
    params = {"starting_after": seen[-1]["sequence_number"]}
    with app.http.stream("GET", path, params=params) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


def text_of(events: list[Json]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@pytest.mark.parametrize("enough", [1, 3, 20])
def test_a_new_api_process_takes_the_turn_up_and_readers_miss_nothing(
    own_app: RunningApp, enough: int
) -> None:
    with own_app as app:
        session_id = app.session()
        seen = read_some(app, session_id, enough, "k")
        app.restart()
        rest = read_rest(app, session_id, seen)
        events = seen + rest
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(1, len(events) + 1))
        assert text_of(events) == WORDS
        assert events[-1]["type"] == "turn.completed"
        assert len(app.engine.requests) == 1
        session = app.get(f"/v1/sessions/{session_id}").json()
        assert (session["revision"], session["status"]) == (1, "idle")
        # The same request under its key is the same turn, also for the new process.
        again = app.stream(session_id, "go", headers={"Idempotency-Key": "k"})
        assert [e["sequence_number"] for e in again] == numbers
        assert again[-1] == events[-1]


def test_a_turn_that_ended_while_no_api_process_ran_is_finished_by_the_next(
    own_app: RunningApp,
) -> None:
    with own_app as app:
        app.engine.tokens_per_s = 0.0
        app.engine.pause()
        session_id = app.session()
        seen = read_some(app, session_id, 3, "k")
        app.stop()
        app.engine.resume()
        deadline = time.monotonic() + 10
        while app.engine._requests[seen[0]["turn_id"]].finished is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        app.start()
        assert text_of(seen + read_rest(app, session_id, seen)) == WORDS
        assert app.turn(session_id, "next")["cache"]["miss"] is None


def test_an_engine_crash_in_mid_turn_is_not_seen_by_the_reader(own_app: RunningApp) -> None:
    with own_app as app:
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        events: list[Json] = []
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
            for event in sse_events(reply):
                events.append(event)
                if len(events) == 20:
                    app.engine.restart()
        assert events[-1]["type"] == "turn.completed"
        told = [event for event in events if event["type"] == "turn.cache"]
        assert len(told) == 2 and told[1]["miss"]["reason"] == "engine_restarted"
        assert told[1]["miss"]["missed_tokens"] >= events[-1]["usage"]["input_tokens"]
        assert events[-1]["turn"]["cache"]["miss"] == told[1]["miss"]
        resumed = app.engine.requests[-1]
        assert told[1]["cached_l1"] == told[1]["cached_l2"] == told[1]["cached_l3"] == 0
        num_again = (len(resumed.token_ids) + len(resumed.resume_token_ids)) // 4
        assert told[1]["to_compute"] == num_again
        assert len(resumed.resume_token_ids) > 0
        # The fake starts its script anew behind what it was given; a real engine goes on.
        assert text_of(events).startswith(WORDS[: len(text_of(events[:20]))])


def test_the_turn_after_an_engine_crash_says_what_was_recomputed(own_app: RunningApp) -> None:
    with own_app as app:
        app.engine.tokens_per_s = 0.0
        session_id = app.session()
        app.turn(session_id, "one")
        known = app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]
        app.engine.restart()
        turn = app.turn(session_id, "two")
        assert turn["cache"]["miss"]["reason"] == "engine_restarted"
        assert turn["cache"]["miss"]["missed_tokens"] == known - 1
        assert app.turn(session_id, "three")["cache"]["miss"] is None


def test_a_turn_cancelled_while_its_engine_dies_claims_nothing_of_the_next_engine(
    own_app: RunningApp,
) -> None:
    with own_app as app, concurrent.futures.ThreadPoolExecutor(1) as pool:
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
            events = sse_events(reply)
            turn_id = next(e for e in events if e["type"].endswith("text.delta"))["turn_id"]
            app.engine.stop()
            cancelled = pool.submit(httpx.post, f"{app.url}{path}/{turn_id}/cancel", timeout=30)
            app.engine.pause()
            app.engine.start()
            assert list(events)[-1]["type"] == "turn.cancelled"
        assert cancelled.result().json()["status"] == "cancelled"
        app.engine.drop_cache()
        app.engine.resume()
        turn = app.turn(session_id, "again")
        assert turn["cache"]["miss"]["reason"] == "engine_restarted"


def test_both_processes_lost_after_output_was_seen_fails_the_turn_as_api_restarted(
    own_app: RunningApp,
) -> None:
    with own_app as app:
        session_id = app.session()
        seen = read_some(app, session_id, 12, "k")
        app.stop()
        app.engine.restart()
        app.start()
        rest = read_rest(app, session_id, seen)
        assert rest[-1]["type"] == "turn.failed"
        assert rest[-1]["error"]["code"] == "api_restarted"
        session = app.get(f"/v1/sessions/{session_id}").json()
        assert (session["revision"], session["status"]) == (0, "idle")
        assert app.turn(session_id, "again")["status"] == "completed"


def test_both_processes_lost_before_any_output_runs_the_turn_after_all(
    own_app: RunningApp,
) -> None:
    with own_app as app:
        app.engine.pause()
        session_id = app.session()
        seen = read_some(app, session_id, 2, "k")
        app.stop()
        app.engine.restart()
        app.engine.resume()
        app.start()
        assert text_of(seen + read_rest(app, session_id, seen)) == WORDS


def test_a_terminal_event_that_a_crash_swallowed_is_told_to_the_reader_who_comes_back(
    own_app: RunningApp,
) -> None:
    with own_app as app:
        app.engine.tokens_per_s = 0.0
        session_id = app.session()
        events = app.stream(session_id, "x")
        app.stop()
        journal = app.config.server.state_dir / "turns" / f"{events[0]['turn_id']}.events"
        data = journal.read_bytes()
        journal.write_bytes(data[: data.rindex(b"id: ")])  # the crash came after the commit
        app.start()
        assert read_rest(app, session_id, events[:5]) == events[5:]


def test_a_turn_is_cancelled_while_there_is_no_engine_to_compile_its_grammar(
    tmp_path: Path,
) -> None:
    with RunningApp(tmp_path, with_engine=False) as app:
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        body = {"input": "x", "stream": True, "response_format": {"type": "json_object"}}
        with app.http.stream("POST", path, json=body) as reply:
            events = sse_events(reply)
            turn_id = next(events)["turn_id"]
            assert app.post(f"{path}/{turn_id}/cancel").json()["status"] == "cancelled"
            assert list(events)[-1]["type"] == "turn.cancelled"


def test_a_turn_sent_while_no_engine_runs_waits_for_it(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("hi"), with_engine=False) as app:
        assert app.get("/health").status_code == 200
        ready = app.get("/ready")
        assert ready.status_code == 503 and ready.json()["engine"] == "starting"
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        with app.http.stream("POST", path, json={"input": "x", "stream": True}) as reply:
            events = sse_events(reply)
            assert next(events)["type"] == "turn.created"
            app.engine.start()
            assert list(events)[-1]["type"] == "turn.completed"
        assert app.get("/ready").status_code == 200


def test_a_stopping_appliance_takes_no_new_turn(own_app: RunningApp) -> None:
    with own_app as app:
        session_id = app.session()
        app.asgi.state.context.turns.is_draining = True
        reply = httpx.post(f"{app.url}/v1/sessions/{session_id}/turns", json={"input": "x"})
        assert app.error(reply)[:2] == (503, "draining")
        assert reply.headers["retry-after"]
