# SPDX-License-Identifier: Apache-2.0
"""Random lives of many sessions in a real store: histories stay exact, and nothing is left over.

After every step each session reads back what a plain model of it says, from a store with a cold
cache too; once all sessions are deleted, the store holds nothing of them.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sessions import history
from sessions.config import SessionsConfig
from sessions.ids import new_id
from sessions.session import Session
from sessions.store import ListQuery
from sessions.stores import make_store
from sessions.turn_log import Record
from tests.contracts.session_store import StoreHarness
from tests.fakes.redis_server import RedisServer
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn

PICK = st.integers(0, 9)


@dataclass
class Known:
    """A session as stored, and the records its history must have."""

    session: Session
    records: tuple[Record, ...]


class StoredFamily(RuleBasedStateMachine):
    """`config` and `leftovers` are what a store under test fills in."""

    def config(self) -> SessionsConfig:
        raise AssertionError("a store under test names its configuration")

    def leftovers(self) -> list[Any]:
        raise AssertionError("a store under test says what it still holds")

    @initialize()
    def open(self) -> None:
        config = self.config()
        self.harness = StoreHarness(lambda: make_store(config))
        self.cold = StoreHarness(lambda: make_store(replace(config, log_cache_bytes=0)))
        self.known: list[Known] = []
        self.num_turns = 0
        self.create()

    @rule()
    def create(self) -> None:
        session, records = fresh_session()
        stored = self.harness.run(self.harness.store.create(session, records))
        self.known.append(Known(session=stored, records=records))

    @precondition(lambda self: self.known)
    @rule(index=PICK)
    def turn(self, index: int) -> None:
        known = self.pick(index)
        self.num_turns += 1
        work = run_turn(self.harness.store, known.session, token_ids=(self.num_turns,))
        known.session, record = self.harness.run(work)
        known.records += (record,)
        self.check(known)

    @precondition(lambda self: self.known)
    @rule(index=PICK)
    def failing_turn(self, index: int) -> None:
        known, store = self.pick(index), self.harness.store
        turn = pending(known.session, key=new_id("batch"))
        claim = self.harness.run(store.begin_turn(known.session.begin_turn(turn, NOW_MS), turn))
        record = outcome(turn, status="failed", committed=False)
        ended = claim.session.end_turn(record, NOW_MS)
        known.session = self.harness.run(store.end_turn(ended, record))
        self.check(known)

    @precondition(lambda self: len(self.known) < 10)
    @rule(index=PICK, at=PICK, n=st.integers(1, 3))
    def fork(self, index: int, at: int, n: int) -> None:
        if not self.known:
            return
        known, store = self.pick(index), self.harness.store
        log = self.harness.run(store.read_log(known.session))
        end = 1 + at % len(known.records)
        forks = history.fork(known.session, log, known.records[end - 1].id, NOW_MS, n=n)
        for child in self.harness.run(store.create_many(forks)):
            self.known.append(Known(session=child, records=known.records[:end]))
            self.check(self.known[-1])

    @precondition(lambda self: self.known)
    @rule(index=PICK, to=PICK)
    def rollback(self, index: int, to: int) -> None:
        known, store = self.pick(index), self.harness.store
        log = self.harness.run(store.read_log(known.session))
        end = 1 + to % len(known.records)
        moved, own = history.rollback(known.session, log, known.records[end - 1].id, NOW_MS)
        known.session = self.harness.run(store.replace_history(moved, own))
        known.records = known.records[:end]
        self.check(known)

    @precondition(lambda self: self.known)
    @rule(index=PICK)
    def delete(self, index: int) -> None:
        known = self.known.pop(index % len(self.known))
        assert self.harness.run(self.harness.store.delete(known.session.id)) is True
        for other in self.known:
            self.check(other)

    def pick(self, index: int) -> Known:
        return self.known[index % len(self.known)]

    def check(self, known: Known) -> None:
        for harness in (self.harness, self.cold):
            assert harness.run(harness.store.get(known.session.id)) == known.session
            log = harness.run(harness.store.read_log(known.session))
            assert log.records == known.records

    def teardown(self) -> None:
        store = self.harness.store
        page = self.harness.run(store.list_sessions(ListQuery(limit=100)))
        assert {s.id for s in page.sessions} == {known.session.id for known in self.known}
        usage = self.harness.run(store.tenant_usage("default"))
        assert usage.num_tokens == sum(known.session.num_tokens for known in self.known)
        for known in self.known:
            self.harness.run(store.delete(known.session.id))
        self.harness.run(store.forget_keys(NOW_MS * 2))
        assert self.leftovers() == []
        self.harness.close()
        self.cold.close()


class SqliteFamily(StoredFamily):
    def config(self) -> SessionsConfig:
        self.directory = Path(tempfile.mkdtemp())
        return SessionsConfig(sqlite_path=str(self.directory / "s.db"))

    def leftovers(self) -> list[Any]:
        connection = sqlite3.connect(self.directory / "s.db")
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if name != "migrations"
        ]
        found = [row for t in tables for row in connection.execute(f"SELECT '{t}', * FROM {t}")]
        connection.close()
        return found

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


class RedisFamily(StoredFamily):
    server: ClassVar[RedisServer]

    def config(self) -> SessionsConfig:
        self.prefix = f"{new_id('log')}:"
        return SessionsConfig(
            store="redis", redis_url=self.server.url, redis_key_prefix=self.prefix
        )

    def leftovers(self) -> list[Any]:
        client = redis.Redis.from_url(self.server.url)
        kept = {f"{self.prefix}schema".encode(), f"{self.prefix}opened".encode()}
        found = [key for key in client.keys(f"{self.prefix}*") if key not in kept]
        client.close()
        return found


LIMITS = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_sqlite_keeps_every_history_and_no_leftovers() -> None:
    run_state_machine_as_test(SqliteFamily, settings=LIMITS)


@pytest.mark.redis
def test_redis_keeps_every_history_and_no_leftovers(tmp_path: Path) -> None:
    RedisFamily.server = RedisServer(tmp_path)
    RedisFamily.server.start()
    try:
        run_state_machine_as_test(RedisFamily, settings=LIMITS)
    finally:
        RedisFamily.server.kill()
