# SPDX-License-Identifier: Apache-2.0
"""A turn that is accepted while its process begins to stop is the next one's, and is not failed."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from sessions.session import Session
from sessions.sqlite_store import SqliteSessionStore
from sessions.store import TurnClaim
from sessions.turn_log import PendingTurn
from tests.fakes.appliance import Json, RunningApp, says, sse_events, until

T = TypeVar("T")


class HeldStore(SqliteSessionStore):
    """`asked` once it is asked to take a new turn; it does once it `may_answer`."""

    asked: asyncio.Event
    may_answer: asyncio.Event

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        await self._hold()
        return await super().begin_turn(session, turn)

    async def queue_turn(self, turn: PendingTurn) -> str:
        await self._hold()
        return await super().queue_turn(turn)

    async def _hold(self) -> None:
        self.asked.set()
        await self.may_answer.wait()


def held(app: RunningApp) -> HeldStore:
    """Put such a store in place of the app's."""
    store = HeldStore(app.config.sessions)
    in_loop(app, store.open())
    store.asked, store.may_answer = asyncio.Event(), asyncio.Event()
    app.services.store._store = store  # type: ignore[attr-defined]
    return store


def in_loop(app: RunningApp, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, app.loop).result(60)


def wait_running(context: Any) -> None:
    until(lambda: context.turns.num_running > 0)


def stream(app: RunningApp, session_id: str, key: str) -> list[Json]:
    path = f"{app.url}/v1/sessions/{session_id}/turns"
    body = {"input": "go", "stream": True}
    headers = {"Idempotency-Key": key}
    with httpx.stream("POST", path, json=body, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


@pytest.fixture
def app(tmp_path: Path) -> RunningApp:
    return RunningApp(tmp_path, says("one two three"))


def test_a_turn_that_the_store_takes_behind_the_drain_is_left_to_the_next_process(
    app: RunningApp,
) -> None:
    with app, concurrent.futures.ThreadPoolExecutor(1) as pool:
        store, session_id = held(app), app.session()
        reader = pool.submit(stream, app, session_id, "k")
        in_loop(app, asyncio.wait_for(store.asked.wait(), 60))
        in_loop(app, app.asgi.state.context.turns.drain(0.0))
        app.loop.call_soon_threadsafe(store.may_answer.set)
        events = reader.result(60)
        assert [event["type"] for event in events] == ["turn.created", "stream.reconnect"]
        assert events[-1]["starting_after"] == 1
        assert not app.engine.requests
        app.restart()
        again = stream(app, session_id, "k")
        assert again[0] == events[0] and again[-1]["type"] == "turn.completed"


def test_a_turn_that_begins_during_the_drain_gets_its_time_as_those_before_it(
    app: RunningApp,
) -> None:
    with app, concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, second = app.session(), app.session()
        context = app.asgi.state.context
        app.engine.pause()
        readers = [pool.submit(stream, app, first, "k")]
        wait_running(context)
        store = held(app)
        readers.append(pool.submit(stream, app, second, "k"))
        in_loop(app, asyncio.wait_for(store.asked.wait(), 60))

        async def drain() -> None:
            draining = asyncio.create_task(context.turns.drain(3600.0))
            await asyncio.sleep(0)
            store.may_answer.set()
            while context.turns.num_running < 2:
                await asyncio.sleep(0.005)
            app.engine.resume()
            await draining

        in_loop(app, drain())
        ends = [reader.result(60)[-1] for reader in readers]
        assert [end["type"] for end in ends] == ["turn.completed", "turn.completed"]


def test_no_turn_that_is_left_is_told_the_end_of_the_process_as_its_own(app: RunningApp) -> None:
    """The streams of an engine end with an error where nobody remembers them: turns are no such."""
    with app, concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, second = app.session(), app.session()
        context = app.asgi.state.context
        app.engine.pause()
        readers = {first: pool.submit(stream, app, first, "k")}
        wait_running(context)
        store = held(app)
        readers[second] = pool.submit(stream, app, second, "k")
        in_loop(app, asyncio.wait_for(store.asked.wait(), 60))

        async def drain() -> None:
            draining = asyncio.create_task(context.turns.drain(0.5))
            await asyncio.sleep(0)
            store.may_answer.set()  # the second begins while the drain lasts, or behind it
            await draining
            app.services.client.end_streams("draining", "the appliance is stopping")

        in_loop(app, drain())
        for reader in readers.values():
            assert reader.result(60)[-1]["type"] == "stream.reconnect"
        app.engine.resume()
        app.restart()
        for session_id in readers:
            assert stream(app, session_id, "k")[-1]["type"] == "turn.completed"


def test_a_turn_that_comes_to_a_closed_queue_waits_for_the_next_process(app: RunningApp) -> None:
    with app, concurrent.futures.ThreadPoolExecutor(2) as pool:
        session_id = app.session(on_conflict="queue")
        context = app.asgi.state.context
        app.engine.pause()
        first = pool.submit(stream, app, session_id, "k")
        wait_running(context)
        store = held(app)
        second = pool.submit(stream, app, session_id, "l")
        in_loop(app, asyncio.wait_for(store.asked.wait(), 60))
        in_loop(app, context.turns.drain(0.0))
        app.loop.call_soon_threadsafe(store.may_answer.set)
        assert first.result(60)[-1]["type"] == "stream.reconnect"
        left = second.result(60)
        assert [e["type"] for e in left] == ["turn.created", "turn.queued", "stream.reconnect"]
        app.engine.resume()
        app.restart()
        ends = [stream(app, session_id, key)[-1] for key in "kl"]
        assert [end["turn"]["revision"] for end in ends] == [1, 2]
