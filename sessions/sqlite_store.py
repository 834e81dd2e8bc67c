# SPDX-License-Identifier: Apache-2.0
"""The embedded session store: one SQLite file, WAL, synchronous FULL.

Does not know: what a turn means. See sessions.store for the promises, sessions.sqlite_schema for
the tables, sessions.sqlite_threads for who runs what where. Several processes may share a file.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from sessions import codec
from sessions.codec import StoredRecord
from sessions.config import SessionsConfig
from sessions.errors import (
    IdempotencyKeyReused,
    SessionExists,
    SessionNotFound,
    StoreCorrupt,
    StoreError,
    TurnNotFound,
    VersionConflict,
)
from sessions.log_cache import LogCache
from sessions.session import QUEUED, RUNNING, Session
from sessions.sqlite_schema import SCHEMA_VERSION, migrate
from sessions.sqlite_threads import SqliteThreads
from sessions.store import (
    KeyMatch,
    ListQuery,
    SessionPage,
    StoreHealth,
    TenantUsage,
    TurnClaim,
    check_records,
    validate_query,
)
from sessions.turn_log import LogSpan, PendingTurn, Record, TurnLog

_SELECT = "SELECT s.body, t.body FROM sessions s JOIN session_settings t ON t.session_id = s.id "
_OPEN_END = -1  # of a reference to a session's own log, which still grows


class SqliteSessionStore:
    """Implements `sessions.store.SessionStore`."""

    def __init__(self, config: SessionsConfig) -> None:
        self._config = config
        self._cache = LogCache(config.log_cache_bytes)
        self._db = SqliteThreads(
            Path(config.sqlite_path),
            timeout_ms=config.store_timeout_ms,
            max_bytes=config.sqlite_max_bytes,
        )

    async def open(self) -> None:
        await self._db.open(_prepare)

    async def close(self) -> None:
        await self._db.close()

    async def health(self) -> StoreHealth:
        try:
            await self._db.read(lambda db: db.execute("SELECT 1 FROM migrations").fetchone())
        except StoreError as error:
            return StoreHealth(ok=False, kind="sqlite", detail=error.message)
        return StoreHealth(ok=True, kind="sqlite", detail=f"schema {SCHEMA_VERSION}, WAL, FULL")

    # -- sessions

    async def create(self, session: Session, records: Sequence[Record] = ()) -> Session:
        return (await self.create_many([(session, records)]))[0]

    async def create_many(
        self, children: Sequence[tuple[Session, Sequence[Record]]]
    ) -> tuple[Session, ...]:
        def work(db: sqlite3.Connection) -> tuple[Session, ...]:
            return tuple(_insert_session(db, session, records) for session, records in children)

        return await self._db.write(work)

    async def get(self, session_id: str, *, tenant: str | None = None) -> Session:
        session = await self._db.read(lambda db: _load(db, session_id))
        if tenant is not None and session.tenant != tenant:
            raise SessionNotFound(session_id)
        return session

    async def list_sessions(self, query: ListQuery) -> SessionPage:
        validate_query(query)
        return await self._db.read(lambda db: _list(db, query))

    async def update(self, session: Session) -> Session:
        settings = codec.encode_settings(session.settings)

        def work(db: sqlite3.Connection) -> Session:
            stored = _save(db, session)
            db.execute(
                "UPDATE session_settings SET body = ?1 WHERE session_id = ?2 AND body <> ?1",
                (settings, session.id),
            )
            return stored

        return await self._db.write(work)

    async def delete(self, session_id: str, *, version: int | None = None) -> bool:
        is_deleted = await self._db.write(lambda db: _delete(db, session_id, version))
        self._cache.drop(session_id)
        return is_deleted

    # -- turns

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        body = codec.encode_pending(turn)
        return await self._db.write(lambda db: _begin(db, session, turn, body))

    async def commit_turn(self, session: Session, record: Record) -> Session:
        return await self._append(session, record)

    async def append_record(self, session: Session, record: Record) -> Session:
        return await self._append(session, record)

    async def end_turn(self, session: Session, record: Record) -> Session:
        row = codec.encode_record(record)

        def work(db: sqlite3.Connection) -> Session:
            known = db.execute(
                "SELECT 1 FROM ended_turns WHERE session_id = ? AND turn_id = ?",
                (session.id, record.id),
            ).fetchone()
            if known is not None:
                return _load(db, session.id)
            stored = _save(db, session)
            db.execute("DELETE FROM pending_turns WHERE session_id = ?", (session.id,))
            db.execute(
                "INSERT INTO ended_turns VALUES (?, ?, ?, ?, ?, ?)",
                (session.id, record.id, stored.updated_at_ms, row.input_len, row.tokens, row.body),
            )
            return stored

        return await self._db.write(work)

    async def _append(self, session: Session, record: Record) -> Session:
        row = codec.encode_record(record)

        def work(db: sqlite3.Connection) -> Session:
            known = db.execute(
                "SELECT 1 FROM log_records WHERE log_id = ? AND record_id = ?",
                (session.log_id, record.id),
            ).fetchone()
            if known is not None:
                return _load(db, session.id)
            stored = _save(db, session)
            _insert_record(db, session.log_id, session.log_len - 1, record.id, row)
            db.execute("DELETE FROM pending_turns WHERE session_id = ?", (session.id,))
            return stored

        stored = await self._db.write(work)
        if stored.version == session.version + 1:
            self._cache.extend(stored, record)
        return stored

    async def replace_history(self, session: Session, records: Sequence[Record]) -> Session:
        settings = codec.encode_settings(session.settings)

        def work(db: sqlite3.Connection) -> Session:
            stored = _save(db, session)
            db.execute(
                "UPDATE session_settings SET body = ?1 WHERE session_id = ?2 AND body <> ?1",
                (settings, session.id),
            )
            left = _release(db, session.id)
            _insert_log(db, session, records)
            _drop_unshared(db, left)
            return stored

        stored = await self._db.write(work)
        self._cache.drop(session.id)
        return stored

    # -- history

    async def read_log(self, session: Session) -> TurnLog:
        log = self._cache.get(session) or TurnLog()
        missing = session.num_records - len(log.records)
        if missing:
            skip = len(log.records)
            rows = await self._db.read(lambda db: _read_spans(db, session, skip))
            log = log.extended(*map(codec.decode_record, rows))
            self._cache.put(session, log)
        return log

    async def read_tokens(self, session: Session) -> bytes:
        return (await self.read_log(session)).token_ids

    async def read_turn(self, session: Session, turn_id: str) -> PendingTurn | Record:
        outcome = await self._db.read(lambda db: _read_turn(db, session.id, turn_id))
        if outcome is not None:
            return outcome
        record = (await self.read_log(session)).find(turn_id)
        if record is None:
            raise TurnNotFound(turn_id)
        return record

    async def pending_turns(self) -> tuple[PendingTurn, ...]:
        rows = await self._db.read(
            lambda db: db.execute("SELECT body FROM pending_turns ORDER BY turn_id").fetchall()
        )
        return tuple(codec.decode_pending(body) for (body,) in rows)

    # -- keys, expiry, usage

    async def find_key(self, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
        return await self._db.read(lambda db: _find_key(db, session_id, key, body_hash))

    async def forget_keys(self, now_ms: int) -> int:
        before_ms = now_ms - self._config.idempotency_retention_ms

        def work(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM ended_turns WHERE ended_at_ms < ?", (before_ms,))
            # A key whose turn still runs is kept, however long that takes.
            return db.execute(
                "DELETE FROM idempotency_keys WHERE created_at_ms < ? AND turn_id NOT IN "
                "(SELECT turn_id FROM pending_turns)",
                (before_ms,),
            ).rowcount

        return await self._db.write(work)

    async def due(self, now_ms: int, limit: int) -> tuple[Session, ...]:
        rows = await self._db.read(
            lambda db: db.execute(
                _SELECT + "WHERE s.expires_at_ms <= ? AND s.status NOT IN (?, ?) "
                "ORDER BY s.expires_at_ms, s.id LIMIT ?",
                (now_ms, RUNNING, QUEUED, limit),
            ).fetchall()
        )
        return tuple(codec.decode_session(*row) for row in rows)

    async def tenant_usage(self, tenant: str) -> TenantUsage:
        row = await self._db.read(
            lambda db: db.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_tokens), 0) FROM sessions WHERE tenant = ?",
                (tenant,),
            ).fetchone()
        )
        return TenantUsage(num_sessions=row[0], num_tokens=row[1])


def _prepare(db: sqlite3.Connection) -> None:
    migrate(db)
    # Proves that the file takes a write: a read-only file or a full disk shows here, at start.
    db.execute("BEGIN IMMEDIATE")
    db.execute(
        "INSERT INTO migrations VALUES (0, 'opened', ?1) "
        "ON CONFLICT (version) DO UPDATE SET applied_at_ms = ?1",
        (time.time_ns() // 1_000_000,),
    )
    db.execute("COMMIT")


def _load(db: sqlite3.Connection, session_id: str) -> Session:
    row = db.execute(_SELECT + "WHERE s.id = ?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    return codec.decode_session(*row)


def _save(db: sqlite3.Connection, session: Session) -> Session:
    stored = replace(session, version=session.version + 1)
    updated = db.execute(
        "UPDATE sessions SET status = ?, version = ?, expires_at_ms = ?, num_tokens = ?, "
        "metadata = ?, body = ? WHERE id = ? AND version = ?",
        (
            stored.status,
            stored.version,
            stored.expires_at_ms,
            stored.num_tokens,
            json.dumps(stored.metadata),
            codec.encode_session(stored),
            session.id,
            session.version,
        ),
    )
    if updated.rowcount == 0:
        row = db.execute("SELECT version FROM sessions WHERE id = ?", (session.id,)).fetchone()
        if row is None:
            raise SessionNotFound(session.id)
        raise VersionConflict(session.id, session.version, row[0])
    return stored


def _insert_session(db: sqlite3.Connection, session: Session, records: Sequence[Record]) -> Session:
    stored = replace(session, version=1)
    try:
        db.execute(
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                stored.id,
                stored.tenant,
                stored.status,
                stored.version,
                stored.expires_at_ms,
                stored.parent_session_id,
                stored.num_tokens,
                json.dumps(stored.metadata),
                codec.encode_session(stored),
            ),
        )
    except sqlite3.IntegrityError:
        raise SessionExists(session.id) from None
    db.execute(
        "INSERT INTO session_settings VALUES (?, ?)",
        (session.id, codec.encode_settings(session.settings)),
    )
    _insert_log(db, session, records)
    return stored


def _insert_log(db: sqlite3.Connection, session: Session, records: Sequence[Record]) -> None:
    check_records(session, records)
    for span in session.lineage:
        last = db.execute(
            "SELECT 1 FROM log_records WHERE log_id = ? AND seq = ?", (span.log_id, span.end - 1)
        ).fetchone()
        if last is None:
            raise SessionNotFound(session.parent_session_id or session.id)
        db.execute("INSERT INTO log_refs VALUES (?, ?, ?)", (span.log_id, session.id, span.end))
    db.execute("INSERT INTO log_refs VALUES (?, ?, ?)", (session.log_id, session.id, _OPEN_END))
    for seq, record in enumerate(records):
        _insert_record(db, session.log_id, seq, record.id, codec.encode_record(record))


def _insert_record(
    db: sqlite3.Connection, log_id: str, seq: int, record_id: str, row: StoredRecord
) -> None:
    db.execute(
        "INSERT INTO log_records VALUES (?, ?, ?, ?, ?, ?)",
        (log_id, seq, record_id, row.input_len, row.tokens, row.body),
    )


def _delete(db: sqlite3.Connection, session_id: str, version: int | None) -> bool:
    row = db.execute("SELECT version FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        return False
    if version is not None and row[0] != version:
        raise VersionConflict(session_id, version, row[0])
    db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
    for table in ("session_settings", "pending_turns", "ended_turns", "idempotency_keys"):
        db.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))
    _drop_unshared(db, _release(db, session_id))
    return True


def _release(db: sqlite3.Connection, session_id: str) -> list[str]:
    rows = db.execute("SELECT log_id FROM log_refs WHERE session_id = ?", (session_id,)).fetchall()
    db.execute("DELETE FROM log_refs WHERE session_id = ?", (session_id,))
    return [log_id for (log_id,) in rows]


def _drop_unshared(db: sqlite3.Connection, log_ids: Sequence[str]) -> None:
    for log_id in log_ids:
        ends = [
            end for (end,) in db.execute("SELECT end FROM log_refs WHERE log_id = ?", (log_id,))
        ]
        if _OPEN_END not in ends:
            db.execute(
                "DELETE FROM log_records WHERE log_id = ? AND seq >= ?",
                (log_id, max(ends, default=0)),
            )


def _begin(db: sqlite3.Connection, session: Session, turn: PendingTurn, body: bytes) -> TurnClaim:
    pending = db.execute(
        "SELECT 1 FROM pending_turns WHERE session_id = ? AND turn_id = ?", (session.id, turn.id)
    ).fetchone()
    if pending is not None:
        return TurnClaim(created=True, turn_id=turn.id, session=_load(db, session.id))
    key = turn.idempotency_key
    known = _find_key(db, session.id, key, turn.body_hash) if key is not None else None
    if key is not None and known is not None:
        if not known.same_body:
            raise IdempotencyKeyReused(key, known.turn_id)
        return TurnClaim(created=False, turn_id=known.turn_id, session=_load(db, session.id))
    stored = _save(db, session)
    db.execute("INSERT INTO pending_turns VALUES (?, ?, ?)", (session.id, turn.id, body))
    if key is not None:
        db.execute(
            "INSERT INTO idempotency_keys VALUES (?, ?, ?, ?, ?)",
            (session.id, key, turn.body_hash, turn.id, turn.created_at_ms),
        )
    return TurnClaim(created=True, turn_id=turn.id, session=stored)


def _find_key(db: sqlite3.Connection, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
    row = db.execute(
        "SELECT turn_id, body_hash, created_at_ms FROM idempotency_keys "
        "WHERE session_id = ? AND key = ?",
        (session_id, key),
    ).fetchone()
    if row is None:
        return None
    return KeyMatch(turn_id=row[0], same_body=row[1] == body_hash, created_at_ms=row[2])


def _read_turn(
    db: sqlite3.Connection, session_id: str, turn_id: str
) -> PendingTurn | Record | None:
    pending = db.execute(
        "SELECT body FROM pending_turns WHERE session_id = ? AND turn_id = ?",
        (session_id, turn_id),
    ).fetchone()
    if pending is not None:
        return codec.decode_pending(pending[0])
    ended = db.execute(
        "SELECT tokens, input_len, body FROM ended_turns WHERE session_id = ? AND turn_id = ?",
        (session_id, turn_id),
    ).fetchone()
    return None if ended is None else codec.decode_record(StoredRecord(*ended))


def _read_spans(db: sqlite3.Connection, session: Session, skip: int) -> list[StoredRecord]:
    rows: list[StoredRecord] = []
    for span in session.spans:
        first = span.first + min(skip, span.num_records)
        skip -= first - span.first
        found = _read_span(db, replace(span, first=first))
        if len(found) != span.end - first:
            _explain_gap(db, session, span)
        rows.extend(found)
    return rows


def _explain_gap(db: sqlite3.Connection, session: Session, span: LogSpan) -> NoReturn:
    """Records are missing: the session moved on or went since it was read, or the file is bad."""
    actual = _load(db, session.id).version
    if actual != session.version:
        raise VersionConflict(session.id, session.version, actual)
    raise StoreCorrupt(f"log {span.log_id!r} lacks records of session {session.id!r}")


def _read_span(db: sqlite3.Connection, span: LogSpan) -> list[StoredRecord]:
    rows = db.execute(
        "SELECT tokens, input_len, body FROM log_records "
        "WHERE log_id = ? AND seq >= ? AND seq < ? ORDER BY seq",
        (span.log_id, span.first, span.end),
    )
    return [StoredRecord(*row) for row in rows]


def _list(db: sqlite3.Connection, query: ListQuery) -> SessionPage:
    clauses = ["1"]
    values: list[str | int] = []
    for column, value in (
        ("s.tenant", query.tenant),
        ("s.status", query.status),
        ("s.parent_session_id", query.parent_session_id),
    ):
        if value is not None:
            clauses.append(f"{column} = ?")
            values.append(value)
    for key, value in query.metadata.items():
        clauses.append("EXISTS (SELECT 1 FROM json_each(s.metadata) WHERE key = ? AND value = ?)")
        values.extend((key, value))
    if query.after is not None:
        clauses.append("s.id > ?" if query.ascending else "s.id < ?")
        values.append(query.after)
    order = "ASC" if query.ascending else "DESC"
    rows = db.execute(
        f"{_SELECT} WHERE {' AND '.join(clauses)} ORDER BY s.id {order} LIMIT ?",
        (*values, query.limit + 1),
    ).fetchall()
    sessions = tuple(codec.decode_session(*row) for row in rows[: query.limit])
    return SessionPage(sessions=sessions, has_more=len(rows) > query.limit)
