# SPDX-License-Identifier: Apache-2.0
"""Another process holds the session database's lock under a running turn: a clear refusal of what
would write, and the turn ends as it would have, once, when the lock is free."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from tests.fakes.appliance import RunningApp, says, until


def test_a_turn_that_ends_while_the_file_is_locked_is_committed_once_it_is_free(
    tmp_path: Path,
) -> None:
    settings = {"sessions": {"store_timeout_ms": 1500}}
    with RunningApp(tmp_path, says("one two three"), settings=settings) as app:
        session_id = app.session()
        first = app.turn(session_id, "before")
        app.engine.pause()
        path = f"/v1/sessions/{session_id}/turns"
        events: list[dict[str, object]] = []

        def read() -> None:
            events.extend(app.stream(session_id, "go", headers={"Idempotency-Key": "k"}))

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: len(app.engine.requests) == 2)  # begun, and its engine has it
        holder = sqlite3.connect(app.config.sessions.sqlite_path, isolation_level=None, timeout=30)
        holder.execute("BEGIN IMMEDIATE")
        refused = app.post("/v1/sessions", {"model": "default"})
        assert app.error(refused)[:2] == (503, "store_unavailable")
        assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 1  # reads go on
        app.engine.resume()
        until(lambda: bool(app.asgi.state.context.turns.runner.ending._in_trouble))
        holder.execute("ROLLBACK")
        holder.close()
        reader.join(60)
        assert not reader.is_alive()
        assert events[-1]["type"] == "turn.completed"
        turn_id = str(events[0]["turn_id"])
        session = app.get(f"/v1/sessions/{session_id}").json()
        assert (session["revision"], session["status"]) == (2, "idle")
        turns = app.get(path).json()["data"]
        assert [turn["id"] for turn in turns] == [first["id"], turn_id]
        again = app.post(path, {"input": "go"}, headers={"Idempotency-Key": "k"}).json()
        assert (again["id"], again["status"]) == (turn_id, "completed")
        assert len(app.engine.requests) == 2
