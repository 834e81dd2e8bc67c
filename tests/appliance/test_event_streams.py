# SPDX-License-Identifier: Apache-2.0
"""The live streams of a session's life and of the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.session_hub import MAX_QUEUED, SessionHub
from appliance.session_watch import RESIDENCY_EVERY_S
from sessions.session import new_session
from tests.fakes.appliance import Json, RunningApp, sse_events, until


def up_to(events: Iterator[Json], kind: str) -> list[Json]:
    """The events up to the first of a kind."""
    seen: list[Json] = []
    for event in events:
        seen.append(event)
        if event["type"] == kind:
            return seen
    raise AssertionError(f"no {kind} in {[e['type'] for e in seen]}")


def test_a_session_s_stream_tells_its_life_from_its_state_to_its_end(app: RunningApp) -> None:
    session_id = app.session()
    path = f"/v1/sessions/{session_id}"
    with app.http.stream("GET", f"{path}/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = sse_events(reply)
        first = next(events)
        assert (first["type"], first["status"], first["revision"]) == ("session.state", "idle", 0)
        turn = app.turn(session_id, "a")
        told = up_to(events, "session.turn_ended")
        started = next(e for e in told if e["type"] == "session.turn_started")
        assert started["status"] == "running" and started["turn_id"] == turn["id"]
        assert (told[-1]["revision"], told[-1]["turn_status"]) == (1, "completed")
        app.post(f"{path}/items", {"items": "b"})
        assert up_to(events, "session.items_appended")[-1]["num_items"] == 1
        app.post(f"{path}/rollback", {"to": 1})
        assert up_to(events, "session.history_replaced")[-1]["revision"] == 3
        app.post(path, {"metadata": {"a": "b"}})
        up_to(events, "session.updated")
        app.http.delete(path)
        rest = list(events)  # the stream ends by itself
        assert rest[-1]["type"] == "session.closed"
        numbers = [e["sequence_number"] for e in [first, *told]]
        assert numbers == list(range(1, len(numbers) + 1))


def test_residency_is_told_when_a_turn_changed_it(app: RunningApp) -> None:
    session_id = app.session()
    with app.http.stream("GET", f"/v1/sessions/{session_id}/events") as reply:
        events = sse_events(reply)
        assert up_to(events, "session.residency")[-1]["l1"] == 0
        app.turn(session_id, "a question long enough to fill a page " * 10)
        known = app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]
        for event in events:
            if event["type"] == "session.residency" and event["l1"] == known - 1:
                break
        app.http.delete(f"/v1/sessions/{session_id}")
        list(events)


def test_residency_is_told_of_a_history_that_comes_long_behind_the_cache(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's last change of the cache is looked at before the store has the turn."""
    commit = app.services.store.commit_turn

    async def late(*arguments: Any) -> Any:
        await asyncio.sleep(5 * RESIDENCY_EVERY_S)
        return await commit(*arguments)

    monkeypatch.setattr(app.services.store, "commit_turn", late)
    test_residency_is_told_when_a_turn_changed_it(app)
    until(lambda: app.services.hub._readers == {})


def test_there_is_no_stream_of_a_session_that_is_not_there(app: RunningApp) -> None:
    reply = app.get("/v1/sessions/sess_x/events")
    assert app.error(reply)[:2] == (404, "session_not_found")
    assert app.services.hub._readers == {}


def test_the_cache_s_stream_tells_every_page_and_ends_with_the_process(tmp_path: Path) -> None:
    with RunningApp(tmp_path) as app:
        session_id = app.session()
        with app.http.stream("GET", "/v1/cache/events") as reply:
            text = "a question long enough to fill a page " * 10
            # Whoever counts what sessions cost reads them too.
            until(lambda: len(app.services.client._kv_queues) == 2)
            until(lambda: bool(app.engine._kv_peers))
            app.turn(session_id, text)
            event = next(sse_events(reply))
            assert (event["type"], event["tier"]) == ("cache.stored", "l1")
            assert len(bytes.fromhex(event["page_hash"])) == 16


def test_the_cache_s_stream_is_the_admin_s_where_there_are_keys(tmp_path: Path) -> None:
    settings = {"server": {"api_keys": {"key-a": "alpha"}}}
    with RunningApp(tmp_path, settings=settings) as app:
        reply = app.get("/v1/cache/events", headers={"Authorization": "Bearer key-a"})
        assert app.error(reply)[:2] == (401, "invalid_api_key")


def test_a_slow_reader_is_told_how_much_it_lost() -> None:
    hub, session = SessionHub(), new_session(model="m", now_ms=1)
    reader = hub.subscribe(session.id)
    for _ in range(MAX_QUEUED + 5):
        hub.tell("session.updated", session, {})
    hub.close()

    async def read_all() -> list[Json]:
        return [event async for event in reader.read()]

    events = asyncio.run(read_all())
    assert len(events) == MAX_QUEUED + 1
    assert events[-1] == {"type": "events.lost", "session_id": session.id, "num": 5}
