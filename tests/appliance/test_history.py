# SPDX-License-Identifier: Apache-2.0
"""Histories that move as a whole: rollback, export, import; quotas; whose pending turns are."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.appliance import Json, RunningApp, says, until


def tokens(app: RunningApp, session_id: str) -> list[int]:
    return list(app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"])


def test_a_rollback_ends_right_behind_the_turn_and_the_next_turn_reuses_what_is_left(
    app: RunningApp,
) -> None:
    app.engine.script = says("one", "two", "three")
    session_id = app.session(instructions="Be brief.")
    first = app.turn(session_id, "a")
    left = tokens(app, session_id)
    app.turn(session_id, "b")
    whole = tokens(app, session_id)
    reply = app.post(f"/v1/sessions/{session_id}/rollback", {"to": first["id"]})
    session = reply.json()
    assert (session["revision"], session["status"]) == (3, "idle")
    assert session["last_turn"] == first["id"]
    assert session["x_released_tokens"] == len(whole) - len(left)
    assert tokens(app, session_id) == left
    turn = app.turn(session_id, "c")
    assert turn["cache"]["miss"] is None and turn["x_cache"]["l1"] >= len(left) - 1
    assert tokens(app, session_id)[: len(left)] == left


@pytest.mark.parametrize("by", ["revision", "item", "head"])
def test_a_rollback_takes_a_revision_or_an_item_or_the_head(app: RunningApp, by: str) -> None:
    session_id = app.session()
    app.turn(session_id, "a")
    items = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    left = tokens(app, session_id)
    if by != "head":
        app.turn(session_id, "b")
    to = {"revision": 1, "item": items[-1]["id"], "head": "head"}[by]
    session = app.post(f"/v1/sessions/{session_id}/rollback", {"to": to}).json()
    assert session["revision"] == (2 if by == "head" else 3) and session["num_items"] == len(items)
    assert tokens(app, session_id) == left


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "missing_field", "to"),
        ({"to": "turn_x"}, 404, "turn_not_found", "to"),
        ({"to": "item_x"}, 404, "item_not_found", "to"),
        ({"to": 99}, 400, "invalid_fork_point", "to"),
        ({"to": -1}, 400, "invalid_fork_point", "to"),
        ({"to": "head", "expect_revision": 7}, 409, "revision_conflict", "expect_revision"),
        ({"to": "head", "hard": True}, 400, "unknown_field", "hard"),
    ],
)
def test_a_bad_rollback_changes_nothing(
    app: RunningApp, body: Json, status: int, code: str, param: str | None
) -> None:
    session_id = app.session()
    app.turn(session_id, "a")
    before = tokens(app, session_id)
    reply = app.post(f"/v1/sessions/{session_id}/rollback", body)
    assert app.error(reply) == (status, code, param)
    assert tokens(app, session_id) == before
    assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 1


def test_a_running_turn_is_in_the_way_of_a_rollback(app: RunningApp) -> None:
    session_id = app.session()
    first = app.turn(session_id, "a")
    app.engine.pause()
    path = f"/v1/sessions/{session_id}"
    with app.http.stream("POST", f"{path}/turns", json={"input": "b", "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        refused = app.post(f"{path}/rollback", {"to": first["id"]})
        assert app.error(refused)[:2] == (409, "turn_in_progress")
        app.engine.resume()
        list(lines)
    assert app.post(f"{path}/rollback", {"to": first["id"]}).status_code == 200


def test_a_rollback_or_a_close_leaves_the_kv_of_forks_alone(app: RunningApp) -> None:
    app.engine.script = says("one", "two", "three")
    session_id = app.session()
    first = app.turn(session_id, "a")
    app.turn(session_id, "b")
    whole = tokens(app, session_id)
    child = app.post(f"/v1/sessions/{session_id}/fork", {}).json()["data"][0]["id"]
    app.post(f"/v1/sessions/{session_id}/rollback", {"to": first["id"]})
    app.http.delete(f"/v1/sessions/{session_id}")
    turn = app.turn(child, "c")
    assert turn["cache"]["miss"] is None and turn["x_cache"]["l1"] >= len(whole) - 1


def test_an_export_is_taken_back_with_the_same_tokens_and_items(app: RunningApp) -> None:
    session_id = app.session(instructions="Be brief.", metadata={"k": "v"})
    app.turn(session_id, "a")
    reply = app.get(f"/v1/sessions/{session_id}/export")
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    kinds = [json.loads(line)["type"] for line in reply.content.splitlines()]
    assert (kinds[0], kinds[-1]) == ("session", "end") and set(kinds[1:-1]) == {"record"}
    copy = app.post("/v1/sessions/import", content=reply.content).json()
    assert copy["id"] != session_id and copy["metadata"] == {"k": "v"}
    assert tokens(app, copy["id"]) == tokens(app, session_id)
    items = [app.get(f"/v1/sessions/{i}/items").json()["data"] for i in (session_id, copy["id"])]
    assert items[0] == items[1]
    app.http.delete(f"/v1/sessions/{session_id}")
    assert app.turn(copy["id"], "b")["status"] == "completed"


def test_a_broken_or_foreign_export_is_refused_with_its_line(app: RunningApp) -> None:
    session_id = app.session()
    app.turn(session_id, "a")
    whole = app.get(f"/v1/sessions/{session_id}/export").content
    lines = whole.splitlines(keepends=True)
    num_before = len(app.get("/v1/sessions", params={"limit": 1000}).json()["data"])
    header = json.loads(lines[0])
    other_model = json.dumps({**header, "model": "gpt-9"}).encode() + b"\n"
    settings = {**header["settings"], "reasoning": {"effort": "high"}}
    effort = json.dumps({**header, "settings": settings}).encode() + b"\n"
    for raw, status, code, text in (
        (b"", 400, "invalid_import", "cut off"),
        (b"{}\n", 400, "invalid_import", "line 1"),
        (b"".join(lines[:-1]), 400, "invalid_import", "cut off"),
        (lines[0] + b"nonsense\n", 400, "invalid_import", "line 2"),
        (b"".join([other_model, *lines[1:]]), 404, "model_not_found", "gpt-9"),
        (b"".join([effort, *lines[1:]]), 400, "unsupported_parameter", "reasoning.effort"),
    ):
        reply = app.post("/v1/sessions/import", content=raw)
        assert app.error(reply)[:2] == (status, code), raw
        assert text in reply.json()["error"]["message"]
    assert len(app.get("/v1/sessions", params={"limit": 1000}).json()["data"]) == num_before
    assert app.error(app.get("/v1/sessions/sess_x/export"))[:2] == (404, "session_not_found")


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 2**63, "", "x", "\0", "/w==", [], {}, [1], [-1], {"a": 1}),
    *("../x", "turn_x"),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths_of(value[key], (*path, key))


def with_value(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = with_value(value[path[0]], path[1:], odd)
    return changed


def test_a_changed_export_is_refused_or_makes_a_session_that_can_be_used(app: RunningApp) -> None:
    """Any value of any field, and all that reads a session: no answer is an internal error."""
    session_id = app.session(instructions="Be brief.", metadata={"k": "v"})
    for text in ("a", "b"):
        app.turn(session_id, text)
    export = app.get(f"/v1/sessions/{session_id}/export").text
    lines = [json.loads(line) for line in export.splitlines()]
    every = [(path, odd) for path in paths_of(lines) for odd in ODD]
    taken = 0
    for path, odd in random.Random(5).sample(every, 250):
        body = "\n".join(map(json.dumps, with_value(lines, path, odd)))
        reply = app.http.post("/v1/sessions/import", content=body)
        assert reply.status_code < 500, (path, odd, reply.text)
        if reply.status_code != 200:
            assert app.error(reply)[0] in (400, 404), (path, odd)
            continue
        taken += 1
        copy = f"/v1/sessions/{reply.json()['id']}"
        replies = [app.get(f"{copy}/{what}") for what in ("items", "tokens", "turns", "cache")]
        turn = {"input": "x", "auto_close_calls": True}
        replies += [app.get(f"{copy}/export"), app.post(f"{copy}/turns", turn)]
        replies += [app.post(f"{copy}/rollback", {"to": 0}), app.http.delete(copy)]
        assert all(one.status_code < 500 for one in replies), (path, odd, replies)
    assert 20 < taken < 200


def test_events_outlive_a_fork_and_a_copy_that_have_the_same_turns(app: RunningApp) -> None:
    session_id = app.session()
    turn_id = app.turn(session_id, "a")["id"]
    events = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
    told = app.get(events).text
    assert "turn.completed" in told
    fork = app.post(f"/v1/sessions/{session_id}/fork").json()["data"][0]["id"]
    export = app.get(f"/v1/sessions/{session_id}/export").content
    copy = app.post("/v1/sessions/import", content=export).json()["id"]
    for other in (fork, copy):
        assert app.http.delete(f"/v1/sessions/{other}").status_code == 200
        assert app.get(events).text == told
    journals = app.services.journals.directory
    assert list(journals.glob(f"{turn_id}*"))
    app.http.delete(f"/v1/sessions/{session_id}")
    assert not list(journals.glob(f"{turn_id}*"))


def test_a_quota_of_tokens_stops_turns_items_and_new_sessions(tmp_path: Path) -> None:
    with RunningApp(tmp_path, settings={"sessions": {"max_tokens_per_tenant": 10}}) as app:
        session_id = app.session()
        app.turn(session_id, "a question of some more words than ten tokens need")
        path = f"/v1/sessions/{session_id}"
        exported = app.get(f"{path}/export").content
        for reply in (
            app.post(f"{path}/turns", {"input": "x"}),
            app.post(f"{path}/items", {"items": "x"}),
            app.post(f"{path}/fork"),
            app.post("/v1/sessions", {"model": "default"}),
            app.post("/v1/sessions/import", content=exported),
        ):
            assert app.error(reply)[:2] == (429, "kv_quota_exceeded")
            assert reply.headers["retry-after"]
        app.post(f"{path}/rollback", {"to": 0})
        assert app.turn(session_id, "b")["status"] == "completed"


def test_the_manifest_grows_by_the_pages_a_turn_filled_and_has_no_gap(app: RunningApp) -> None:
    long = " ".join(f"word{n}" for n in range(60))
    app.engine.script = says(long)
    session_id = app.session()
    for n in range(3):
        app.turn(session_id, f"{n} {long}")
    lines = [json.loads(x) for x in app.get(f"/v1/sessions/{session_id}/export").text.splitlines()]
    sizes = [len(x["record"]["page_hashes"]) * 3 // 4 // 16 for x in lines if x["type"] == "record"]
    assert sum(sizes) in range((len(tokens(app, session_id)) - 1) // 64, 10_000)
    assert max(sizes) < sum(sizes) / 2


def test_an_api_process_takes_up_its_own_turns_and_leaves_those_of_others(tmp_path: Path) -> None:
    shared = {"sessions": {"sqlite_path": str(tmp_path / "shared.db")}}
    with RunningApp(tmp_path / "a", says("word " * 50), settings=shared) as a:
        a.engine.hold_at = 3
        session_id = a.session()
        path = f"/v1/sessions/{session_id}/turns"
        with a.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
            next(reply.iter_lines())
            with RunningApp(tmp_path / "b", settings=shared) as b:
                time.sleep(0.2)
                assert b.engine.requests == []
                assert b.get(f"/v1/sessions/{session_id}").json()["status"] == "running"
        a.restart()
        a.engine.hold_at = None
        until(lambda: a.get(f"/v1/sessions/{session_id}").json()["status"] != "running")
        assert a.get(f"/v1/sessions/{session_id}").json()["revision"] == 1
        assert len(a.engine.requests) == 1
