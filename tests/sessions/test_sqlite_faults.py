# SPDX-License-Identifier: Apache-2.0
"""The SQLite store under kill -9, locks, full disks, read-only and damaged files."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sessions.config import SessionsConfig
from sessions.errors import (
    SessionNotFound,
    StoreCorrupt,
    StoreFull,
    StoreSchemaTooNew,
    StoreUnavailable,
    VersionConflict,
)
from sessions.session import Session
from sessions.sqlite_schema import SCHEMA_VERSION
from sessions.sqlite_store import SqliteSessionStore
from sessions.turn_log import PendingTurn
from tests.contracts.session_store import StoreHarness
from tests.fakes.killed_writer import acknowledged_until_killed
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def config_for(path: Path, **fields: int) -> SessionsConfig:
    return SessionsConfig(sqlite_path=str(path), **fields)  # type: ignore[arg-type]


def open_store(path: Path, **fields: int) -> SqliteSessionStore:
    store = SqliteSessionStore(config_for(path, **fields))
    asyncio.run(store.open())
    return store


@pytest.fixture
def harness(path: Path) -> Iterator[StoreHarness]:
    harness = StoreHarness(lambda: SqliteSessionStore(config_for(path)))
    yield harness
    harness.close()


def make(harness: StoreHarness) -> Session:
    session, records = fresh_session()
    return harness.run(harness.store.create(session, records))


def test_every_turn_acknowledged_before_kill_9_is_there_after(path: Path) -> None:
    for seed in range(6):
        acknowledged = acknowledged_until_killed(config_for(path), seed)
        harness = StoreHarness(lambda: SqliteSessionStore(config_for(path)))
        begun = {turn.session_id: turn.id for turn in harness.run(harness.store.pending_turns())}
        for session_id, turn_ids in acknowledged.items():
            session = harness.run(harness.store.get(session_id))
            log = harness.run(harness.store.read_log(session))
            stored = [record.id for record in log.records[1:]]
            assert stored[: len(turn_ids)] == turn_ids
            assert len(stored) - len(turn_ids) in (0, 1)  # one may be stored and not yet said
            assert session.revision == len(stored)
            assert session.num_tokens == log.num_tokens
            assert begun.get(session_id) == session.current_turn
        harness.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_write_ahead_log_cut_anywhere_keeps_whole_turns_only(
    path: Path, harness: StoreHarness, tmp_path: Path
) -> None:
    session = make(harness)
    created_len = Path(f"{path}-wal").stat().st_size
    for number in range(6):
        session, _ = harness.run(run_turn(harness.store, session, token_ids=(number,) * 500))
    database, wal = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    revisions = set()
    for step in range(24):
        cut_path = tmp_path / f"cut{step}.db"
        cut_path.write_bytes(database)
        Path(f"{cut_path}-wal").write_bytes(
            wal[: created_len + (len(wal) - created_len) * step // 23]
        )
        cut = StoreHarness(lambda at=cut_path: SqliteSessionStore(config_for(at)))  # type: ignore[misc]
        found = cut.run(cut.store.get(session.id))
        log = cut.run(cut.store.read_log(found))
        assert (found.revision, found.num_tokens) == (len(log.records) - 1, log.num_tokens)
        begun = [turn.id for turn in cut.run(cut.store.pending_turns())]
        assert begun == ([found.current_turn] if found.current_turn else [])
        revisions.add(found.revision)
        cut.close()
    assert revisions == set(range(7))


def test_a_turn_left_pending_by_a_crash_is_found_and_ended(harness: StoreHarness) -> None:
    session = make(harness)
    turn = pending(session, key="k")
    harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
    other = harness.another()
    (found,) = harness.run(other.pending_turns())
    assert isinstance(found, PendingTurn) and found == turn
    running = harness.run(other.get(found.session_id))
    record = outcome(found, status="failed", committed=False)
    ended = harness.run(other.end_turn(running.end_turn(record, NOW_MS), record))
    assert ended.status == "idle"
    match = harness.run(other.find_key(session.id, "k", "h"))
    assert match is not None and match.turn_id == turn.id


def test_a_lock_held_elsewhere_is_said_and_passes(path: Path) -> None:
    harness = StoreHarness(lambda: SqliteSessionStore(config_for(path, store_timeout_ms=2_000)))
    session = make(harness)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="another process holds"):
        harness.run(harness.store.update(session.update(NOW_MS)))
    assert harness.run(harness.store.get(session.id)) == session  # reads go on
    assert "the last write failed" in harness.run(harness.store.health()).warnings[0]
    holder.execute("ROLLBACK")
    holder.close()
    assert harness.run(harness.store.update(session.update(NOW_MS))).version == 2
    assert harness.run(harness.store.health()).warnings == ()
    harness.close()


def test_a_session_just_read_is_never_older_than_what_another_process_wrote(
    path: Path, harness: StoreHarness
) -> None:
    session = make(harness)
    other = harness.another()
    for _ in range(3):
        session = harness.run(other.update(session.update(NOW_MS)))
        assert harness.run(harness.store.get(session.id)) == session


def test_a_session_just_read_is_read_beside_a_writer_and_is_gone_once_deleted(
    path: Path, harness: StoreHarness
) -> None:
    session = make(harness)
    assert harness.run(harness.store.get(session.id)) == session
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert harness.run(harness.store.get(session.id)) == session
    holder.close()
    assert harness.run(harness.store.delete(session.id))
    with pytest.raises(SessionNotFound):
        harness.run(harness.store.get(session.id))


def test_a_failed_write_in_a_group_takes_no_other_with_it(harness: StoreHarness) -> None:
    good, bad = make(harness), make(harness)
    harness.run(harness.store.update(bad.update(NOW_MS)))

    async def both() -> tuple[Session | BaseException, ...]:
        return await asyncio.gather(
            harness.store.update(bad.update(NOW_MS)),
            harness.store.update(good.update(NOW_MS)),
            harness.store.update(bad.update(NOW_MS)),
            return_exceptions=True,
        )

    first, second, third = harness.run(both())
    assert isinstance(first, VersionConflict) and isinstance(third, VersionConflict)
    assert isinstance(second, Session) and second.version == 2
    assert harness.run(harness.another().get(good.id)) == second


def test_a_caller_that_gives_up_undoes_nothing(harness: StoreHarness) -> None:
    session = make(harness)

    async def give_up() -> None:
        task = asyncio.create_task(harness.store.update(session.update(NOW_MS)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    harness.run(give_up())
    harness.run(harness.store.close())
    assert harness.run(harness.another().get(session.id)).version == 2


def test_a_full_store_says_so_goes_on_reading_and_recovers(path: Path) -> None:
    limit = 400_000
    harness = StoreHarness(lambda: SqliteSessionStore(config_for(path, sqlite_max_bytes=limit)))
    first = session = make(harness)
    with pytest.raises(StoreFull, match="sqlite_max_bytes"):
        for number in range(200):
            if number % 10 == 0:
                session = make(harness)
            session, _ = harness.run(
                run_turn(harness.store, session, token_ids=tuple(range(4_000)))
            )
    stored = harness.run(harness.another().get(session.id))
    log = harness.run(harness.store.read_log(stored))
    assert log.num_tokens == stored.num_tokens
    assert harness.run(harness.store.health()).ok
    full = harness.run(harness.store.get(first.id))
    harness.run(harness.store.delete(stored.id))
    harness.run(run_turn(harness.store, full))
    harness.close()


def test_a_disk_full_at_start_is_one_clear_error(path: Path) -> None:
    with pytest.raises(StoreFull, match="sessions.db: database or disk is full"):
        open_store(path, sqlite_max_bytes=8_192)


def test_a_file_that_is_no_database_is_one_clear_error(path: Path) -> None:
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(StoreCorrupt, match=r"sessions\.db: file is not a database"):
        open_store(path)


def test_a_directory_in_the_way_is_one_clear_error(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StoreUnavailable, match="unable to open database file"):
        open_store(path)
    path.joinpath("file").write_text("")
    with pytest.raises(StoreUnavailable, match="Not a directory|File exists"):
        open_store(path / "file" / "sessions.db")


def test_a_file_that_may_not_be_written_is_one_clear_error(path: Path) -> None:
    asyncio.run(open_store(path).close())
    path.chmod(0o444)
    path.parent.chmod(0o555)
    program = (
        "import asyncio, concurrent.futures.thread, os, sys\n"
        "from sessions.config import SessionsConfig\n"
        "from sessions.errors import StoreUnavailable\n"
        "from sessions.sqlite_store import SqliteSessionStore\n"
        "store = SqliteSessionStore(SessionsConfig(sqlite_path=sys.argv[1]))\n"
        "if os.geteuid() == 0: os.setuid(65534)  # root may write anything\n"
        "try:\n"
        "    asyncio.run(store.open())\n"
        "except StoreUnavailable as error:\n"
        "    print(error)\n"
    )
    # The directories above a test's own are private to who runs it.
    for parent in path.parent.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    path.parent.chmod(0o755)
    assert done.stdout.startswith(f"{path}: "), done.stderr
    assert "must be writable" in done.stdout


def test_a_file_of_a_later_moorage_is_left_alone(path: Path) -> None:
    asyncio.run(open_store(path).close())
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO migrations VALUES (?, 'later', 0)", (SCHEMA_VERSION + 1,))
    connection.commit()
    connection.close()
    with pytest.raises(StoreSchemaTooNew, match="start the Moorage that wrote it"):
        open_store(path)


def test_opening_twice_at_once_migrates_once(path: Path) -> None:
    async def open_both() -> None:
        stores = [SqliteSessionStore(config_for(path)) for _ in range(4)]
        await asyncio.gather(*(store.open() for store in stores))
        for store in stores:
            await store.close()

    asyncio.run(open_both())
    connection = sqlite3.connect(path)
    versions = connection.execute("SELECT version FROM migrations WHERE version > 0").fetchall()
    connection.close()
    assert versions == [(version,) for version in range(1, SCHEMA_VERSION + 1)]


def test_damaged_bytes_are_said_and_not_served(path: Path, harness: StoreHarness) -> None:
    session, record = harness.run(run_turn(harness.store, make(harness)))
    harness.run(harness.store.close())
    connection = sqlite3.connect(path)
    connection.execute("UPDATE log_records SET body = x'c1' WHERE record_id = ?", (record.id,))
    connection.commit()
    connection.close()
    other = harness.another()
    with pytest.raises(StoreCorrupt, match="not as they were written"):
        harness.run(other.read_log(session))
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM log_records WHERE record_id = ?", (record.id,))
    connection.commit()
    connection.close()
    with pytest.raises(StoreCorrupt, match="lacks records"):
        harness.run(other.read_log(session))
