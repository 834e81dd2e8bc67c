# SPDX-License-Identifier: Apache-2.0
"""The embedded session store: one SQLite file, WAL, synchronous FULL.

Does not know: what a turn means. See sessions.store for the promises, sessions.sqlite_schema for
the tables, sessions.sqlite_threads for who runs what where. Several processes may share a file.
"""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from sessions import codec
from sessions import sqlite_queries as queries
from sessions.config import SessionsConfig
from sessions.errors import (
    SessionNotFound,
    StoreError,
    TurnNotFound,
)
from sessions.log_cache import LogCache
from sessions.session import QUEUED, RUNNING, Session
from sessions.sqlite_schema import SCHEMA_VERSION
from sessions.sqlite_threads import SqliteThreads, Work
from sessions.store import (
    KeyMatch,
    ListQuery,
    SessionPage,
    StoreHealth,
    TenantQuota,
    TenantUsage,
    TurnClaim,
    validate_query,
)
from sessions.turn_log import PendingTurn, Record, TurnLog

T = TypeVar("T")

_MAX_WARM = 1024


class SqliteSessionStore:
    """Implements `sessions.store.SessionStore`."""

    def __init__(self, config: SessionsConfig) -> None:
        self._config = config
        self._cache = LogCache(config.log_cache_bytes)
        # Sessions read a short while ago, the latest last: their pages are in memory.
        self._warm: OrderedDict[str, None] = OrderedDict()
        self._db = SqliteThreads(
            Path(config.sqlite_path),
            timeout_ms=config.store_timeout_ms,
            max_bytes=config.sqlite_max_bytes,
        )

    async def open(self) -> None:
        await self._db.open(queries.prepare)

    async def close(self) -> None:
        await self._db.close()

    async def health(self) -> StoreHealth:
        try:
            await self._db.read(lambda db: db.execute("SELECT 1 FROM migrations").fetchone())
        except StoreError as error:
            return StoreHealth(ok=False, kind="sqlite", detail=error.message)
        failure = self._db.write_error
        return StoreHealth(
            ok=True,
            kind="sqlite",
            detail=f"schema {SCHEMA_VERSION}, WAL, FULL",
            warnings=() if failure is None else (f"the last write failed: {failure.message}",),
        )

    # -- sessions

    async def create(self, session: Session, records: Sequence[Record] = ()) -> Session:
        return (await self.create_many([(session, records)]))[0]

    async def create_many(
        self, children: Sequence[tuple[Session, Sequence[Record]]]
    ) -> tuple[Session, ...]:
        def work(db: sqlite3.Connection) -> tuple[Session, ...]:
            return tuple(
                queries.insert_session(db, session, records) for session, records in children
            )

        return await self._db.write(work)

    async def get(self, session_id: str, *, tenant: str | None = None) -> Session:
        session = await self._read_rows(session_id, lambda db: queries.load(db, session_id))
        if tenant is not None and session.tenant != tenant:
            raise SessionNotFound(session_id)
        return session

    async def _read_rows(self, session_id: str, work: Work[T]) -> T:
        """Read a few rows of a session; a disk is waited for in the reader's thread only."""
        if session_id in self._warm:
            self._warm.move_to_end(session_id)
            return await self._db.read_here(work)
        rows = await self._db.read(work)
        self._warm[session_id] = None
        if len(self._warm) > _MAX_WARM:
            self._warm.popitem(last=False)
        return rows

    async def list_sessions(self, query: ListQuery) -> SessionPage:
        validate_query(query)
        return await self._db.read(lambda db: queries.list_sessions(db, query))

    async def update(self, session: Session) -> Session:
        settings = codec.encode_settings(session.settings)

        def work(db: sqlite3.Connection) -> Session:
            stored = queries.save(db, session)
            db.execute(
                "UPDATE session_settings SET body = ?1 WHERE session_id = ?2 AND body <> ?1",
                (settings, session.id),
            )
            return stored

        return await self._db.write(work)

    async def delete(self, session_id: str, *, version: int | None = None) -> bool:
        is_deleted = await self._db.write(lambda db: queries.delete(db, session_id, version))
        self._cache.drop(session_id)
        self._warm.pop(session_id, None)
        return is_deleted

    # -- turns

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        body = codec.encode_pending(turn)
        return await self._db.write(lambda db: queries.begin(db, session, turn, body))

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
                return queries.load(db, session.id)
            stored = queries.save(db, session)
            db.execute("DELETE FROM pending_turns WHERE session_id = ?", (session.id,))
            queries.insert_ended(db, session.id, record.id, row, stored.updated_at_ms)
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
                return queries.load(db, session.id)
            stored = queries.save(db, session)
            queries.insert_record(db, session.log_id, session.log_len - 1, record.id, row)
            db.execute("DELETE FROM pending_turns WHERE session_id = ?", (session.id,))
            return stored

        stored = await self._db.write(work)
        if stored.version == session.version + 1:
            self._cache.extend(stored, record)
        return stored

    async def replace_history(self, session: Session, records: Sequence[Record]) -> Session:
        settings = codec.encode_settings(session.settings)

        def work(db: sqlite3.Connection) -> Session:
            stored = queries.save(db, session)
            db.execute(
                "UPDATE session_settings SET body = ?1 WHERE session_id = ?2 AND body <> ?1",
                (settings, session.id),
            )
            left = queries.release(db, session.id)
            queries.insert_log(db, session, records)
            queries.drop_unshared(db, left)
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
            rows = await self._db.read(lambda db: queries.read_spans(db, session, skip))
            log = log.extended(*map(codec.decode_record, rows))
            self._cache.put(session, log)
        return log

    async def read_tokens(self, session: Session) -> bytes:
        return (await self.read_log(session)).token_ids

    async def read_turn(self, session: Session, turn_id: str) -> PendingTurn | Record:
        outcome = await self._db.read(lambda db: queries.read_turn(db, session.id, turn_id))
        if outcome is not None:
            return outcome
        record = (await self.read_log(session)).find(turn_id)
        if record is None:
            raise TurnNotFound(turn_id)
        return record

    async def pending_turns(self, *, owner: str | None = None) -> tuple[PendingTurn, ...]:
        rows = await self._db.read(
            lambda db: db.execute("SELECT body FROM pending_turns ORDER BY turn_id").fetchall()
        )
        turns = codec.decode_pendings(body for (body,) in rows)
        return tuple(turn for turn in turns if owner is None or turn.owner == owner)

    # -- turns that wait, owners

    async def queue_turn(self, turn: PendingTurn) -> str:
        body = codec.encode_pending(turn)
        return await self._db.write(lambda db: queries.queue(db, turn, body))

    async def queued_turns(
        self, *, session_id: str | None = None, owner: str | None = None
    ) -> tuple[PendingTurn, ...]:
        rows = await self._db.read(
            lambda db: db.execute(
                "SELECT body FROM queued_turns WHERE ?1 IS NULL OR session_id = ?1 "
                "ORDER BY turn_id",
                (session_id,),
            ).fetchall()
        )
        turns = codec.decode_pendings(body for (body,) in rows)
        return tuple(turn for turn in turns if owner is None or turn.owner == owner)

    async def end_queued(self, session_id: str, record: Record) -> bool:
        row = codec.encode_record(record)
        now_ms = record.timings.finished_at_ms if record.timings is not None else 0
        return await self._db.write(
            lambda db: queries.end_queued(db, session_id, record, row, now_ms)
        )

    async def claim_turn(self, turn: PendingTurn, owner: str) -> bool:
        return await self._db.write(lambda db: queries.claim(db, turn, owner))

    async def clock_ms(self) -> int:
        """This machine's: all who share a file run here."""
        return time.time_ns() // 1_000_000

    async def beat(self, owner: str, until_ms: int) -> None:
        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO owners VALUES (?1, ?2) "
                "ON CONFLICT (owner) DO UPDATE SET until_ms = ?2",
                (owner, until_ms),
            )

        await self._db.write(work)

    async def live_owners(self, now_ms: int) -> frozenset[str]:
        rows = await self._db.read(
            lambda db: db.execute(
                "SELECT owner FROM owners WHERE until_ms >= ?", (now_ms,)
            ).fetchall()
        )
        return frozenset(owner for (owner,) in rows)

    async def ask_cancel(self, turn_id: str, now_ms: int) -> None:
        def work(db: sqlite3.Connection) -> None:
            row = (turn_id, now_ms)
            db.execute("INSERT INTO cancels VALUES (?, ?) ON CONFLICT DO NOTHING", row)

        await self._db.write(work)

    async def asked_cancels(self) -> frozenset[str]:
        rows = await self._db.read(lambda db: db.execute("SELECT turn_id FROM cancels").fetchall())
        return frozenset(turn_id for (turn_id,) in rows)

    async def forget_cancels(self, turn_ids: Collection[str]) -> None:
        rows = [(turn_id,) for turn_id in turn_ids]

        def work(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM cancels WHERE turn_id = ?", rows)

        await self._db.write(work)

    # -- keys, expiry, usage

    async def find_key(self, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
        return await self._read_rows(
            session_id, lambda db: queries.find_key(db, session_id, key, body_hash)
        )

    async def forget_keys(self, now_ms: int) -> int:
        before_ms = now_ms - self._config.idempotency_retention_ms

        def work(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM ended_turns WHERE ended_at_ms < ?", (before_ms,))
            db.execute("DELETE FROM cancels WHERE asked_at_ms < ?", (before_ms,))
            # A key whose turn still runs is kept, however long that takes.
            return db.execute(
                "DELETE FROM idempotency_keys WHERE created_at_ms < ? AND turn_id NOT IN "
                "(SELECT turn_id FROM pending_turns UNION SELECT turn_id FROM queued_turns)",
                (before_ms,),
            ).rowcount

        return await self._db.write(work)

    async def due(self, now_ms: int, limit: int) -> tuple[Session, ...]:
        rows = await self._db.read(
            lambda db: db.execute(
                queries.SELECT_SESSION + "WHERE s.expires_at_ms <= ? AND s.status NOT IN (?, ?) "
                "ORDER BY s.expires_at_ms, s.id LIMIT ?",
                (now_ms, RUNNING, QUEUED, limit),
            ).fetchall()
        )
        return codec.decode_sessions(rows)

    async def get_quota(self, tenant: str) -> TenantQuota | None:
        row = await self._db.read(
            lambda db: db.execute(
                "SELECT max_sessions, max_tokens FROM tenant_quotas WHERE tenant = ?", (tenant,)
            ).fetchone()
        )
        return None if row is None else TenantQuota(max_sessions=row[0], max_tokens=row[1])

    async def set_quota(self, tenant: str, quota: TenantQuota | None) -> None:
        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM tenant_quotas WHERE tenant = ?", (tenant,))
            if quota is not None:
                row = (tenant, quota.max_sessions, quota.max_tokens)
                db.execute("INSERT INTO tenant_quotas VALUES (?, ?, ?)", row)

        await self._db.write(work)

    async def tenant_usage(self, tenant: str) -> TenantUsage:
        row = await self._db.read(
            lambda db: db.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_tokens), 0) FROM sessions WHERE tenant = ?",
                (tenant,),
            ).fetchone()
        )
        return TenantUsage(num_sessions=row[0], num_tokens=row[1])
