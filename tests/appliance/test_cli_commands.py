# SPDX-License-Identifier: Apache-2.0
"""The admin commands against a running app: what they print, and how they end."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance.cli import main
from appliance.supervisor import ADMIN_KEY_FILE, STATE_FILE
from tests.fakes.appliance import Json, RunningApp, says, sse_events, until

TEXT = "a question long enough to fill a page or two of the cache " * 8


def run(app: RunningApp, *arguments: str) -> Result:
    server = app.config.server
    state = {"url": str(app.http.base_url), "pids": {"supervisor": os.getpid()}}
    (server.run_dir / STATE_FILE).write_text(json.dumps(state))
    (server.run_dir / ADMIN_KEY_FILE).write_text("key")
    options = ["--set", f"server.run_dir={server.run_dir}"]
    return CliRunner().invoke(main, [*arguments, *options])


def out(app: RunningApp, *arguments: str) -> str:
    result = run(app, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(app: RunningApp, *arguments: str) -> Json:
    return dict(json.loads(out(app, *arguments, "--json")))


def test_suspend_and_resume(app: RunningApp) -> None:
    session_id = app.session()
    app.turn(session_id, TEXT)
    assert "tokens kept in l3" in out(app, "sessions", "suspend", session_id)
    assert as_json(app, "sessions", "show", session_id)["session"]["status"] == "suspended"
    assert "tokens restored" in out(app, "sessions", "resume", session_id)
    assert as_json(app, "sessions", "resume", session_id)["status"] == "idle"


def test_a_turn_is_named_by_number_from_either_end_or_by_id(app: RunningApp) -> None:
    session_id = app.session()
    ids = [app.turn(session_id, text)["id"] for text in ("a", "b", "c")]

    def explained(which: str) -> str:
        return str(as_json(app, "sessions", "explain", session_id, "--turn", which)["turn"])

    assert [explained(w) for w in ("1", "3", "-1", "-3", "last", ids[1])] == [
        ids[0], ids[2], ids[2], ids[0], ids[2], ids[1]
    ]  # fmt: skip
    for which, said in (
        ("4", "the session has 3 turns, numbered from 1"),
        ("-4", "the session has 3 turns"),
        ("0", "numbered from 1"),
        ("turn_x", "no turn in the session's history"),
    ):
        result = run(app, "sessions", "explain", session_id, "--turn", which)
        assert result.exit_code == 1 and said in result.stderr
        assert result.stderr.count("\n") == 1


def test_quotas_are_shown_set_and_count(app: RunningApp) -> None:
    session_id = app.session(initial_items="some text to count")
    assert as_json(app, "quota", "get", "default")["max_sessions"] == 0
    shown = out(app, "quota", "set", "default", "--sessions", "100000", "--tokens", "1")
    assert "100000" in shown and "its own" in shown
    refused = app.post(f"/v1/sessions/{session_id}/turns", {"input": "x"})
    assert app.error(refused)[:2] == (429, "kv_quota_exceeded")
    seen = app.get(f"/v1/sessions/{session_id}").json()["quota"]
    assert (seen["max_sessions"], seen["max_tokens"]) == (100000, 1) and seen["tokens"] > 1
    again = as_json(app, "quota", "set", "default", "--tokens", "default")
    assert (again["max_sessions"], again["max_tokens"]) == (100000, 0)
    assert app.turn(session_id, "x")["status"] == "completed"
    as_json(app, "quota", "set", "default", "--sessions", "default")
    for arguments in (("--sessions", "many"), ()):
        result = run(app, "quota", "set", "default", *arguments)
        assert result.exit_code == 1 and result.stderr.startswith("moorage: ")


def test_the_doctor_looks_at_every_part_and_finds_what_is_wrong(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        report = as_json(app, "doctor")
        assert report["status"] == "ok", report
        parts = {finding["part"] for finding in report["findings"]}
        assert {"store", "engine", "cache", "turns", "tier l1", "chat template"} <= parts
        assert "is found again" in out(app, "doctor")
        app.engine.tier_states["l3"] = "down"
        assert as_json(app, "doctor")["status"] == "warning"
        ready = app.get("/ready")
        assert ready.status_code == 200, "a tier that is down costs time and no turn"
        assert ready.json()["warnings"] == ["tier l3: fake down"]
        app.engine.stop()
        until(lambda: run(app, "doctor").exit_code != 0)
        result = run(app, "doctor")
        assert result.exit_code == 1 and "not answer" in result.stdout


def test_top_is_by_byte_seconds_and_the_tree_can_be_narrowed(app: RunningApp) -> None:
    session_id = app.session()
    app.turn(session_id, TEXT)
    rows = as_json(app, "cache", "top")["data"]
    assert session_id in [row["session_id"] for row in rows]
    assert "l1 MB s" in out(app, "cache", "top")
    assert "default" in out(app, "cache", "top", "--by", "tenant")
    for narrowed in (("--depth", "1"), ("--session", session_id), ("--tenant", "default")):
        assert as_json(app, "cache", "tree", *narrowed)["object"] == "cache.tree"
    result = run(app, "cache", "tree", "--session", "sess_x")
    assert result.exit_code == 1 and "session_not_found" in result.stderr


def test_top_shows_what_runs_now(app: RunningApp) -> None:
    session_id = app.session()
    app.engine.pause()
    body = {"input": "x", "stream": True}
    with app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as reply:
        events = sse_events(reply)
        next(e for e in events if e["type"] == "turn.cache")
        shown = out(app, "top", "--once")
        assert "1 running" in shown and session_id in shown
        app.engine.resume()
        list(events)
    assert as_json(app, "top", "--once")["running"] == []


def test_top_says_how_many_drafts_were_kept_once_there_are_any(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "drafts" not in out(app, "top", "--once")
    found = app.engine._stats

    def with_drafts() -> dict[str, float]:
        return {**found(), "draft_tokens": 40.0, "draft_tokens_accepted": 30.0}

    monkeypatch.setattr(app.engine, "_stats", with_drafts)
    assert "30 of 40 drafts kept (75%)" in out(app, "top", "--once")


def test_explain_says_where_the_wait_went(app: RunningApp) -> None:
    session_id = app.session()
    app.engine.prefill_s = 0.2
    turn = app.turn(session_id, "x")
    waited = as_json(app, "sessions", "explain", session_id)["waited_ms"]
    assert waited["prefill"] >= 190
    total = 1000 * (turn["finished_at"] - turn["created_at"])
    # What came before the turn was created is a part of the wait for its first token.
    total = max(total, turn["timings"]["first_token_ms"])
    assert sum(waited.values()) == pytest.approx(total, abs=2.0)  # its parts are rounded


def test_explain_does_not_praise_a_turn_that_the_engine_never_looked_at(app: RunningApp) -> None:
    session_id = app.session()
    app.turn(session_id, "x")
    assert "everything that earlier turns" in out(app, "sessions", "explain", session_id)
    app.engine.stop()
    body = {"input": "y", "stream": True}
    with app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as reply:
        explained = out(app, "sessions", "explain", session_id)
        app.engine.start()
        reply.read()
    assert "everything" not in explained and "before it did" in explained


def test_what_is_printed_for_people_is_no_python(app: RunningApp) -> None:
    session_id = app.session(metadata={"task": "fix", "by": "me"})
    app.engine.script = says("Hello there.")
    app.turn(session_id, "hello")
    shown = out(app, "sessions", "show", session_id)
    assert "metadata: task fix, by me\n" in shown
    explained = out(app, "sessions", "explain", session_id)
    assert ", l2 0, l3 0\n" in explained and "miss: -\n" in explained
    tree = out(app, "cache", "tree", "--tenant", "nobody")
    assert tree == "nothing is resident\n"
    for text in (shown, explained, tree):
        assert not any(sign in text for sign in ("{", "None", "True"))


def test_tail_follows_a_session_to_its_end(app: RunningApp) -> None:
    session_id = app.session()

    def live() -> None:
        until(lambda: session_id in app.services.hub._readers)
        app.turn(session_id, "x")
        app.http.delete(f"/v1/sessions/{session_id}")

    living = threading.Thread(target=live)
    living.start()
    lines = out(app, "sessions", "tail", session_id, "--json").splitlines()
    living.join()
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds[0] == "session.state" and kinds[-1] == "session.closed"
    assert "session.turn_started" in kinds and "session.turn_ended" in kinds


@pytest.mark.parametrize("verb", ["suspend", "resume", "tail"])
def test_a_session_that_is_not_there_ends_a_command_with_one_line(
    app: RunningApp, verb: str
) -> None:
    result = run(app, "sessions", verb, "sess_x")
    assert result.exit_code == 1
    assert result.stderr.startswith("moorage: session_not_found")
    assert result.stderr.count("\n") == 1
