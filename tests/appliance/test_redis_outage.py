# SPDX-License-Identifier: Apache-2.0
"""A real Redis dies, hangs or loses the end of its log under a running turn: the turn ends as it
would have, once, when the server is back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.appliance import RunningApp, says, until
from tests.fakes.redis_server import RedisServer

pytestmark = pytest.mark.redis
WORDS = "one two three four five six seven eight nine ten"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def app(tmp_path: Path, server: RedisServer) -> Iterator[RunningApp]:
    sessions = {"store": "redis", "redis_url": server.url, "store_timeout_ms": 3000}
    with RunningApp(tmp_path, says(WORDS), settings={"sessions": sessions}) as app:
        yield app


@pytest.mark.parametrize("outage", ["killed", "stopped", "its log cut"])
def test_a_turn_that_ends_while_redis_is_away_is_committed_once_it_is_back(
    app: RunningApp, server: RedisServer, outage: str
) -> None:
    session_id = app.session()
    first = app.turn(session_id, "before")
    app.engine.pause()
    path = f"/v1/sessions/{session_id}/turns"
    events: list[dict[str, object]] = []

    def read() -> None:
        events.extend(app.stream(session_id, "go", headers={"Idempotency-Key": "k"}))

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: len(app.engine.requests) == 2)  # the turn was begun, and its engine has it
    if outage == "stopped":
        server.pause()
    else:
        server.kill()
    refused = app.post("/v1/sessions", {"model": "default"})
    assert app.error(refused)[:2] == (503, "store_unavailable")
    app.engine.resume()
    until(lambda: bool(app.asgi.state.context.turns.runner.ending._in_trouble))
    if outage == "its log cut":  # as a disk that lost power: a write that nobody acknowledged
        (log,) = server.directory.glob("appendonlydir/*.incr.aof")
        log.write_bytes(log.read_bytes() + b"*3\r\n$7\r\nEVALSHA\r\n$40\r\n0123")
    if outage == "stopped":
        server.resume()
    else:
        server.start()
    reader.join(60)
    assert not reader.is_alive()
    assert events[-1]["type"] == "turn.completed"
    turn_id = str(events[0]["turn_id"])
    until(lambda: app.get(f"/v1/sessions/{session_id}").status_code == 200)
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert (session["revision"], session["status"]) == (2, "idle")
    turns = app.get(path).json()["data"]
    assert [turn["id"] for turn in turns] == [first["id"], turn_id]
    again = app.post(path, {"input": "go"}, headers={"Idempotency-Key": "k"}).json()
    assert (again["id"], again["status"]) == (turn_id, "completed")
    assert len(app.engine.requests) == 2
    assert app.turn(session_id, "after")["status"] == "completed"
