# SPDX-License-Identifier: Apache-2.0
"""The session store on a Redis (or Valkey) server, for several API processes or machines.

Does not know: what a turn means. See sessions.store for the promises, sessions.redis_script for
the key layout and the script behind every write.

Durable means the server runs with `appendonly yes` and `appendfsync always`; `open` looks and
warns where it is weaker. Nothing is retried here: an error leaves open whether a write happened,
and the caller may repeat it with the same ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from sessions import codec
from sessions.config import SessionsConfig
from sessions.errors import (
    IdempotencyKeyReused,
    SessionExists,
    SessionNotFound,
    StoreCorrupt,
    TurnNotFound,
    VersionConflict,
)
from sessions.log_cache import LogCache
from sessions.redis_script import Write, pack_record, unpack_record
from sessions.redis_server import RedisServer
from sessions.session import Session
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

_WALK_IDS = 100  # ids a listing reads at once: a filter may let few of them through
_FORGET_GROUP = 100  # fields one write drops
_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode


class RedisSessionStore:
    """Implements `sessions.store.SessionStore`."""

    def __init__(self, config: SessionsConfig) -> None:
        self._config = config
        self._prefix = config.redis_key_prefix
        self._cache = LogCache(config.log_cache_bytes)
        self._server = RedisServer(config)
        self._call = self._server.call
        self._transact = self._server.transact

    @property
    def _client(self) -> Any:  # redis-py's client: redis_server is the one home of that package
        return self._server.client

    async def open(self) -> None:
        await self._server.open()

    async def close(self) -> None:
        await self._server.close()

    async def health(self) -> StoreHealth:
        return await self._server.health()

    # -- sessions

    async def create(self, session: Session, records: Sequence[Record] = ()) -> Session:
        return (await self.create_many([(session, records)]))[0]

    async def create_many(
        self, children: Sequence[tuple[Session, Sequence[Record]]]
    ) -> tuple[Session, ...]:
        write = self._new_write()
        for session, _ in children:
            tag = f"exists {session.id}"
            write.add("?absent", self._key("session", session.id), "version", tag)
            write.guard_lineage(session)
        stored = tuple(replace(session, version=1) for session, _ in children)
        for session, (_, records) in zip(stored, children, strict=True):
            write.put_session(session)
            write.put_log(session, records)
        reply = await self._transact(write)
        if reply[0].startswith(b"exists "):
            raise SessionExists(reply[0].decode().removeprefix("exists "))
        if reply[0] == b"short":
            raise SessionNotFound(children[0][0].parent_session_id or children[0][0].id)
        return stored

    async def get(self, session_id: str, *, tenant: str | None = None) -> Session:
        session = await self._load(session_id)
        if session is None or (tenant is not None and session.tenant != tenant):
            raise SessionNotFound(session_id)
        return session

    async def list_sessions(self, query: ListQuery) -> SessionPage:
        validate_query(query)
        found: list[Session] = []
        async for session in self._walk(query):
            if _matches(session, query):
                found.append(session)
            if len(found) > query.limit:
                break
        return SessionPage(sessions=tuple(found[: query.limit]), has_more=len(found) > query.limit)

    async def update(self, session: Session) -> Session:
        write, stored = self._new_save(session)
        write.put_settings(session)
        self._check(await self._transact(write), session)
        return stored

    async def delete(self, session_id: str, *, version: int | None = None) -> bool:
        session = await self._load(session_id)
        if session is None:
            return False
        write = self._new_write()
        wanted = "" if version is None else version
        write.add("?version", self._key("session", session_id), wanted)
        for name in ("session", "pending", "queued", "ended", "keys"):
            write.add("DEL", self._key(name, session_id))
        write.add("!tidy", session_id)
        for index in write.indexes(session):
            write.add("ZREM", index, session_id)
        write.add("ZREM", self._key("expiry"), session_id)
        write.add("SREM", self._key("pending"), session_id)
        write.add("HDEL", self._key("tokens", session.tenant), session_id)
        write.add("!release", session_id)
        write.add("!drop")
        reply = await self._transact(write)
        self._cache.drop(session_id)
        if reply[0] == b"gone":
            return False
        self._check(reply, replace(session, version=version or 0))
        return True

    # -- turns

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        pending = (self._key("pending", session.id), turn.id, "pending")
        reply, stored = await self._begin(session, turn, pending, *self._key_guard(turn))
        if reply[0] == b"key":
            turn_id = self._turn_of_key(turn, reply[1])
            if turn_id != turn.id:
                session = await self.get(session.id)
                return TurnClaim(created=False, turn_id=turn_id, session=session)
            # It holds its key since it began to wait.
            reply, stored = await self._begin(session, turn, pending)
        if reply[0] == b"pending":
            return TurnClaim(created=True, turn_id=turn.id, session=await self.get(session.id))
        self._check(reply, session)
        return TurnClaim(created=True, turn_id=turn.id, session=stored)

    async def _begin(
        self, session: Session, turn: PendingTurn, *guards: tuple[str, str, str]
    ) -> tuple[list[bytes], Session]:
        write, stored = self._new_save(session, *guards)
        write.put_pending(turn)
        write.add("!tidy", session.id)
        return await self._transact(write), stored

    def _key_guard(self, turn: PendingTurn) -> list[tuple[str, str, str]]:
        key = turn.idempotency_key
        return [] if key is None else [(self._key("keys", turn.session_id), key, "key")]

    def _turn_of_key(self, turn: PendingTurn, value: bytes) -> str:
        """The turn that holds the key of `turn`. Raises `IdempotencyKeyReused`."""
        turn_id, body_hash, _ = _unpack(value)
        if body_hash != turn.body_hash:
            raise IdempotencyKeyReused(turn.idempotency_key or "", turn_id)
        return str(turn_id)

    async def commit_turn(self, session: Session, record: Record) -> Session:
        return await self._append(session, record)

    async def append_record(self, session: Session, record: Record) -> Session:
        return await self._append(session, record)

    async def end_turn(self, session: Session, record: Record) -> Session:
        ended = self._key("ended", session.id)
        write, stored = self._new_save(session, (ended, record.id, "known"))
        write.add("HSET", ended, record.id, pack_record(record))
        member = _pack((session.id, record.id))
        write.add("ZADD", self._key("ended_times"), session.updated_at_ms, member)
        write.drop_pending(session.id)
        reply = await self._transact(write)
        if reply[0] == b"known":
            return await self.get(session.id)
        self._check(reply, session)
        return stored

    async def _append(self, session: Session, record: Record) -> Session:
        ids = self._key("log", session.log_id, "ids")
        write, stored = self._new_save(session, (ids, record.id, "known"))
        write.put_record(session.log_id, record)
        write.drop_pending(session.id)
        reply = await self._transact(write)
        if reply[0] == b"known":
            return await self.get(session.id)
        self._check(reply, session)
        self._cache.extend(stored, record)
        return stored

    async def replace_history(self, session: Session, records: Sequence[Record]) -> Session:
        write, stored = self._new_save(session)
        write.put_settings(session)
        write.add("!release", session.id)
        write.put_log(stored, records)
        write.add("!drop")
        self._check(await self._transact(write), session)
        self._cache.drop(session.id)
        return stored

    # -- history

    async def read_log(self, session: Session) -> TurnLog:
        log = self._cache.get(session) or TurnLog()
        if session.num_records > len(log.records):
            rows = await self._read_spans(session, len(log.records))
            log = log.extended(*(codec.decode_record(unpack_record(row)) for row in rows))
            self._cache.put(session, log)
        return log

    async def read_tokens(self, session: Session) -> bytes:
        return (await self.read_log(session)).token_ids

    async def read_turn(self, session: Session, turn_id: str) -> PendingTurn | Record:
        pipeline = self._client.pipeline(transaction=False)
        for name in ("pending", "queued", "ended"):
            pipeline.hget(self._key(name, session.id), turn_id)
        pending, queued, ended = await self._call(pipeline.execute())
        if pending is not None or queued is not None:
            return codec.decode_pending(pending or queued)
        if ended is not None:
            return codec.decode_record(unpack_record(ended))
        record = (await self.read_log(session)).find(turn_id)
        if record is None:
            raise TurnNotFound(turn_id)
        return record

    async def pending_turns(self, *, owner: str | None = None) -> tuple[PendingTurn, ...]:
        return await self._turns_in("pending", None, owner)

    async def _turns_in(
        self, name: str, session_id: str | None, owner: str | None
    ) -> tuple[PendingTurn, ...]:
        session_ids = [session_id]
        if session_id is None:
            members = await self._call(self._client.smembers(self._key(name)))
            session_ids = sorted(member.decode() for member in members)
        pipeline = self._client.pipeline(transaction=False)
        for member in session_ids:
            pipeline.hvals(self._key(name, str(member)))
        bodies = [body for values in await self._call(pipeline.execute()) for body in values]
        decoded = codec.decode_pendings(bodies)
        turns = (turn for turn in decoded if owner is None or turn.owner == owner)
        return tuple(sorted(turns, key=lambda turn: turn.id))

    # -- turns that wait, owners

    async def queue_turn(self, turn: PendingTurn) -> str:
        write = self._new_write()
        for hash_key, hash_field, answer in self._key_guard(turn):
            write.add("?absent", hash_key, hash_field, answer)
        write.add("?version", self._key("session", turn.session_id), "")
        write.put_queued(turn)
        reply = await self._transact(write)
        if reply[0] == b"key":
            return self._turn_of_key(turn, reply[1])
        if reply[0] == b"gone":
            raise SessionNotFound(turn.session_id)
        return turn.id

    async def queued_turns(
        self, *, session_id: str | None = None, owner: str | None = None
    ) -> tuple[PendingTurn, ...]:
        return await self._turns_in("queued", session_id, owner)

    async def end_queued(self, session_id: str, record: Record) -> bool:
        queued, ended = self._key("queued", session_id), self._key("ended", session_id)
        body = await self._call(self._client.hget(queued, record.id))
        if body is None:
            return False
        now_ms = record.timings.finished_at_ms if record.timings is not None else 0
        write = self._new_write()
        write.add("?equal", queued, record.id, body)
        write.add("HDEL", queued, record.id)
        write.add("HSET", ended, record.id, pack_record(record))
        write.add("ZADD", self._key("ended_times"), now_ms, _pack((session_id, record.id)))
        write.add("!tidy", session_id)
        return (await self._transact(write))[0] == b"ok"

    async def claim_turn(self, turn: PendingTurn, owner: str) -> bool:
        for name in ("pending", "queued"):
            key = self._key(name, turn.session_id)
            body = await self._call(self._client.hget(key, turn.id))
            if body is None:
                continue
            stored = codec.decode_pending(body)
            if stored.owner != turn.owner:
                return False
            write = self._new_write()
            write.add("?equal", key, turn.id, body)
            write.add("HSET", key, turn.id, codec.encode_pending(replace(stored, owner=owner)))
            return (await self._transact(write))[0] == b"ok"
        return False

    async def clock_ms(self) -> int:
        """The server's: machines may disagree about the time."""
        seconds, micros = await self._call(self._client.time())
        return int(seconds) * 1000 + int(micros) // 1000

    async def beat(self, owner: str, until_ms: int) -> None:
        write = self._new_write()
        write.add("ZADD", self._key("owners"), until_ms, owner)
        await self._transact(write)

    async def live_owners(self, now_ms: int) -> frozenset[str]:
        members = await self._call(self._client.zrangebyscore(self._key("owners"), now_ms, "+inf"))
        return frozenset(member.decode() for member in members)

    async def ask_cancel(self, turn_id: str, now_ms: int) -> None:
        write = self._new_write()
        write.add("ZADD", self._key("cancels"), "NX", now_ms, turn_id)
        await self._transact(write)

    async def asked_cancels(self) -> frozenset[str]:
        members = await self._call(self._client.zrange(self._key("cancels"), 0, -1))
        return frozenset(member.decode() for member in members)

    async def forget_cancels(self, turn_ids: Collection[str]) -> None:
        if turn_ids:
            write = self._new_write()
            write.add("ZREM", self._key("cancels"), *turn_ids)
            await self._transact(write)

    # -- keys, expiry, usage

    async def find_key(self, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
        value = await self._call(self._client.hget(self._key("keys", session_id), key))
        if value is None:
            return None
        turn_id, stored_hash, created_at_ms = _unpack(value)
        return KeyMatch(
            turn_id=turn_id, same_body=stored_hash == body_hash, created_at_ms=created_at_ms
        )

    async def forget_keys(self, now_ms: int) -> int:
        before_ms = now_ms - self._config.idempotency_retention_ms
        await self._forget("ended_times", "ended", before_ms, kept=set())
        stale = self._new_write()
        stale.add("ZREMRANGEBYSCORE", self._key("cancels"), "-inf", f"({before_ms}")
        await self._transact(stale)
        turns = (*await self.pending_turns(), *await self.queued_turns())
        running = {turn.id for turn in turns}
        return await self._forget("key_times", "keys", before_ms, kept=running)

    async def _forget(self, times: str, name: str, before_ms: int, *, kept: set[str]) -> int:
        """Drop the fields of `name:<sid>` hashes that `times` lists as older; returns how many."""
        members = await self._call(
            self._client.zrangebyscore(self._key(times), "-inf", f"({before_ms}")
        )
        forgotten = 0
        for start in range(0, len(members), _FORGET_GROUP):
            group = members[start : start + _FORGET_GROUP]
            forgotten += await self._forget_group(times, name, group, kept)
        return forgotten

    async def _forget_group(
        self, times: str, name: str, members: Sequence[bytes], kept: set[str]
    ) -> int:
        fields = [(self._key(name, sid), field) for sid, field in map(_unpack, members)]
        pipeline = self._client.pipeline(transaction=False)
        for hash_key, field in fields:
            pipeline.hget(hash_key, field)
        values = await self._call(pipeline.execute())
        write = self._new_write()
        forgotten = 0
        for member, (hash_key, field), value in zip(members, fields, values, strict=True):
            if kept and value is not None and _unpack(value)[0] in kept:
                continue
            write.add("HDEL", hash_key, field)
            write.add("ZREM", self._key(times), member)
            forgotten += value is not None
        await self._transact(write)
        return forgotten

    async def due(self, now_ms: int, limit: int) -> tuple[Session, ...]:
        ids = await self._call(
            self._client.zrangebyscore(self._key("expiry"), "-inf", now_ms, start=0, num=limit)
        )
        return await self._load_many(ids)

    async def get_quota(self, tenant: str) -> TenantQuota | None:
        value = await self._call(self._client.hget(self._key("quotas"), tenant))
        return None if value is None else _unpack(value, type=TenantQuota)

    async def set_quota(self, tenant: str, quota: TenantQuota | None) -> None:
        write = self._new_write()
        if quota is None:
            write.add("HDEL", self._key("quotas"), tenant)
        else:
            write.add("HSET", self._key("quotas"), tenant, _pack(quota))
        await self._transact(write)

    async def tenant_usage(self, tenant: str) -> TenantUsage:
        lengths = await self._call(self._client.hvals(self._key("tokens", tenant)))
        return TenantUsage(num_sessions=len(lengths), num_tokens=sum(map(int, lengths)))

    # -- writing

    def _key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def _new_write(self) -> Write:
        return Write(self._prefix)

    def _new_save(self, session: Session, *guards: tuple[str, str, str]) -> tuple[Write, Session]:
        """A write that stores `session` if its version is still the stored one.

        A guard names a hash, a field that must not be there yet, and the answer if it is.
        """
        write = self._new_write()
        for hash_key, hash_field, answer in guards:
            write.add("?absent", hash_key, hash_field, answer)
        write.add("?version", self._key("session", session.id), session.version)
        write.guard_lineage(session)
        stored = replace(session, version=session.version + 1)
        write.put_body(stored)
        return write, stored

    def _check(self, reply: list[bytes], session: Session) -> None:
        if reply[0] == b"ok":
            return
        if reply[0] == b"version":
            raise VersionConflict(session.id, session.version, int(reply[1]))
        if reply[0] in (b"gone", b"short"):
            raise SessionNotFound(session.id)
        raise StoreCorrupt(f"unexpected answer of the write script: {reply[0]!r}")

    # -- reading

    async def _load(self, session_id: str) -> Session | None:
        key = self._key("session", session_id)
        body, settings = await self._call(self._client.hmget(key, ["body", "settings"]))
        return None if body is None else codec.decode_session(body, settings)

    async def _load_many(self, session_ids: Sequence[bytes]) -> tuple[Session, ...]:
        pipeline = self._client.pipeline(transaction=False)
        for session_id in session_ids:
            pipeline.hmget(self._key("session", session_id.decode()), ["body", "settings"])
        rows = await self._call(pipeline.execute())
        # An id may be listed and its session gone: the two were read one after the other.
        return codec.decode_sessions((body, s) for body, s in rows if body is not None)

    async def _walk(self, query: ListQuery) -> AsyncIterator[Session]:
        index = self._key("sessions")
        if query.tenant is not None:
            index = self._key("tenant", query.tenant)
        if query.parent_session_id is not None:
            index = self._key("children", query.parent_session_id)
        after = query.after
        num_ids = max(query.limit + 1, _WALK_IDS)
        while True:
            bound = "" if after is None else f"({after}"
            by_lex: Any = (
                self._client.zrangebylex if query.ascending else self._client.zrevrangebylex
            )
            ends = (bound or "-", "+") if query.ascending else (bound or "+", "-")
            ids = await self._call(by_lex(index, *ends, start=0, num=num_ids))
            for session in await self._load_many(ids):
                yield session
            if len(ids) < num_ids:
                return
            after = ids[-1].decode()

    async def _read_spans(self, session: Session, skip: int) -> list[bytes]:
        pipeline = self._client.pipeline(transaction=False)
        lengths = []
        for span in session.spans:
            first = span.first + min(skip, span.num_records)
            skip -= first - span.first
            if first < span.end:
                pipeline.lrange(self._key("log", span.log_id), first, span.end - 1)
                lengths.append(span.end - first)
        found = await self._call(pipeline.execute())
        if [len(rows) for rows in found] != lengths:
            await self._explain_gap(session)
        return [row for rows in found for row in rows]

    async def _explain_gap(self, session: Session) -> NoReturn:
        actual = (await self.get(session.id)).version
        if actual != session.version:
            raise VersionConflict(session.id, session.version, actual)
        raise StoreCorrupt(f"the logs of session {session.id!r} lack records")


def _matches(session: Session, query: ListQuery) -> bool:
    metadata = session.metadata.items()
    return (
        (query.tenant is None or session.tenant == query.tenant)
        and (query.status is None or session.status == query.status)
        and all(pair in metadata for pair in query.metadata.items())
    )
