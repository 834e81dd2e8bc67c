# SPDX-License-Identifier: Apache-2.0
"""Appended items whose KV is computed ahead: now, or behind the client's back."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.transport import unpack_ids
from tests.fakes.appliance import RunningApp, says, sse_events, until

TEXT = "a file of some length that the tool has read " * 20


def test_items_prefilled_now_are_found_by_the_turn_and_leave_no_token_behind(
    app: RunningApp,
) -> None:
    session_id = app.session()
    path = f"/v1/sessions/{session_id}"
    reply = app.post(f"{path}/items", {"items": TEXT, "prefill": "now"}).json()
    num_tokens = reply["num_tokens"]
    assert reply["prefill"] == {
        "state": "done",
        "cached_tokens": 0,
        "computed_tokens": num_tokens,
        "error": None,
    }
    request = app.engine.requests[-1]
    assert request.sampling.max_new_tokens == 1
    ids = app.get(f"{path}/tokens").json()["token_ids"]
    assert unpack_ids(request.token_ids).tolist() == ids and len(ids) == num_tokens
    turn = app.turn(session_id, "what does it say?")
    assert turn["x_cache"]["l1"] >= num_tokens and turn["cache"]["miss"] is None
    usage = app.get(path).json()["usage"]
    assert usage["output"] == turn["usage"]["output_tokens"]


def test_a_background_prefill_answers_at_once_and_tells_when_it_is_done(app: RunningApp) -> None:
    session_id = app.session()
    path = f"/v1/sessions/{session_id}"
    app.engine.pause()
    with app.http.stream("GET", f"{path}/events") as stream:
        events = sse_events(stream)
        next(events)
        body = {"items": f"Behind: {TEXT}", "prefill": "background"}
        reply = app.post(f"{path}/items", body).json()
        assert reply["prefill"] == {"state": "started"}
        app.engine.resume()
        done = next(event for event in events if event["type"] == "session.prefilled")
        assert done["state"] == "done"
        assert done["cached_tokens"] + done["computed_tokens"] == reply["num_tokens"]
        assert app.turn(session_id, "well?")["x_cache"]["l1"] >= reply["num_tokens"]
        app.http.delete(path)
        list(events)


@pytest.mark.parametrize("by", ["turn", "close", "append"])
def test_a_background_prefill_gives_way(app: RunningApp, by: str) -> None:
    session_id = app.session()
    path = f"/v1/sessions/{session_id}"
    app.engine.pause()
    num_before = len(app.engine.requests)
    app.post(f"{path}/items", {"items": TEXT, "prefill": "background"})
    until(lambda: len(app.engine.requests) > num_before)
    prefill_id = app.engine.requests[-1].request_id
    if by == "turn":
        with app.http.stream("POST", f"{path}/turns", json={"input": "b", "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            app.engine.resume()
            list(lines)
    elif by == "close":
        app.http.delete(path)
    else:
        app.post(f"{path}/items", {"items": "more", "prefill": "background"})
    until(lambda: prefill_id in app.engine.aborted)


def test_a_prefill_that_fails_says_so_and_the_items_stay(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("one"), max_context_len=64) as app:
        app.engine._shape = (*app.engine._shape[:1], 8, *app.engine._shape[2:])
        session_id = app.session()
        body = {"items": "a few words more than eight tokens need", "prefill": "now"}
        reply = app.post(f"/v1/sessions/{session_id}/items", body).json()
        assert reply["prefill"]["state"] == "failed"
        assert reply["prefill"]["error"] == "context_length_exceeded"
        assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 1
