# SPDX-License-Identifier: Apache-2.0
"""Migrations bring an older file up, once, and leave it whole where one fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sessions.errors import StoreSchemaTooNew
from sessions.sqlite_schema import MIGRATIONS, SCHEMA_VERSION, Migrations, migrate

FIRST: Migrations = (("one", ("CREATE TABLE a (x INTEGER)", "INSERT INTO a VALUES (7)")),)
SECOND: Migrations = (*FIRST, ("two", ("ALTER TABLE a ADD y INTEGER", "UPDATE a SET y = x + 1")))
BROKEN: Migrations = (*FIRST, ("two", ("ALTER TABLE a ADD y INTEGER", "UPDATE nowhere SET y = 1")))


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    yield connection
    connection.close()


def test_a_new_file_gets_every_migration(connection: sqlite3.Connection) -> None:
    assert migrate(connection) == 0
    assert migrate(connection) == SCHEMA_VERSION
    applied = connection.execute("SELECT version, name FROM migrations ORDER BY 1").fetchall()
    assert applied == [(n + 1, name) for n, (name, _) in enumerate(MIGRATIONS)]


def test_an_older_file_keeps_its_rows_and_gets_what_is_missing(
    connection: sqlite3.Connection,
) -> None:
    assert migrate(connection, FIRST) == 0
    assert migrate(connection, SECOND) == 1
    assert connection.execute("SELECT x, y FROM a").fetchall() == [(7, 8)]


def test_a_migration_that_fails_changes_nothing(connection: sqlite3.Connection) -> None:
    migrate(connection, FIRST)
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate(connection, BROKEN)
    assert [row[1] for row in connection.execute("PRAGMA table_info(a)")] == ["x"]
    assert migrate(connection, SECOND) == 1


def test_a_later_file_is_refused(connection: sqlite3.Connection) -> None:
    migrate(connection, SECOND)
    with pytest.raises(StoreSchemaTooNew, match="schema 2, this Moorage knows up to 1"):
        migrate(connection, FIRST)
