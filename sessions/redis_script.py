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
    ended:<sid>               hash     turn id -> record of a turn that did not become history
    keys:<sid>                hash     idempotency key -> msgpack [turn id, body hash, time]
    key_times                 zset     msgpack [session id, key] -> created_at_ms
    ended_times               zset     msgpack [session id, turn id] -> ended_at_ms

The keys of one write do not share a hash slot: the store wants one Redis, not a cluster.
"""

from __future__ import annotations

from typing import Final

SCHEMA_VERSION: Final = 1
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
  elseif name == '?length' then
    if redis.call('LLEN', ARGV[i + 2]) < tonumber(ARGV[i + 3]) then return {'short'} end
  elseif name == '!release' then
    for _, log in ipairs(redis.call('HKEYS', prefix .. 'refs:' .. ARGV[i + 2])) do
      redis.call('HDEL', prefix .. 'log:' .. log .. ':refs', ARGV[i + 2])
      left[#left + 1] = log
    end
    redis.call('DEL', prefix .. 'refs:' .. ARGV[i + 2])
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


class Write:
    """Collects the guards and commands of one write."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._arguments: list[Argument] = [prefix]

    def add(self, name: str, *arguments: Argument) -> None:
        """One guard (`?...`), step (`!...`) or Redis command; guards come first."""
        self._arguments.extend((1 + len(arguments), name, *arguments))

    def key(self, name: str) -> str:
        return self.prefix + name

    @property
    def arguments(self) -> list[Argument]:
        """ARGV of the script."""
        return self._arguments
