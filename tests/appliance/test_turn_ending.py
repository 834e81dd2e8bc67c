# SPDX-License-Identifier: Apache-2.0
"""An end that the store would not take is offered again until it does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ApiError
from appliance.metrics import Metrics
from appliance.turn_ending import TurnEnding
from sessions.config import SessionsConfig
from sessions.errors import StoreFull, StoreUnavailable
from sessions.session import Session
from sessions.sqlite_store import SqliteSessionStore
from sessions.turn_log import Record
from tests.fakes.appliance import RunningApp, says, sse_events, until
from tests.fakes.session_turns import NOW_MS, fresh_session, pending


class FullStore(SqliteSessionStore):
    """A store whose disk is full for as long as it is told."""

    is_full = True

    async def end_turn(self, session: Session, record: Record) -> Session:
        if self.is_full:
            raise StoreFull("the disk is full")
        return await super().end_turn(session, record)


async def stuck(folder: Path, late_retry_s: float) -> tuple[FullStore, TurnEnding, Any]:
    """A store with one turn whose end it has refused."""
    store = FullStore(SessionsConfig(sqlite_path=str(folder / "store.sqlite")))
    await store.open()
    session = await store.create(*fresh_session())
    turn = pending(session)
    await store.begin_turn(session.begin_turn(turn, NOW_MS), turn)
    ending = TurnEnding(store, Metrics(), lambda: NOW_MS, late_retry_s=late_retry_s)
    await ending.abandon(turn, ApiError("internal_error", "x"))
    assert (await store.get(session.id)).current_turn == turn.id
    return store, ending, turn


def test_a_turn_the_store_refused_ends_by_itself_once_there_is_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, ending, turn = await stuck(tmp_path, 0.01)
        await asyncio.sleep(0.1)
        assert (await store.get(turn.session_id)).current_turn == turn.id
        store.is_full = False
        async with asyncio.timeout(60):
            while (await store.get(turn.session_id)).current_turn is not None:
                await asyncio.sleep(0.01)
        await ending.close()
        await store.close()

    asyncio.run(scenario())


def test_whoever_asks_for_the_end_gets_it_at_once_or_hears_why_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, ending, turn = await stuck(tmp_path, 1000.0)
        with pytest.raises(StoreFull):
            await ending.settle(turn.id)
        store.is_full = False
        await ending.settle(turn.id)
        await ending.settle(turn.id)
        assert (await store.get(turn.session_id)).current_turn is None
        await ending.close()
        await store.close()

    asyncio.run(scenario())


def test_a_session_that_was_deleted_is_owed_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteSessionStore(SessionsConfig(sqlite_path=str(tmp_path / "store.sqlite")))
        await store.open()
        session = await store.create(*fresh_session())
        turn = pending(session)
        await store.begin_turn(session.begin_turn(turn, NOW_MS), turn)
        assert await store.delete(session.id)
        ending = TurnEnding(store, Metrics(), lambda: NOW_MS)
        await ending.abandon(turn, ApiError("internal_error", "x"))
        assert not ending.owes(turn.id)
        await ending.close()
        await store.close()

    asyncio.run(scenario())


class StubbornStore(SqliteSessionStore):
    """A store that takes no end of a turn for as long as it is told."""

    is_stubborn = True

    async def commit_turn(self, session: Session, record: Record) -> Session:
        if self.is_stubborn:
            raise StoreUnavailable("the file is locked")
        return await super().commit_turn(session, record)


def test_a_cancel_while_the_store_refuses_the_end_says_so_and_later_tells_the_end(
    tmp_path: Path,
) -> None:
    with RunningApp(tmp_path, says("one two three four five six")) as app:
        app.engine.hold_at = 2
        stubborn = StubbornStore(app.config.sessions)
        asyncio.run_coroutine_threadsafe(stubborn.open(), app.loop).result(60)
        app.services.store._store = stubborn  # type: ignore[attr-defined]
        session_id = app.session()
        path = f"/v1/sessions/{session_id}/turns"
        with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
            turn_id = next(sse_events(reply))["turn_id"]
        answer = app.post(f"{path}/{turn_id}/cancel")
        assert app.error(answer)[:2] == (503, "store_unavailable")
        assert "not stored yet" in answer.json()["error"]["message"]
        assert app.get(f"{path}/{turn_id}").json()["status"] == "running"
        stubborn.is_stubborn = False
        until(lambda: app.post(f"{path}/{turn_id}/cancel").status_code == 200)
        answer = app.post(f"{path}/{turn_id}/cancel")
        assert answer.json()["status"] == "cancelled"
        assert app.get(f"{path}/{turn_id}").json() == answer.json()
