# SPDX-License-Identifier: Apache-2.0
"""Either process may die in the middle of a turn: the turn ends once, as if nothing had been."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.services import RELOAD_S
from appliance.turn_record import CANCEL, DEADLINE
from engine.client import EngineClient
from sessions.errors import StoreUnavailable
from sessions.session import Session
from sessions.sqlite_store import SqliteSessionStore
from sessions.turn_log import Record
from tests.fakes.appliance import Json, RunningApp, says, sse_events, until

WORDS = " ".join(f"word{number}" for number in range(60))


@pytest.fixture
def own_app(tmp_path: Path) -> RunningApp:
    return RunningApp(tmp_path, says(WORDS))


def read_some(
    app: RunningApp, session_id: str, key: str, is_enough: Callable[[list[Json]], bool]
) -> list[Json]:
    """Start a turn and leave once the events are enough."""
    events: list[Json] = []
    path = f"/v1/sessions/{session_id}/turns"
    headers = {"Idempotency-Key": key}
    body = {"input": "go", "stream": True}
    with app.http.stream("POST", path, json=body, headers=headers) as reply:
        for event in sse_events(reply):
            events.append(event)
            if is_enough(events):
                return events
    return events


def read_rest(app: RunningApp, session_id: str, seen: list[Json]) -> list[Json]:
    path = f"/v1/sessions/{session_id}/turns/{seen[0]['turn_id']}/events"
    params = {"starting_after": seen[-1]["sequence_number"]}
    with app.http.stream("GET", path, params=params) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


def has_told(*words: str) -> Callable[[list[Json]], bool]:
    """Whether the text has come as far, in however many deltas."""
    return lambda events: all(word in text_of(events) for word in words)


def text_of(events: list[Json]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@pytest.mark.parametrize("told", ["", "turn.cache", "word3"])
def test_a_new_api_process_takes_the_turn_up_and_readers_miss_nothing(
    own_app: RunningApp, told: str
) -> None:
    with own_app as app:
        app.engine.hold_at = 20
        session_id = app.session()
        is_enough = has_told("word3") if told == "word3" else lambda seen: seen[-1]["type"] == told
        seen = read_some(app, session_id, "k", is_enough if told else bool)
        app.restart()
        app.engine.hold_at = None
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
        app.engine.pause()
        session_id = app.session()
        seen = read_some(app, session_id, "k", lambda seen: seen[-1]["type"] == "turn.cache")
        app.stop()
        app.engine.resume()
        until(lambda: app.engine._requests[seen[0]["turn_id"]].finished is not None)
        app.start()
        assert text_of(seen + read_rest(app, session_id, seen)) == WORDS
        assert app.turn(session_id, "next")["cache"]["miss"] is None


def test_an_engine_crash_in_mid_turn_is_not_seen_by_the_reader(own_app: RunningApp) -> None:
    with own_app as app:
        app.engine.hold_at = 20
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        events: list[Json] = []
        before = ""
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
            for event in sse_events(reply):
                events.append(event)
                if not before and has_told("word3")(events):
                    before = text_of(events)
                    app.engine.stop()
                    app.engine.hold_at = None
                    app.engine.start()
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
        assert before and text_of(events).startswith(before) and WORDS.startswith(before)


def test_the_turn_after_an_engine_crash_says_what_was_recomputed(own_app: RunningApp) -> None:
    with own_app as app:
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
        app.engine.hold_at = 20
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
            events = sse_events(reply)
            turn_id = next(e for e in events if e["type"].endswith("text.delta"))["turn_id"]
            app.engine.stop()
            cancelled = pool.submit(httpx.post, f"{app.url}{path}/{turn_id}/cancel", timeout=30)
            app.engine.pause()
            app.engine.hold_at = None
            app.engine.start()
            assert list(events)[-1]["type"] == "turn.cancelled"
        assert cancelled.result().json()["status"] == "cancelled"
        app.engine.drop_cache()
        app.engine.resume()
        turn = app.turn(session_id, "again")
        assert turn["cache"]["miss"]["reason"] == "engine_restarted"


def lose_both(app: RunningApp) -> None:
    """What is left of a turn when the API process and the engine are killed in the midst of it."""
    app.stop()
    app.engine.restart()
    app.start()


@pytest.mark.parametrize("times", [1, 2])
def test_a_turn_whose_processes_all_died_goes_on_where_its_readers_were(
    own_app: RunningApp, times: int
) -> None:
    with own_app as app:
        app.engine.hold_at = 20
        session_id = app.session()
        events = read_some(app, session_id, "k", has_told("word3"))
        for life in range(1, times + 1):
            lose_both(app)
            app.engine.hold_at = 20 + 30 * life
            path = f"/v1/sessions/{session_id}/turns/{events[0]['turn_id']}/events"
            params = {"starting_after": events[-1]["sequence_number"]}
            with app.http.stream("GET", path, params=params) as reply:
                for event in sse_events(reply):
                    events.append(event)
                    if has_told(f"word{5 + 10 * life}")(events):  # no life before had it
                        break
        app.engine.hold_at = None
        events += read_rest(app, session_id, events)
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(1, len(events) + 1))
        assert text_of(events) == WORDS
        terminal = events[-1]
        assert terminal["type"] == "turn.completed" and terminal["stop_reason"] == "end_turn"
        told = [event for event in events if event["type"] == "turn.cache"]
        assert len(told) == 1 + times
        assert told[-1]["miss"]["reason"] == terminal["turn"]["cache"]["miss"]["reason"]
        assert told[-1]["miss"]["reason"] == "engine_restarted"
        resumed = app.engine.requests[-1]
        num_again = (len(resumed.token_ids) + len(resumed.resume_token_ids)) // 4
        assert told[-1]["to_compute"] == num_again
        # The usage is what the prompt cost at first, and the sampled ids are those readers saw.
        assert terminal["usage"]["input_tokens"] == told[0]["to_compute"]
        assert len(resumed.resume_token_ids) // 4 < terminal["usage"]["output_tokens"]
        # Its key still answers, with the very same events.
        again = app.stream(session_id, "go", headers={"Idempotency-Key": "k"})
        assert again[-1] == terminal and len(again) == len(events)
        session = app.get(f"/v1/sessions/{session_id}").json()
        assert (session["revision"], session["status"]) == (1, "idle")
        # What the new engine computed is found by the next turn.
        assert app.turn(session_id, "next")["cache"]["miss"] is None
        assert list(app.config.server.state_dir.glob("turns/*.ids")) == []


def test_a_turn_whose_sampled_ids_are_lost_with_both_processes_fails_as_engine_restarted(
    own_app: RunningApp,
) -> None:
    with own_app as app:
        app.engine.hold_at = 20
        session_id = app.session()
        seen = read_some(app, session_id, "k", has_told("word3"))
        app.stop()
        app.engine.restart()
        app.engine.hold_at = None
        (journal,) = app.config.server.state_dir.glob("turns/*.ids")
        journal.write_bytes(journal.read_bytes()[: 4 * 2])
        app.start()
        rest = read_rest(app, session_id, seen)
        assert rest[-1]["type"] == "turn.failed"
        assert rest[-1]["error"]["code"] == "engine_restarted"
        again = app.post(
            f"/v1/sessions/{session_id}/turns",
            {"input": "go"},
            headers={"Idempotency-Key": "k"},
        )
        assert app.error(again)[:2] == (503, "engine_restarted")
        assert again.json()["error"]["turn_id"] == seen[0]["turn_id"]
        session = app.get(f"/v1/sessions/{session_id}").json()
        assert (session["revision"], session["status"]) == (0, "idle")
        assert app.turn(session_id, "again")["status"] == "completed"


def test_a_turn_that_is_cancelled_before_its_new_engine_has_it_ends_with_what_it_had(
    own_app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = EngineClient.attach

    async def attach_and_cancel(client: EngineClient, turn_id: str, **options: Any) -> Any:
        async for item in attach(client, turn_id, **options):  # the engine does not know the turn
            await own_app.asgi.state.context.turns.runner.find(turn_id).request_stop(CANCEL)
            yield item

    with own_app as app:
        app.engine.hold_at = 20
        session_id = app.session()
        seen = read_some(app, session_id, "k", has_told("word3"))
        app.stop()
        app.engine.restart()
        app.engine.hold_at = None
        num_requests = len(app.engine.requests)
        monkeypatch.setattr(EngineClient, "attach", attach_and_cancel)
        app.start()
        events = seen + read_rest(app, session_id, seen)
        assert events[-1]["type"] == "turn.cancelled"
        assert len(app.engine.requests) == num_requests
        assert events[-1]["turn"]["output"][0]["content"][0]["text"] == text_of(events)
        assert app.turn(session_id, "next")["status"] == "completed"


class StubbornStore(SqliteSessionStore):
    """A store that takes no end of a turn."""

    async def commit_turn(self, session: Session, record: Record) -> Session:
        raise StoreUnavailable("the file is locked")


@pytest.mark.parametrize(
    ("fields", "stopped_by", "end"),
    [
        ({}, "", ("turn.completed", "end_turn", None)),
        ({"max_output_tokens": 30}, "", ("turn.incomplete", None, "max_output_tokens")),
        ({"stop": ["word20"]}, "", ("turn.completed", "stop_sequence", None)),
        ({}, CANCEL, ("turn.cancelled", None, None)),
        ({}, DEADLINE, ("turn.incomplete", None, "deadline")),
    ],
    ids=str,
)
def test_an_answer_that_had_ended_when_both_processes_died_ends_as_it_had(
    own_app: RunningApp, fields: Json, stopped_by: str, end: tuple[str, str | None, str | None]
) -> None:
    own_app.engine.hold_at = 20 if stopped_by else None
    with own_app as app:
        stubborn = StubbornStore(app.config.sessions)
        asyncio.run_coroutine_threadsafe(stubborn.open(), app.loop).result(60)
        app.services.store._store = stubborn  # type: ignore[attr-defined]
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        seen: list[Json] = []
        with app.http.stream("POST", path, json={"input": "x", "stream": True, **fields}) as reply:
            for event in sse_events(reply):
                seen.append(event)
                if app.engine.hold_at and has_told("word3")(seen):
                    app.engine.pause()
                    app.engine.hold_at = None
                    run = app.asgi.state.context.turns.runner.find(event["turn_id"])
                    asking = run.request_stop(stopped_by)
                    asyncio.run_coroutine_threadsafe(asking, app.loop).result(60)
                if event["type"] == "response.output_item.done":
                    break
        num_sampled = len(app.engine.requests)
        lose_both(app)
        events = seen + read_rest(app, session_id, seen)
        assert [e["sequence_number"] for e in events] == list(range(1, len(events) + 1))
        last = events[-1]
        assert (last["type"], last.get("stop_reason"), last.get("reason")) == end
        assert last["turn"]["output"][0]["content"][0]["text"] == text_of(seen)
        assert len(app.engine.requests) == num_sampled  # nothing is sampled again
        assert app.turn(session_id, "next")["status"] == "completed"


def test_both_processes_lost_before_any_output_runs_the_turn_after_all(
    own_app: RunningApp,
) -> None:
    with own_app as app:
        app.engine.pause()
        session_id = app.session()
        seen = read_some(app, session_id, "k", lambda seen: len(seen) == 2)
        app.stop()
        app.engine.restart()
        app.engine.resume()
        app.start()
        assert text_of(seen + read_rest(app, session_id, seen)) == WORDS


def test_a_terminal_event_that_a_crash_swallowed_is_told_to_the_reader_who_comes_back(
    own_app: RunningApp,
) -> None:
    with own_app as app:
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


@pytest.mark.parametrize("hang_s", [0.0, 1.0, 120.0])
def test_turns_outwait_the_time_it_takes_to_find_out_that_their_engine_hangs(
    tmp_path: Path, hang_s: float
) -> None:
    """Else they would have failed by the time the supervisor starts another one."""
    settings = {"server": {"hang_s": hang_s}}
    with RunningApp(tmp_path, settings=settings) as app:
        assert app.config.server.hang_s == hang_s
        assert app.services.client.dead_after_s >= hang_s + RELOAD_S


def test_a_stopping_appliance_takes_no_new_turn(own_app: RunningApp) -> None:
    with own_app as app:
        session_id = app.session()
        app.asgi.state.context.turns.is_draining = True
        reply = httpx.post(
            f"{app.url}/v1/sessions/{session_id}/turns", json={"input": "x"}, timeout=30
        )
        assert app.error(reply)[:2] == (503, "draining")
        assert reply.headers["retry-after"]


MESSAGES = [{"role": "user", "content": "go"}]
DIALECTS = {
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES},
    "/v1/completions": {"model": "default", "prompt": "go"},
    "/v1/responses": {"model": "default", "input": "go"},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 500},
}


def test_answers_that_no_session_keeps_end_with_an_error_where_they_outlast_the_drain(
    tmp_path: Path,
) -> None:
    with RunningApp(tmp_path, says("word " * 400)) as app:
        app.engine.hold_at = 5
        lines: dict[str, list[str]] = {}

        def stream(path: str) -> None:
            body = {**DIALECTS[path], "stream": True}
            with httpx.stream("POST", f"{app.url}{path}", json=body, timeout=30) as reply:
                lines[path] = [line for line in reply.iter_lines() if line]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(stream, path) for path in DIALECTS]
            plain = {
                path: pool.submit(httpx.post, f"{app.url}{path}", json=body, timeout=30)
                for path, body in DIALECTS.items()
            }
            until(lambda: len(app.engine.requests) == 2 * len(DIALECTS))
            app.stop()
            for done in streams:
                done.result()  # each ended properly, and was not cut off
            for waiting in plain.values():
                reply = waiting.result()
                assert reply.status_code == 503 and reply.json()["error"]["code"] == "draining"
                assert reply.headers["retry-after"]
        assert set(lines) == set(DIALECTS)
        for path, found in lines.items():
            assert any("draining" in line for line in found[-3:]), (path, found[-3:])
        until(lambda: len(app.engine.aborted) >= 2 * len(DIALECTS))
