# SPDX-License-Identifier: Apache-2.0
"""The tables of the SQLite session store and the migrations that make them.

Does not know: sessions. A migration is a list of statements, numbered from 1, never edited once
released: a change is a new migration. `migrate` brings any older file to `SCHEMA_VERSION`.

sessions          one row a session; body is the encoded session without settings
session_settings  apart, because tools are large and a turn does not change them
log_records       the turn logs; tokens first, so reading them walks no item text
log_refs          which session refers to which records; end -1: its own log, still growing
pending_turns     begun and not ended, at most one a session
queued_turns      accepted, waiting for the turn before them
ended_turns       ended without becoming history
idempotency_keys  key -> turn, with the hash of the body it came with
tenant_quotas     limits of single tenants; NULL: as configured
owners            API processes, and until when each said to be alive
cancels           turns that are to stop, left as word for the process that runs them
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

from sessions.errors import StoreSchemaTooNew

Migrations = tuple[tuple[str, tuple[str, ...]], ...]
MIGRATIONS: Final[Migrations] = (
    (
        "sessions, logs, turns and keys",
        (
            """CREATE TABLE sessions (
                id TEXT PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL,
                version INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL,
                parent_session_id TEXT, num_tokens INTEGER NOT NULL,
                metadata TEXT NOT NULL, body BLOB NOT NULL) WITHOUT ROWID""",
            "CREATE INDEX sessions_by_tenant ON sessions (tenant, id)",
            "CREATE INDEX sessions_by_expiry ON sessions (expires_at_ms)",
            "CREATE INDEX sessions_by_parent ON sessions (parent_session_id, id)",
            """CREATE TABLE session_settings (
                session_id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID""",
            """CREATE TABLE log_records (
                log_id TEXT NOT NULL, seq INTEGER NOT NULL, record_id TEXT NOT NULL,
                input_len INTEGER NOT NULL, tokens BLOB NOT NULL, body BLOB NOT NULL,
                PRIMARY KEY (log_id, seq))""",
            "CREATE UNIQUE INDEX log_records_by_id ON log_records (log_id, record_id)",
            """CREATE TABLE log_refs (
                log_id TEXT NOT NULL, session_id TEXT NOT NULL, end INTEGER NOT NULL,
                PRIMARY KEY (log_id, session_id)) WITHOUT ROWID""",
            "CREATE INDEX log_refs_by_session ON log_refs (session_id)",
            """CREATE TABLE pending_turns (
                session_id TEXT PRIMARY KEY, turn_id TEXT NOT NULL, body BLOB NOT NULL)
                WITHOUT ROWID""",
            """CREATE TABLE ended_turns (
                session_id TEXT NOT NULL, turn_id TEXT NOT NULL, ended_at_ms INTEGER NOT NULL,
                input_len INTEGER NOT NULL, tokens BLOB NOT NULL, body BLOB NOT NULL,
                PRIMARY KEY (session_id, turn_id))""",
            "CREATE INDEX ended_turns_by_time ON ended_turns (ended_at_ms)",
            """CREATE TABLE idempotency_keys (
                session_id TEXT NOT NULL, key TEXT NOT NULL, body_hash TEXT NOT NULL,
                turn_id TEXT NOT NULL, created_at_ms INTEGER NOT NULL,
                PRIMARY KEY (session_id, key)) WITHOUT ROWID""",
            "CREATE INDEX idempotency_keys_by_time ON idempotency_keys (created_at_ms)",
        ),
    ),
    (
        "turns that wait, and who is alive",
        (
            """CREATE TABLE queued_turns (
                session_id TEXT NOT NULL, turn_id TEXT NOT NULL, body BLOB NOT NULL,
                PRIMARY KEY (session_id, turn_id)) WITHOUT ROWID""",
            """CREATE TABLE owners (
                owner TEXT PRIMARY KEY, until_ms INTEGER NOT NULL) WITHOUT ROWID""",
        ),
    ),
    (
        "limits of single tenants",
        (
            """CREATE TABLE tenant_quotas (
                tenant TEXT PRIMARY KEY, max_sessions INTEGER, max_tokens INTEGER)
                WITHOUT ROWID""",
        ),
    ),
    (
        "turns that are to stop",
        (
            """CREATE TABLE cancels (
                turn_id TEXT PRIMARY KEY, asked_at_ms INTEGER NOT NULL) WITHOUT ROWID""",
        ),
    ),
    # New bytes have sums (sessions.stored_sums), which an older Moorage cannot read; old ones stay.
    ("stored bytes with sums", ()),
)
SCHEMA_VERSION: Final = len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, migrations: Migrations = MIGRATIONS) -> int:
    """Apply what is missing, each migration in its own transaction; returns the version before.

    Raises `StoreSchemaTooNew`. Two processes may run it at once: the write lock orders them.
    """
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at_ms INTEGER NOT NULL)"
    )
    before = _version(connection)
    if before > len(migrations):
        raise StoreSchemaTooNew(
            f"the database has schema {before}, this Moorage knows up to {len(migrations)} "
            "(hint: start the Moorage that wrote it, or a later one)"
        )
    for version, (name, statements) in enumerate(migrations, start=1):
        _apply(connection, version, name, statements)
    return before


def _apply(
    connection: sqlite3.Connection, version: int, name: str, statements: tuple[str, ...]
) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _version(connection) < version:
            for statement in statements:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO migrations VALUES (?, ?, ?)",
                (version, name, time.time_ns() // 1_000_000),
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT COALESCE(MAX(version), 0) FROM migrations").fetchone()
    return int(row[0])
