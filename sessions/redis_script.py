# SPDX-License-Identifier: Apache-2.0
"""Key layout of the Redis session store, and the one Lua script that does all its writes.

Does not know: the Redis client. A write is a list of guards, then commands; the script runs them
as one. A guard that fails ends it before anything is written and says why.

Key layout, each with the configured prefix in front (`moorage:` by default):

    schema                    string   version of this layout
    opened                    string   when a store last opened it (proves a write works)
    session:<sid>             hash     version, body, settings
    sessions                  zset     every session id, score 0: ids sort by age
    tenant:<tenant>           zset     the same, of one tenant
    children:<sid>            zset     the same, of one parent
    expiry                    zset     session id -> expires_at_ms, while no turn runs
    tokens:<tenant>           hash     session id -> length of its token history
    log:<log>                 list     records of a log: msgpack [input_len, tokens, body]
    log:<log>:ids             hash     record id -> 1: what was appended already
    log:<log>:refs            hash     session id -> end of its span; -1: its own, growing log
    refs:<sid>                hash     log id -> 1: the logs a session refers to
    pending:<sid>             hash     turn id -> pending turn, at most one
    pending                   set      sessions that have one
    queued:<sid>              hash     turn id -> turn that waits for the one before it
    queued                    set      sessions that have some
    quotas                    hash     tenant -> msgpack of its own limits
    owners                    zset     API process -> until when it said to be alive
    cancels                   zset     turn id that is to stop -> when that was asked
    ended:<sid>               hash     turn id -> record of a turn that did not become history
    keys:<sid>                hash     idempotency key -> msgpack [turn id, body hash, time]
    key_times                 zset     msgpack [session id, key] -> created_at_ms
    ended_times               zset     msgpack [session id, turn id] -> ended_at_ms

The keys of one write do not share a hash slot: the store wants one Redis, not a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from sessions import codec
from sessions.codec import StoredRecord
from sessions.errors import StoreCorrupt
from sessions.session import Session
from sessions.store import check_records
from sessions.turn_log import LogSpan, PendingTurn, Record

SCHEMA_VERSION: Final = 2  # 2: bytes with sums (sessions.stored_sums)
OPEN_END: Final = -1

TRANSACT: Final = """
local prefix = ARGV[1]
local left = {}
local i = 2
while i <= #ARGV do
  local n = tonumber(ARGV[i])
  local name = ARGV[i + 1]
  if name == '?version' then
    local version = redis.call('HGET', ARGV[i + 2], 'version')
    if not version then return {'gone'} end
    if ARGV[i + 3] ~= '' and version ~= ARGV[i + 3] then return {'version', version} end
  elseif name == '?absent' then
    local value = redis.call('HGET', ARGV[i + 2], ARGV[i + 3])
    if value then return {ARGV[i + 4], value} end
  elseif name == '?equal' then
    local value = redis.call('HGET', ARGV[i + 2], ARGV[i + 3])
    if value ~= ARGV[i + 4] then return {'changed'} end
  elseif name == '?length' then
    if redis.call('LLEN', ARGV[i + 2]) < tonumber(ARGV[i + 3]) then return {'short'} end
  elseif name == '!release' then
    for _, log in ipairs(redis.call('HKEYS', prefix .. 'refs:' .. ARGV[i + 2])) do
      redis.call('HDEL', prefix .. 'log:' .. log .. ':refs', ARGV[i + 2])
      left[#left + 1] = log
    end
    redis.call('DEL', prefix .. 'refs:' .. ARGV[i + 2])
  elseif name == '!tidy' then
    if redis.call('EXISTS', prefix .. 'queued:' .. ARGV[i + 2]) == 0 then
      redis.call('SREM', prefix .. 'queued', ARGV[i + 2])
    end
  elseif name == '!drop' then
    for _, log in ipairs(left) do
      local key = prefix .. 'log:' .. log
      local keep = 0
      for _, stop in ipairs(redis.call('HVALS', key .. ':refs')) do
        local number = tonumber(stop)
        if number == -1 then number = math.huge end
        keep = math.max(keep, number)
      end
      if keep == 0 then
        redis.call('DEL', key, key .. ':ids', key .. ':refs')
      elseif keep ~= math.huge then
        redis.call('LTRIM', key, 0, keep - 1)
      end
    end
  else
    redis.call(unpack(ARGV, i + 1, i + n))
  end
  i = i + n + 1
end
return {'ok'}
"""

Argument = str | bytes | int
_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode


class Write:
    """Collects the guards and commands of one write; guards come first."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._arguments: list[Argument] = [prefix]

    def add(self, name: str, *arguments: Argument) -> None:
        """One guard (`?...`), step (`!...`) or Redis command."""
        self._arguments.extend((1 + len(arguments), name, *arguments))

    @property
    def arguments(self) -> list[Argument]:
        """ARGV of the script."""
        return self._arguments

    def key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def indexes(self, session: Session) -> list[str]:
        """The sorted sets that list this session."""
        indexes = [self.key("sessions"), self.key("tenant", session.tenant)]
        if session.parent_session_id is not None:
            indexes.append(self.key("children", session.parent_session_id))
        return indexes

    def guard_lineage(self, session: Session) -> None:
        """The records of other logs that the session refers to must be there."""
        for span in session.lineage:
            self.add("?length", self.key("log", span.log_id), span.end)

    def put_session(self, session: Session) -> None:
        """All of a new session but its log."""
        self.put_settings(session)
        self.put_body(session)
        for index in self.indexes(session):
            self.add("ZADD", index, 0, session.id)

    def put_settings(self, session: Session) -> None:
        settings = codec.encode_settings(session.settings)
        self.add("HSET", self.key("session", session.id), "settings", settings)

    def put_body(self, session: Session) -> None:
        body = codec.encode_session(session)
        version = session.version
        self.add("HSET", self.key("session", session.id), "version", version, "body", body)
        self.add("HSET", self.key("tokens", session.tenant), session.id, session.num_tokens)
        if session.current_turn is None:
            self.add("ZADD", self.key("expiry"), session.expires_at_ms, session.id)
        else:
            self.add("ZREM", self.key("expiry"), session.id)

    def put_log(self, session: Session, records: Sequence[Record]) -> None:
        """A new log with its first records, and the references of the session's history."""
        check_records(session, records)
        own = LogSpan(log_id=session.log_id, first=0, end=OPEN_END)
        for span in (*session.lineage, own):
            self.add("HSET", self.key("log", span.log_id, "refs"), session.id, span.end)
            self.add("HSET", self.key("refs", session.id), span.log_id, 1)
        for record in records:
            self.put_record(session.log_id, record)

    def put_record(self, log_id: str, record: Record) -> None:
        self.add("RPUSH", self.key("log", log_id), pack_record(record))
        self.add("HSET", self.key("log", log_id, "ids"), record.id, 1)

    def put_pending(self, turn: PendingTurn) -> None:
        """A turn that begins, and its idempotency key."""
        sid = turn.session_id
        self.add("HSET", self.key("pending", sid), turn.id, codec.encode_pending(turn))
        self.add("SADD", self.key("pending"), sid)
        self.add("HDEL", self.key("queued", sid), turn.id)
        self.put_key(turn)

    def put_queued(self, turn: PendingTurn) -> None:
        """A turn that waits, and its idempotency key."""
        sid = turn.session_id
        self.add("HSET", self.key("queued", sid), turn.id, codec.encode_pending(turn))
        self.add("SADD", self.key("queued"), sid)
        self.put_key(turn)

    def put_key(self, turn: PendingTurn) -> None:
        """The idempotency key of a turn, if it has one."""
        sid, key = turn.session_id, turn.idempotency_key
        if key is not None:
            value = _pack((turn.id, turn.body_hash, turn.created_at_ms))
            self.add("HSET", self.key("keys", sid), key, value)
            self.add("ZADD", self.key("key_times"), turn.created_at_ms, _pack((sid, key)))

    def drop_pending(self, session_id: str) -> None:
        self.add("DEL", self.key("pending", session_id))
        self.add("SREM", self.key("pending"), session_id)


def pack_record(record: Record) -> bytes:
    """One element of a log's list."""
    row = codec.encode_record(record)
    return _pack((row.input_len, row.tokens, row.body))


def unpack_record(packed: bytes) -> StoredRecord:
    """The inverse of `pack_record`. Raises `StoreCorrupt`."""
    try:
        input_len, tokens, body = _unpack(packed, type=tuple[int, bytes, bytes])
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"a stored record does not decode: {error}") from error
    return StoredRecord(tokens, input_len, body)
