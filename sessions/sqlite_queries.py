# SPDX-License-Identifier: Apache-2.0
"""What the SQLite session store does inside its transactions, as functions of a connection.

Does not know: threads or caches. The functions that write expect a transaction to be open and
leave it so; each raises before it has written anything, or its caller undoes the savepoint.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from sessions import codec
from sessions.codec import StoredRecord
from sessions.errors import (
    IdempotencyKeyReused,
    SessionExists,
    SessionNotFound,
    StoreCorrupt,
    VersionConflict,
)
from sessions.session import Session
from sessions.sqlite_schema import migrate
from sessions.store import KeyMatch, ListQuery, SessionPage, TurnClaim, check_records
from sessions.turn_log import LogSpan, PendingTurn, Record

SELECT_SESSION = (
    "SELECT s.body, t.body FROM sessions s JOIN session_settings t ON t.session_id = s.id "
)
SESSION_TABLES = (
    "session_settings",
    "pending_turns",
    "queued_turns",
    "ended_turns",
    "idempotency_keys",
)
_OPEN_END = -1  # of a reference to a session's own log, which still grows


def prepare(db: sqlite3.Connection) -> None:
    migrate(db)
    # Proves that the file takes a write: a read-only file or a full disk shows here, at start.
    db.execute("BEGIN IMMEDIATE")
    db.execute(
        "INSERT INTO migrations VALUES (0, 'opened', ?1) "
        "ON CONFLICT (version) DO UPDATE SET applied_at_ms = ?1",
        (time.time_ns() // 1_000_000,),
    )
    db.execute("COMMIT")


def load(db: sqlite3.Connection, session_id: str) -> Session:
    row = db.execute(SELECT_SESSION + "WHERE s.id = ?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    return codec.decode_session(*row)


def save(db: sqlite3.Connection, session: Session) -> Session:
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


def insert_session(db: sqlite3.Connection, session: Session, records: Sequence[Record]) -> Session:
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
    insert_log(db, session, records)
    return stored


def insert_log(db: sqlite3.Connection, session: Session, records: Sequence[Record]) -> None:
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
        insert_record(db, session.log_id, seq, record.id, codec.encode_record(record))


def insert_record(
    db: sqlite3.Connection, log_id: str, seq: int, record_id: str, row: StoredRecord
) -> None:
    db.execute(
        "INSERT INTO log_records VALUES (?, ?, ?, ?, ?, ?)",
        (log_id, seq, record_id, row.input_len, row.tokens, row.body),
    )


def delete(db: sqlite3.Connection, session_id: str, version: int | None) -> bool:
    row = db.execute("SELECT version FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        return False
    if version is not None and row[0] != version:
        raise VersionConflict(session_id, version, row[0])
    db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
    for table in SESSION_TABLES:
        db.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))
    drop_unshared(db, release(db, session_id))
    return True


def release(db: sqlite3.Connection, session_id: str) -> list[str]:
    rows = db.execute("SELECT log_id FROM log_refs WHERE session_id = ?", (session_id,)).fetchall()
    db.execute("DELETE FROM log_refs WHERE session_id = ?", (session_id,))
    return [log_id for (log_id,) in rows]


def drop_unshared(db: sqlite3.Connection, log_ids: Sequence[str]) -> None:
    for log_id in log_ids:
        ends = [
            end for (end,) in db.execute("SELECT end FROM log_refs WHERE log_id = ?", (log_id,))
        ]
        if _OPEN_END not in ends:
            db.execute(
                "DELETE FROM log_records WHERE log_id = ? AND seq >= ?",
                (log_id, max(ends, default=0)),
            )


def begin(db: sqlite3.Connection, session: Session, turn: PendingTurn, body: bytes) -> TurnClaim:
    pending = db.execute(
        "SELECT 1 FROM pending_turns WHERE session_id = ? AND turn_id = ?", (session.id, turn.id)
    ).fetchone()
    if pending is not None:
        return TurnClaim(created=True, turn_id=turn.id, session=load(db, session.id))
    key = turn.idempotency_key
    known = find_key(db, session.id, key, turn.body_hash) if key is not None else None
    if key is not None and known is not None and known.turn_id != turn.id:
        if not known.same_body:
            raise IdempotencyKeyReused(key, known.turn_id)
        return TurnClaim(created=False, turn_id=known.turn_id, session=load(db, session.id))
    stored = save(db, session)
    db.execute("INSERT INTO pending_turns VALUES (?, ?, ?)", (session.id, turn.id, body))
    _drop_queued(db, session.id, turn.id)
    if known is None:
        _insert_key(db, turn)
    return TurnClaim(created=True, turn_id=turn.id, session=stored)


def queue(db: sqlite3.Connection, turn: PendingTurn, body: bytes) -> str:
    row = db.execute("SELECT 1 FROM sessions WHERE id = ?", (turn.session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(turn.session_id)
    key = turn.idempotency_key
    known = find_key(db, turn.session_id, key, turn.body_hash) if key is not None else None
    if key is not None and known is not None:
        if not known.same_body:
            raise IdempotencyKeyReused(key, known.turn_id)
        return known.turn_id
    db.execute(
        "INSERT INTO queued_turns VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (turn.session_id, turn.id, body),
    )
    _insert_key(db, turn)
    return turn.id


def end_queued(
    db: sqlite3.Connection, session_id: str, record: Record, row: StoredRecord, now_ms: int
) -> bool:
    if not _drop_queued(db, session_id, record.id):
        return False
    insert_ended(db, session_id, record.id, row, now_ms)
    return True


def insert_ended(
    db: sqlite3.Connection, session_id: str, turn_id: str, row: StoredRecord, now_ms: int
) -> None:
    db.execute(
        "INSERT INTO ended_turns VALUES (?, ?, ?, ?, ?, ?)",
        (session_id, turn_id, now_ms, row.input_len, row.tokens, row.body),
    )


def claim(db: sqlite3.Connection, turn: PendingTurn, owner: str) -> bool:
    for table in ("pending_turns", "queued_turns"):
        where = f"{table} WHERE session_id = ? AND turn_id = ?"
        row = db.execute(f"SELECT body FROM {where}", (turn.session_id, turn.id)).fetchone()
        if row is None:
            continue
        stored = codec.decode_pending(row[0])
        if stored.owner != turn.owner:
            return False
        db.execute(
            f"UPDATE {table} SET body = ? WHERE session_id = ? AND turn_id = ?",
            (codec.encode_pending(replace(stored, owner=owner)), turn.session_id, turn.id),
        )
        return True
    return False


def _insert_key(db: sqlite3.Connection, turn: PendingTurn) -> None:
    if turn.idempotency_key is not None:
        db.execute(
            "INSERT INTO idempotency_keys VALUES (?, ?, ?, ?, ?)",
            (
                turn.session_id,
                turn.idempotency_key,
                turn.body_hash,
                turn.id,
                turn.created_at_ms,
            ),
        )


def _drop_queued(db: sqlite3.Connection, session_id: str, turn_id: str) -> bool:
    dropped = db.execute(
        "DELETE FROM queued_turns WHERE session_id = ? AND turn_id = ?", (session_id, turn_id)
    )
    return dropped.rowcount > 0


def find_key(db: sqlite3.Connection, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
    row = db.execute(
        "SELECT turn_id, body_hash, created_at_ms FROM idempotency_keys "
        "WHERE session_id = ? AND key = ?",
        (session_id, key),
    ).fetchone()
    if row is None:
        return None
    return KeyMatch(turn_id=row[0], same_body=row[1] == body_hash, created_at_ms=row[2])


def read_turn(db: sqlite3.Connection, session_id: str, turn_id: str) -> PendingTurn | Record | None:
    for table in ("pending_turns", "queued_turns"):
        pending = db.execute(
            f"SELECT body FROM {table} WHERE session_id = ? AND turn_id = ?",
            (session_id, turn_id),
        ).fetchone()
        if pending is not None:
            return codec.decode_pending(pending[0])
    ended = db.execute(
        "SELECT tokens, input_len, body FROM ended_turns WHERE session_id = ? AND turn_id = ?",
        (session_id, turn_id),
    ).fetchone()
    return None if ended is None else codec.decode_record(StoredRecord(*ended))


def read_spans(db: sqlite3.Connection, session: Session, skip: int) -> list[StoredRecord]:
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
    actual = load(db, session.id).version
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


def list_sessions(db: sqlite3.Connection, query: ListQuery) -> SessionPage:
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
        f"{SELECT_SESSION} WHERE {' AND '.join(clauses)} ORDER BY s.id {order} LIMIT ?",
        (*values, query.limit + 1),
    ).fetchall()
    sessions = codec.decode_sessions(rows[: query.limit])
    return SessionPage(sessions=sessions, has_more=len(rows) > query.limit)
