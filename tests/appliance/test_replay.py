# SPDX-License-Identifier: Apache-2.0
"""Streams that break, readers that come late, requests that come twice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.turn_events import EventJournals, decode_frame
from tests.fakes.appliance import Json, RunningApp, says, sse_events, until


def read_events(app: RunningApp, session_id: str, turn_id: str, after: int) -> list[Json]:
    path = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
    with app.http.stream("GET", path, params={"starting_after": after}) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


def wait_idle(app: RunningApp, session_id: str) -> None:
    until(lambda: app.get(f"/v1/sessions/{session_id}").json()["current_turn"] is None)


def test_a_reader_cut_at_any_event_gets_exactly_the_rest(app: RunningApp) -> None:
    session_id = app.session()
    events = app.stream(session_id, "Hi")
    turn_id = events[0]["turn_id"]
    for cut in range(len(events) + 1):
        assert read_events(app, session_id, turn_id, cut) == events[cut:]
    path = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
    with app.http.stream("GET", path, headers={"Last-Event-ID": "3"}) as reply:
        assert list(sse_events(reply)) == events[3:]


def test_many_readers_of_a_running_turn_all_see_every_event(app: RunningApp) -> None:
    app.engine.script = says("word " * 60)
    app.engine.hold_at = 20
    session_id = app.session()
    body = {"input": "go", "stream": True}
    with (
        concurrent.futures.ThreadPoolExecutor(8) as pool,
        app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as first,
    ):
        turn_id = first.headers["x-turn-id"]
        readers = [pool.submit(read_events, app, session_id, turn_id, after) for after in range(8)]
        until(lambda: app.num_readers(session_id, turn_id) == 1 + len(readers))
        app.engine.hold_at = None
        whole = list(sse_events(first))
        for after, reader in enumerate(readers):
            assert reader.result() == whole[after:]


def test_a_turn_goes_on_when_its_reader_leaves(app: RunningApp) -> None:
    app.engine.script = says("word " * 40)
    app.engine.hold_at = 20
    session_id = app.session()
    body = {"input": "go", "stream": True}
    with app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as reply:
        turn_id = next(sse_events(reply))["turn_id"]
    until(lambda: app.num_readers(session_id, turn_id) == 0)
    app.engine.hold_at = None
    events = read_events(app, session_id, turn_id, 0)
    assert events[-1]["type"] == "turn.completed"
    assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 1


def test_a_session_may_ask_for_its_turns_to_be_cancelled_with_their_reader(
    app: RunningApp,
) -> None:
    app.engine.script = says("word " * 2000)
    app.engine.hold_at = 20
    session_id = app.session(on_disconnect="cancel")
    path = f"/v1/sessions/{session_id}/turns"
    with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
        turn_id = next(sse_events(reply))["turn_id"]
    wait_idle(app, session_id)  # a reader who came before the first is missed would keep the turn
    assert read_events(app, session_id, turn_id, 0)[-1]["type"] == "turn.cancelled"
    with app.caller(path, {"input": "go"}):
        until(lambda: app.get(f"/v1/sessions/{session_id}").json()["current_turn"] is not None)
        turn_id = app.get(f"/v1/sessions/{session_id}").json()["current_turn"]
        until(lambda: app.num_readers(session_id, turn_id) == 1)
    wait_idle(app, session_id)
    assert app.get(path).json()["data"][-1]["status"] == "cancelled"


def test_fifty_concurrent_posts_under_one_key_make_one_turn(app: RunningApp) -> None:
    app.engine.prefill_s = 0.1
    session_id = app.session()
    num_requests = len(app.engine.requests)
    path = f"/v1/sessions/{session_id}/turns"

    def post(number: int) -> Json:
        reply = httpx.post(
            app.url + path, json={"input": "x"}, headers={"Idempotency-Key": "k1"}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        turns = list(pool.map(post, range(50)))
    assert len(app.engine.requests) == num_requests + 1
    assert all(turn == turns[0] for turn in turns)
    assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 1


def test_a_key_attaches_streamed_or_not_and_refuses_another_body(app: RunningApp) -> None:
    session_id = app.session()
    headers = {"Idempotency-Key": "k"}
    events = app.stream(session_id, "x", headers=headers)
    assert app.stream(session_id, "x", headers=headers) == events
    path = f"/v1/sessions/{session_id}/turns"
    assert app.post(path, {"input": "x"}, headers=headers).json() == events[-1]["turn"]
    reply = app.post(path, {"input": "y"}, headers=headers)
    assert app.error(reply) == (422, "idempotency_key_reused", "Idempotency-Key")
    assert reply.json()["error"]["turn_id"] == events[0]["turn_id"]
    # Another session's key is another key.
    other = app.session()
    assert app.post(f"/v1/sessions/{other}/turns", {"input": "y"}, headers=headers).is_success


def test_a_comment_heartbeat_comes_while_the_turn_is_silent(tmp_path: Path) -> None:
    with RunningApp(tmp_path, settings={"server": {"heartbeat_s": 0.05}}) as app:
        app.engine.pause()
        path = f"/v1/sessions/{app.session()}/turns"
        with app.http.stream("POST", path, json={"input": "x", "stream": True}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.iter_lines()
            for _ in range(3):
                assert next(line for line in lines if line.startswith(":")) == ": heartbeat"
            app.engine.resume()
            assert any("turn.completed" in line for line in lines)


def test_events_past_the_window_are_410_with_a_link_and_a_key_still_answers(
    tmp_path: Path,
) -> None:
    with RunningApp(tmp_path, settings={"server": {"replay_minutes": 0.0}}) as app:
        session_id = app.session()
        headers = {"Idempotency-Key": "k"}
        turn_id = app.stream(session_id, "x", headers=headers)[0]["turn_id"]
        app.services.journals.sweep()
        path = f"/v1/sessions/{session_id}/turns/{turn_id}"
        reply = app.get(f"{path}/events")
        assert app.error(reply)[:2] == (410, "events_expired")
        assert reply.json()["error"]["turn"] == path
        assert app.get(path).json()["status"] == "completed"
        events = app.stream(session_id, "x", headers=headers)
        assert [event["type"] for event in events] == ["turn.completed"]
        assert events[0]["turn"] == app.get(path).json()


def test_a_journal_reads_back_byte_for_byte_without_a_line_the_crash_cut(tmp_path: Path) -> None:
    journals = EventJournals(tmp_path, replay_s=60)
    events = journals.create("sess_a", "turn_a")
    events.emit("turn.created", {})
    events.emit("response.output_text.delta", {"item_id": "item_a", "delta": "a\n\nb"})
    frames = list(events.frames)
    path = tmp_path / "turn_a.events"
    path.write_bytes(path.read_bytes() + b"id: 3\nevent: response.outp")
    again = EventJournals(tmp_path, replay_s=60).reopen("sess_a", "turn_a")
    assert again.frames == frames
    # What a resumed turn says again is dropped; what is new goes on under the next number.
    again.emit("turn.created", {})
    again.emit("response.output_text.delta", {"item_id": "item_a", "delta": "a\n\nb"})
    again.emit("response.output_text.delta", {"item_id": "item_a", "delta": "c"})
    assert again.frames[:-1] == frames
    assert json.loads(again.frames[-1].split(b"data: ")[1])["sequence_number"] == 3


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, the rest in one."""
    pieces: list[str] = []
    for size in sizes:
        pieces, text = [*pieces, text[:size]], text[size:]
    return [piece for piece in (*pieces, text) if piece]


def answer_events(sizes: list[int]) -> list[tuple[str, Json]]:
    """Reasoning and an answer, each in deltas as `sizes` cut them."""
    out: list[tuple[str, Json]] = []
    for kind, item_id, text in (
        ("reasoning_text", "item_a", "A thought, \U0001f9ed."),
        ("output_text", "item_b", "The answer to all."),
    ):
        out.append(("response.output_item.added", {"item": {"id": item_id}}))
        deltas = cut(text, sizes)
        out += [(f"response.{kind}.delta", {"item_id": item_id, "delta": d}) for d in deltas]
        out.append(("response.output_item.done", {"item": {"id": item_id}}))
    return out


@pytest.mark.parametrize("num_told", range(12))
@pytest.mark.parametrize("again_sizes", [[], [1] * 9, [4, 4], [3, 5, 1], [11]])
def test_a_turn_taken_up_goes_on_in_mid_delta_where_its_tokens_come_in_other_batches(
    tmp_path: Path, num_told: int, again_sizes: list[int]
) -> None:
    journals = EventJournals(tmp_path, replay_s=60)
    events = journals.create("sess_a", "turn_a")
    for event in answer_events([3, 5, 2])[:num_told]:
        events.emit(*event)
    again = EventJournals(tmp_path, replay_s=60).reopen("sess_a", "turn_a")
    told = list(again.frames)
    again.emit_all(answer_events(again_sizes))
    assert again.is_caught_up and again.frames[:num_told] == told == events.frames
    bodies = [decode_frame(frame) for frame in again.frames]
    assert [body["sequence_number"] for body in bodies] == list(range(1, len(bodies) + 1))
    spelled = [(b["type"], b.get("item_id"), b.get("delta")) for b in bodies]
    whole = [(name, f.get("item_id"), f.get("delta")) for name, f in answer_events([])]
    assert merged(spelled) == whole


def merged(events: list[tuple[str, str | None, str | None]]) -> list[tuple[str, Any, Any]]:
    """The events with neighbouring deltas of one item as one."""
    out: list[tuple[str, Any, Any]] = []
    for name, item_id, delta in events:
        if delta is not None and out and out[-1][:2] == (name, item_id):
            out[-1] = (name, item_id, out[-1][2] + delta)
        else:
            out.append((name, item_id, delta))
    return out


def test_an_ended_turn_leaves_memory_soon_and_is_read_back_from_its_file(tmp_path: Path) -> None:
    journals = EventJournals(tmp_path, replay_s=600)
    events = journals.create("sess_a", "turn_a")
    events.emit("turn.completed", {"usage": {}})
    events.close()
    events.closed_at_s -= 60  # a minute ago
    journals.sweep()
    found = journals.find("sess_a", "turn_a")
    assert found is not None and found is not events and found.frames == events.frames
    assert journals.find("sess_b", "turn_a") is None
    events.closed_at_s -= 600
    found.closed_at_s -= 660
    journals.sweep()
    assert journals.find("sess_a", "turn_a") is None and not list(tmp_path.iterdir())


def test_another_session_s_events_are_not_found_under_one_s_own(app: RunningApp) -> None:
    session_id, other = app.session(), app.session()
    turn_id = app.turn(session_id)["id"]
    for fresh in (False, True):
        if fresh:  # as after a restart: from the journal, not from memory
            app.services.journals._turns.clear()
        reply = app.get(f"/v1/sessions/{other}/turns/{turn_id}/events")
        assert app.error(reply)[:2] == (404, "turn_not_found")


@contextlib.contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow past `num_bytes`: a full disk, byte for byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 150, 200, 400])
def test_a_disk_that_fills_up_at_any_byte_costs_no_reader_an_event(
    tmp_path: Path, room: int
) -> None:
    journals = EventJournals(tmp_path, replay_s=60.0)
    with files_end_at(room):
        events = journals.create("sess_a", "turn_a")
        for name in ("turn.created", "turn.queued", "turn.in_progress", "turn.completed"):
            events.emit(name, {})
        events.close()
    frames = list(events.frames)
    assert [json.loads(f.split(b"data: ")[1])["sequence_number"] for f in frames] == [1, 2, 3, 4]
    # No journal with a gap is left behind, and what only memory has stays there.
    assert list(tmp_path.iterdir()) == []
    events.closed_at_s -= 30.0
    journals.sweep()
    found = journals.find("sess_a", "turn_a")
    assert found is not None and found.frames == frames
    events.closed_at_s -= 60.0
    journals.sweep()
    assert journals.find("sess_a", "turn_a") is None


def test_a_turn_is_taken_up_from_its_journal_on_a_full_disk(tmp_path: Path) -> None:
    before = EventJournals(tmp_path, replay_s=60.0).create("sess_a", "turn_a")
    before.emit("turn.created", {})
    before.emit("turn.queued", {})
    path = tmp_path / "turn_a.events"
    path.write_bytes(path.read_bytes()[:-5])  # the crash cut the last event
    with files_end_at(0):
        events = EventJournals(tmp_path, replay_s=60.0).reopen("sess_a", "turn_a")
        assert events.frames == before.frames[:1]
        events.emit("turn.failed", {})
        events.close()
    assert events.has_terminal


@pytest.mark.parametrize("turn_id", ["t" * 300, "%00", "turn_%ff", "turn_none"])
def test_a_turn_id_that_is_none_is_not_found_whatever_it_looks_like(
    app: RunningApp, turn_id: str
) -> None:
    path = f"/v1/sessions/{app.session()}/turns/{turn_id}"
    for reply in (
        app.http.get(path),
        app.http.get(f"{path}/events"),
        app.http.post(f"{path}/cancel"),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "turn_not_found")
