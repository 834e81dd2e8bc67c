# SPDX-License-Identifier: Apache-2.0
"""Turns outlive their process: those that wait, those of processes that died, those of others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest

from appliance.app import _sweep_forever
from appliance.turn_events import EventJournals
from appliance.turn_reader import TurnReader
from appliance.turn_takeover import TurnTakeover
from sessions.config import SessionsConfig
from sessions.errors import TurnNotFound
from sessions.session import Session
from sessions.sqlite_store import SqliteSessionStore
from sessions.store import SessionStore
from sessions.turn_log import PendingTurn, Record
from tests.appliance.test_conflicts import follow, start, texts
from tests.fakes.appliance import Json, RunningApp, says, sse_events, until
from tests.fakes.redis_server import RedisServer
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending

T = TypeVar("T")
WORDS = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture
def own_app(tmp_path: Path) -> Iterator[RunningApp]:
    with RunningApp(tmp_path, says(WORDS)) as app:
        yield app


def read_on(app: RunningApp, session_id: str, turn_id: str, after: int = 0) -> list[Json]:
    path = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
    with app.http.stream("GET", path, params={"starting_after": after}) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


def test_turns_that_wait_outlive_a_restart_in_their_order(own_app: RunningApp) -> None:
    app = own_app
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    path = f"/v1/sessions/{session_id}/turns"
    turn_ids = [start(app, session_id, text) for text in ("one", "two")]
    headers = {"Idempotency-Key": "k"}
    body = {"input": "three", "stream": True}
    with app.http.stream("POST", path, json=body, headers=headers) as reply:
        turn_ids.append(next(sse_events(reply))["turn_id"])
    app.restart()
    waiting = app.get(f"{path}/{turn_ids[2]}").json()
    assert (waiting["status"], waiting["input"][0]["content"][0]["text"]) == ("queued", "three")
    # Its key answers, and so does the other body under it.
    again = app.post(path, {**body, "input": "other"}, headers=headers)
    assert app.error(again)[:2] == (422, "idempotency_key_reused")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        attached = pool.submit(app.post, path, {"input": "three"}, headers=headers, timeout=30)
        until(lambda: app.num_readers(session_id, turn_ids[2]) == 1)
        app.engine.resume()
        assert attached.result().json()["id"] == turn_ids[2]
    for turn_id in turn_ids:
        events = follow(app, session_id, turn_id)
        assert events[-1]["type"] == "turn.completed"
        assert [e["sequence_number"] for e in events] == list(range(1, len(events) + 1))
        assert [e["type"] for e in events].count("turn.created") == 1
    assert texts(app, session_id) == ["one", "two", "three"]
    assert len(app.engine.requests) == 3


def test_a_queued_turn_that_was_cancelled_stays_so_after_a_restart(own_app: RunningApp) -> None:
    app = own_app
    app.engine.pause()
    session_id = app.session(on_conflict="queue")
    first, second = (start(app, session_id, text) for text in ("one", "two"))
    path = f"/v1/sessions/{session_id}/turns/{second}"
    answer = app.post(f"{path}/cancel").json()
    app.restart()
    app.engine.resume()
    assert app.get(path).json() == answer and answer["status"] == "cancelled"
    assert follow(app, session_id, first)[-1]["type"] == "turn.completed"
    assert texts(app, session_id) == ["one"]


def test_a_reader_is_told_to_come_back_where_its_turn_outlasts_the_drain(
    own_app: RunningApp,
) -> None:
    app = own_app
    app.engine.hold_at = 3
    session_id = app.session()
    path = f"/v1/sessions/{session_id}/turns"
    seen: list[Json] = []
    stopper = threading.Thread(target=app.stop)
    with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
        for event in sse_events(reply):
            seen.append(event)
            if event["type"] == "response.output_text.delta" and not stopper.ident:
                stopper.start()
    stopper.join()
    app.engine.hold_at = None
    last = seen.pop()
    assert last["type"] == "stream.reconnect" and "sequence_number" not in last
    assert last["starting_after"] == len(seen) == seen[-1]["sequence_number"]
    app.start()
    rest = read_on(app, session_id, last["turn_id"], last["starting_after"])
    assert rest[-1]["type"] == "turn.completed"
    numbers = [e["sequence_number"] for e in (*seen, *rest)]
    assert numbers == list(range(1, len(numbers) + 1))
    deltas = [e["delta"] for e in (*seen, *rest) if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == WORDS


def test_who_waits_for_an_answer_without_a_stream_is_told_too(own_app: RunningApp) -> None:
    app = own_app
    app.engine.pause()
    session_id = app.session()
    path = f"/v1/sessions/{session_id}/turns"
    headers = {"Idempotency-Key": "k"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(app.post, path, {"input": "go"}, headers=headers)
        until(lambda: len(app.engine.requests) == 1)
        app.stop()
        reply = waiting.result()
    assert app.error(reply)[:2] == (503, "draining")
    assert reply.headers["retry-after"] == "1"
    turn_id = reply.json()["error"]["turn_id"]
    app.engine.resume()
    app.start()
    turn = app.post(path, {"input": "go"}, headers=headers).json()
    assert (turn["id"], turn["status"]) == (turn_id, "completed")
    assert len(app.engine.requests) == 1


# Several processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def two_apps(tmp_path: Path, redis_server: RedisServer) -> Iterator[tuple[RunningApp, RunningApp]]:
    """Two API processes with engines of their own that share a store.

    They look after each other's turns when a test says so, and not by themselves while it runs.
    """
    sessions = {
        "store": "redis",
        "redis_url": redis_server.url,
        "redis_key_prefix": f"{tmp_path.name}:",
    }
    with (
        RunningApp(tmp_path / "a", says(WORDS), settings={"sessions": sessions}) as one,
        RunningApp(tmp_path / "b", says(WORDS), settings={"sessions": sessions}) as two,
    ):
        for app in (one, two):
            app.asgi.state.context.takeover.look = look_away
        yield one, two


async def look_away() -> None:
    """In place of a look that says that its process is alive, and takes up what is not."""


def adopt(app: RunningApp, *, alive_ms: int) -> int:
    """One look of a process after the turns of those that have been silent for so long."""
    takeover = TurnTakeover(app.services, app.asgi.state.context.turns, alive_ms=alive_ms)
    return run_in(app, takeover.adopt_orphans())


def run_in(app: RunningApp, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, app.loop).result(60)


def test_turns_of_a_dead_process_are_taken_up_by_another(
    two_apps: tuple[RunningApp, RunningApp],
) -> None:
    dead, other = two_apps
    dead.engine.pause()
    session_id = dead.session(on_conflict="queue")
    path = f"/v1/sessions/{session_id}/turns"
    headers = {"Idempotency-Key": "k"}
    body = {"input": "one", "stream": True}
    with dead.http.stream("POST", path, json=body, headers=headers) as reply:
        running = next(sse_events(reply))["turn_id"]
    waiting = start(dead, session_id, "two")
    dead.stop()
    assert adopt(other, alive_ms=0) == 0  # it may still be alive
    dead_owner = dead.services.owner
    run_in(other, other.services.store.beat(dead_owner, other.services.clock_ms() - 1))
    assert adopt(other, alive_ms=0) == 2
    assert follow(other, session_id, running)[-1]["type"] == "turn.completed"
    assert follow(other, session_id, waiting)[-1]["type"] == "turn.completed"
    assert texts(other, session_id) == ["one", "two"]
    turn = other.post(path, {"input": "one"}, headers=headers).json()
    assert (turn["id"], turn["status"]) == (running, "completed")
    dead.engine.resume()
    dead.start()  # it comes back late, and leaves alone what is no longer its own
    assert len(other.engine.requests) == 2
    assert dead.get(f"/v1/sessions/{session_id}").json()["revision"] == 2
    assert dead.turn(session_id, "three")["status"] == "completed"


class OtherClock:
    """A store whose clock a test sets ahead; all else is the store's."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.ahead_ms = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def clock_ms(self) -> int:
        return await self._store.clock_ms() + self.ahead_ms


@pytest.mark.parametrize("jump_ms", [600_000, -600_000])
def test_after_a_pause_an_outage_or_a_jump_of_the_clock_processes_leave_each_other_their_turns(
    two_apps: tuple[RunningApp, RunningApp], jump_ms: int
) -> None:
    """All look silent until they have had time to say that they live; who does not then is dead."""
    one, two = two_apps
    one.engine.pause()
    two.engine.pause()
    session_id = one.session()
    turn_id = start(one, session_id, "mine")
    store = OtherClock(two.services.store)
    services = dataclasses.replace(two.services, store=store)
    takeover = TurnTakeover(services, two.asgi.state.context.turns, alive_ms=20_000)

    async def owner_after(ms: int) -> str:
        store.ahead_ms += ms
        await takeover.look()
        (turn,) = await store.pending_turns()
        return str(turn.owner)

    async def look() -> None:
        theirs, own = one.services.owner, two.services.owner
        assert await owner_after(0) == theirs
        # It says now and then that it lives, and could not for a while: what it said is old.
        await store.beat(theirs, await store.clock_ms() + min(0, jump_ms) + 20_000)
        assert await owner_after(jump_ms) == theirs
        for _ in range(3):
            assert await owner_after(6_000) == theirs
        await store.beat(theirs, await store.clock_ms() + 20_000)
        assert await owner_after(6_000) == theirs
        assert await owner_after(9_000) == theirs
        assert await owner_after(9_000) == own

    run_in(two, look())
    two.engine.resume()
    assert follow(two, session_id, turn_id)[-1]["type"] == "turn.completed"
    one.engine.resume()


def test_whose_clock_is_wrong_takes_over_nothing(two_apps: tuple[RunningApp, RunningApp]) -> None:
    """Machines may disagree about the time for ever: all go by the store's."""
    one, two = two_apps
    one.engine.pause()
    session_id = one.session()
    turn_id = start(one, session_id, "mine")
    wrong = dataclasses.replace(two.services, clock_ms=lambda: two.services.clock_ms() + 86_400_000)
    takeover = TurnTakeover(wrong, two.asgi.state.context.turns)
    for _ in range(3):
        run_in(two, takeover.look())
    (turn,) = run_in(two, two.services.store.pending_turns())
    assert (turn.id, turn.owner) == (turn_id, one.services.owner)
    one.engine.resume()
    assert follow(one, session_id, turn_id)[-1]["type"] == "turn.completed"


class SweptStore:
    """Counts the passes over a store."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.num_passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def forget_keys(self, now_ms: int) -> int:
        self.num_passes += 1
        return await self._store.forget_keys(now_ms)


def test_whose_clock_is_wrong_expires_nobody_s_session(
    two_apps: tuple[RunningApp, RunningApp],
) -> None:
    one, two = two_apps
    session_id = one.session()
    one.turn(session_id, "kept")
    store = SweptStore(two.services.store)
    a_year_ms = 365 * 86_400_000
    wrong = dataclasses.replace(
        two.services,
        store=store,
        clock_ms=lambda: two.services.clock_ms() + a_year_ms,
    )

    async def sweep() -> None:
        task = asyncio.create_task(_sweep_forever(wrong))
        async with asyncio.timeout(30):
            while store.num_passes == 0:
                await asyncio.sleep(0.01)
        task.cancel()

    run_in(two, sweep())
    assert one.get(f"/v1/sessions/{session_id}").json()["status"] == "idle"
    assert one.turn(session_id, "again")["status"] == "completed"


def test_a_turn_of_another_process_is_followed_to_its_end_and_waited_for(
    two_apps: tuple[RunningApp, RunningApp],
) -> None:
    one, two = two_apps
    one.engine.pause()
    session_id = one.session(on_conflict="queue")
    turn_id = start(one, session_id, "first")
    path = f"/v1/sessions/{session_id}/turns"
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        two.http.stream("GET", f"{path}/{turn_id}/events") as reply,
    ):
        events = sse_events(reply)
        assert next(events)["type"] == "turn.created"
        second = pool.submit(httpx.post, f"{two.url}{path}", json={"input": "2nd"}, timeout=60)
        until(lambda: two.asgi.state.context.turns.queue.num_waiting == 1)
        one.engine.resume()
        assert list(events)[-1]["type"] == "turn.completed"
        assert second.result().json()["status"] == "completed"
    assert texts(two, session_id) == ["first", "2nd"]


def test_a_turn_is_cancelled_through_any_process_running_or_waiting(
    two_apps: tuple[RunningApp, RunningApp],
) -> None:
    one, two = two_apps
    one.engine.pause()
    session_id = one.session(on_conflict="queue")
    running, waiting = (start(one, session_id, text) for text in ("first", "second"))
    path = f"/v1/sessions/{session_id}/turns"
    queued = two.post(f"{path}/{waiting}/cancel").json()
    assert (queued["id"], queued["status"]) == (waiting, "cancelled")
    stopped = two.post(f"{path}/{running}/cancel").json()
    assert (stopped["id"], stopped["status"]) == (running, "cancelled")
    until(lambda: running in one.engine.aborted)  # it may not have had it yet
    assert "committed_tokens" in stopped
    # Asked again, of either, it is the same answer.
    for app in two_apps:
        assert app.post(f"{path}/{running}/cancel").json() == stopped
    assert follow(one, session_id, running)[-1]["type"] == "turn.cancelled"
    assert follow(one, session_id, waiting)[-1]["type"] == "turn.cancelled"
    assert run_in(two, two.services.store.asked_cancels()) == frozenset()
    one.engine.resume()
    assert two.turn(session_id, "third")["status"] == "completed"


def test_interrupting_and_closing_reach_a_turn_of_another_process(
    two_apps: tuple[RunningApp, RunningApp],
) -> None:
    one, two = two_apps
    one.engine.pause()
    session_id = one.session(on_conflict="interrupt")
    first = start(one, session_id, "first")
    assert two.turn(session_id, "second")["status"] == "completed"
    assert follow(one, session_id, first)[-1]["type"] == "turn.cancelled"
    third = start(one, session_id, "third")
    assert two.http.delete(f"/v1/sessions/{session_id}").json()["deleted"] is True
    until(lambda: third in one.engine.aborted)
    assert one.get(f"/v1/sessions/{session_id}").status_code == 404


def test_a_turn_of_a_dead_process_stops_once_it_is_taken_up(
    two_apps: tuple[RunningApp, RunningApp],
) -> None:
    dead, other = two_apps
    dead.engine.pause()
    session_id = dead.session()
    turn_id = start(dead, session_id, "first")
    dead.stop()
    other.engine.pause()
    path = f"/v1/sessions/{session_id}/turns/{turn_id}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(httpx.post, f"{other.url}{path}/cancel", timeout=60)
        until(lambda: bool(run_in(other, other.services.store.asked_cancels())))
        owner = dead.services.owner
        run_in(other, other.services.store.beat(owner, other.services.clock_ms() - 1))
        assert adopt(other, alive_ms=0) == 1
        assert cancelled.result().json()["status"] == "cancelled"
    dead.engine.resume()
    dead.start()
    assert dead.turn(session_id, "again")["status"] == "completed"


class MovingStore(SqliteSessionStore):
    """A store in which a turn ends between the two reads of who looks at it."""

    turn: PendingTurn | None = None

    async def read_turn(self, session: Session, turn_id: str) -> PendingTurn | Record:
        turn, self.turn = self.turn, None
        if turn is not None:
            running = await self.get(session.id)
            record = outcome(turn)
            await self.commit_turn(running.commit_turn(record, NOW_MS), record)
        return await super().read_turn(session, turn_id)


def test_a_turn_that_ends_while_it_is_looked_at_is_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = MovingStore(SessionsConfig(sqlite_path=str(tmp_path / "store.sqlite")))
        await store.open()
        session = await store.create(*fresh_session())
        turn = pending(session)
        await store.begin_turn(session.begin_turn(turn, NOW_MS), turn)
        store.turn = turn
        journals = EventJournals(tmp_path / "turns", 60.0)
        services: Any = SimpleNamespace(store=store, journals=journals)
        reader = TurnReader(services, None, None)  # type: ignore[arg-type]
        assert (await reader.get(None, session.id, turn.id))["status"] == "completed"
        with pytest.raises(TurnNotFound):
            await reader.get(None, session.id, "turn_x")
        await store.close()

    asyncio.run(scenario())
