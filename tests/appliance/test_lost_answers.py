# SPDX-License-Identifier: Apache-2.0
"""A store does what it is asked and its answer is lost: no turn is left without a process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from sessions.errors import StoreUnavailable
from sessions.session import Session
from sessions.sqlite_store import SqliteSessionStore
from sessions.store import TurnClaim
from sessions.turn_log import PendingTurn
from tests.fakes.appliance import RunningApp, says, sse_events

T = TypeVar("T")
HEADERS = {"Idempotency-Key": "k"}


class ForgetfulStore(SqliteSessionStore):
    """`loses`: the answer of which write is lost (once); `is_late`: and the write comes later."""

    loses = ""
    is_late = False
    late: asyncio.Task[Any] | None = None
    may_write: asyncio.Event

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        return await self._written("begin", super().begin_turn(session, turn))

    async def queue_turn(self, turn: PendingTurn) -> str:
        return await self._written("queue", super().queue_turn(turn))

    async def _written(self, name: str, write: Coroutine[Any, Any, T]) -> T:
        if self.loses != name:
            return await write
        self.loses = ""
        if self.is_late:
            self.late = asyncio.create_task(self._later(write))
        else:
            await write
        raise StoreUnavailable("no answer in time")

    async def _later(self, write: Coroutine[Any, Any, Any]) -> None:
        await self.may_write.wait()
        await write


def forgetful(app: RunningApp) -> ForgetfulStore:
    """Put such a store in place of the app's."""
    store = ForgetfulStore(app.config.sessions)
    in_loop(app, store.open())
    store.may_write = asyncio.Event()
    app.services.store._store = store  # type: ignore[attr-defined]
    return store


def in_loop(app: RunningApp, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, app.loop).result(60)


def look_twice(app: RunningApp) -> None:
    takeover = app.asgi.state.context.takeover
    for _ in range(2):
        in_loop(app, takeover.adopt_strays())


@pytest.fixture
def app(tmp_path: Path) -> RunningApp:
    return RunningApp(tmp_path, says("one two three"))


@pytest.mark.parametrize("headers", [{}, HEADERS], ids=["no key", "key"])
def test_a_turn_whose_begin_was_stored_runs_though_the_answer_is_lost(
    app: RunningApp, headers: dict[str, str]
) -> None:
    with app:
        store = forgetful(app)
        session_id = app.session()
        store.loses = "begin"
        events = app.stream(session_id, "go", headers=headers)
        assert events[-1]["type"] == "turn.completed"
        assert [e["sequence_number"] for e in events] == list(range(1, len(events) + 1))
        assert app.turn(session_id, "next")["revision"] == 2


def test_a_turn_whose_begin_is_stored_after_its_refusal_is_found_and_run(app: RunningApp) -> None:
    with app:
        store = forgetful(app)
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        store.loses, store.is_late = "begin", True
        refused = app.post(path, {"input": "go"}, headers=HEADERS)
        assert app.error(refused)[:2] == (503, "store_unavailable")
        app.loop.call_soon_threadsafe(store.may_write.set)
        assert store.late is not None
        in_loop(app, asyncio.wait_for(store.late, 60))
        look_twice(app)
        turn = app.post(path, {"input": "go"}, headers=HEADERS).json()
        assert (turn["status"], turn["revision"]) == ("completed", 1)
        assert len(app.engine.requests) == 1
        assert app.turn(session_id, "next")["revision"] == 2


def test_a_turn_that_waits_in_the_store_alone_is_found_and_run(app: RunningApp) -> None:
    with app:
        store = forgetful(app)
        session_id = app.session(on_conflict="queue")
        path = f"/v1/sessions/{session_id}/turns"
        app.engine.pause()
        store.loses = "queue"
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as first:
            events = sse_events(first)
            next(events)
            url = f"{app.url}{path}"
            second = httpx.post(url, json={"input": "then"}, timeout=60)
            assert app.error(second)[:2] == (503, "store_unavailable")
            look_twice(app)
            app.engine.resume()
            assert list(events)[-1]["type"] == "turn.completed"
        third = app.turn(session_id, "last")
        assert third["revision"] == 3
        said = [turn["input"][0]["content"][0]["text"] for turn in app.get(path).json()["data"]]
        assert said == ["go", "then", "last"]


def test_a_turn_that_runs_or_waits_here_is_not_taken_up_again(app: RunningApp) -> None:
    with app:
        session_id = app.session(on_conflict="queue")
        path = f"/v1/sessions/{session_id}/turns"
        app.engine.pause()
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as first:
            events = sse_events(first)
            next(events)
            with httpx.stream(
                "POST", f"{app.url}{path}", json={"input": "then", "stream": True}, timeout=60
            ) as second:
                queued = sse_events(second)
                next(queued)
                takeover = app.asgi.state.context.takeover
                assert [in_loop(app, takeover.adopt_strays()) for _ in range(3)] == [0, 0, 0]
                app.engine.resume()
                assert list(events)[-1]["turn"]["revision"] == 1
                assert list(queued)[-1]["turn"]["revision"] == 2
        assert len(app.engine.requests) == 2
