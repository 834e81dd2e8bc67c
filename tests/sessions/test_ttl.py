# SPDX-License-Identifier: Apache-2.0
"""The sweep expires, then deletes; it never touches a session in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sessions.config import SessionsConfig
from sessions.errors import SessionExpired, SessionNotFound
from sessions.session import Session
from sessions.settings import SessionSettings
from sessions.sqlite_store import SqliteSessionStore
from sessions.ttl import Sweeper, SweepResult
from tests.contracts.session_store import StoreHarness
from tests.fakes.session_clock import SessionClock
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StoreHarness]:
    config = SessionsConfig(sqlite_path=str(tmp_path / "sessions.db"))
    harness = StoreHarness(lambda: SqliteSessionStore(config))
    yield harness
    harness.close()


@pytest.fixture
def clock() -> SessionClock:
    return SessionClock(NOW_MS)


@pytest.fixture
def sweeper(harness: StoreHarness, clock: SessionClock) -> Sweeper:
    async def clock_ms() -> int:
        return clock.now_ms()

    return Sweeper(harness.store, clock_ms, retention_ms=HOUR_MS, batch=2)


def make(harness: StoreHarness, expires_after_ms: int) -> Session:
    settings = SessionSettings(expires_after_ms=expires_after_ms)
    session, records = fresh_session(settings=settings)
    return harness.run(harness.store.create(session, records))


def test_idle_session_expires_and_is_deleted_after_its_retention(
    harness: StoreHarness, clock: SessionClock, sweeper: Sweeper
) -> None:
    session = make(harness, DAY_MS)
    clock.advance(DAY_MS - 1)
    assert harness.run(sweeper.sweep()) == SweepResult()
    clock.advance(1)
    assert harness.run(sweeper.sweep()) == SweepResult(expired=(session.id,))
    expired = harness.run(harness.store.get(session.id))
    assert expired.status == "expired"
    with pytest.raises(SessionExpired):
        expired.begin_turn(pending(expired), clock.now_ms())
    clock.advance(HOUR_MS - 1)
    assert harness.run(sweeper.sweep()) == SweepResult()
    clock.advance(1)
    assert harness.run(sweeper.sweep()) == SweepResult(deleted=(session.id,))
    with pytest.raises(SessionNotFound):
        harness.run(harness.store.get(session.id))


def test_use_moves_the_expiry(harness: StoreHarness, clock: SessionClock, sweeper: Sweeper) -> None:
    session = make(harness, DAY_MS)
    now_ms = clock.advance(DAY_MS - 1)
    harness.run(harness.store.update(session.update(now_ms)))
    clock.advance(DAY_MS - 1)
    assert harness.run(sweeper.sweep()) == SweepResult()


def test_session_with_a_running_turn_is_left_alone(
    harness: StoreHarness, clock: SessionClock, sweeper: Sweeper
) -> None:
    session = make(harness, HOUR_MS)
    turn = pending(session)
    claim = harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
    clock.advance(2 * DAY_MS)
    assert harness.run(sweeper.sweep()) == SweepResult()
    record = outcome(turn)
    done = claim.session.commit_turn(record, clock.now_ms())
    harness.run(harness.store.commit_turn(done, record))
    assert harness.run(sweeper.sweep()) == SweepResult()
    assert harness.run(harness.store.get(session.id)).status == "idle"


def test_a_pass_is_bounded_and_the_next_goes_on(
    harness: StoreHarness, clock: SessionClock, sweeper: Sweeper
) -> None:
    made = [make(harness, HOUR_MS).id for _ in range(5)]
    clock.advance(HOUR_MS)
    passes = [harness.run(sweeper.sweep()).expired for _ in range(4)]
    assert [len(expired) for expired in passes] == [2, 2, 1, 0]
    assert sorted(sum(passes, ())) == made


def test_running_turns_that_are_overdue_do_not_starve_the_sweep(
    harness: StoreHarness, clock: SessionClock, sweeper: Sweeper
) -> None:
    for _ in range(3):
        session = make(harness, 1)
        turn = pending(session)
        harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
    idle = make(harness, HOUR_MS)
    clock.advance(DAY_MS)
    assert harness.run(sweeper.sweep()).expired == (idle.id,)


def test_a_clock_that_leaps_and_is_set_right_expires_nothing(
    harness: StoreHarness, clock: SessionClock, sweeper: Sweeper
) -> None:
    session = make(harness, DAY_MS)
    harness.run(sweeper.sweep())
    clock.advance(365 * DAY_MS)
    assert harness.run(sweeper.sweep()) == SweepResult()
    clock.advance(-365 * DAY_MS)
    assert harness.run(sweeper.sweep()) == SweepResult()
    clock.advance(DAY_MS)
    assert harness.run(sweeper.sweep()) == SweepResult()  # a leap: the machine slept, say
    assert harness.run(sweeper.sweep()) == SweepResult(expired=(session.id,))


def test_a_clock_that_goes_back_expires_nothing_early(
    harness: StoreHarness, clock: SessionClock, sweeper: Sweeper
) -> None:
    session = make(harness, HOUR_MS)
    clock.advance(-DAY_MS)
    assert harness.run(sweeper.sweep()) == SweepResult()
    assert harness.run(harness.store.get(session.id)).status == "idle"
