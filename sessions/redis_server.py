# SPDX-License-Identifier: Apache-2.0
"""The connection to the Redis server of the session store: deadlines, errors, how durable it is.

Does not know: sessions, keys but the two of the schema. Nothing is retried here: an error leaves
open whether a write happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sessions.config import SessionsConfig
from sessions.errors import (
    SessionsConfigError,
    StoreError,
    StoreFull,
    StoreSchemaTooNew,
    StoreUnavailable,
)
from sessions.redis_script import SCHEMA_VERSION, TRANSACT, Write
from sessions.store import StoreHealth

logger = logging.getLogger(__name__)

_SOCKET_TIMEOUT_S = 1.0


class RedisServer:
    """One connection pool, opened and closed with the store."""

    def __init__(self, config: SessionsConfig) -> None:
        self._config = config
        self._writes: set[asyncio.Task[Any]] = set()
        self._redis: redis.asyncio.Redis | None = None
        self._warnings: tuple[str, ...] = ()

    async def open(self) -> None:
        if self._redis is not None:
            return
        try:
            self._redis = redis.asyncio.Redis.from_url(
                self._config.redis_url,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=_SOCKET_TIMEOUT_S,
                # redis-py retries ten times by default: minutes on a server that hangs.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise SessionsConfigError(
                f"sessions.redis_url: {error}", param="sessions.redis_url"
            ) from error
        try:
            await self._check_server()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client, self._redis = self._redis, None
        if client is None:
            return
        if self._writes:
            await asyncio.wait(self._writes, timeout=self._deadline_s)
        await client.aclose()

    async def health(self) -> StoreHealth:
        try:
            info = await self.call(self.client.info("persistence"))
        except StoreError as error:
            return StoreHealth(ok=False, kind="redis", detail=error.message)
        status = info.get("aof_last_write_status", "ok")
        return StoreHealth(
            ok=status == "ok",
            kind="redis",
            detail=f"schema {SCHEMA_VERSION}, last AOF write {status}",
            warnings=self._warnings,
        )

    @property
    def client(self) -> redis.asyncio.Redis:
        if self._redis is None:
            raise StoreUnavailable("the session store is not open")
        return self._redis

    @property
    def _deadline_s(self) -> float:
        return self._config.store_timeout_ms / 1000

    async def transact(self, write: Write) -> list[bytes]:
        script = self.client.register_script(TRANSACT)
        task = asyncio.create_task(self.call(script(args=write.arguments)))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        # Shielded: a caller that gives up does not undo a write that is under way.
        reply: list[bytes] = await asyncio.shield(task)
        return reply

    async def call(self, awaitable: Awaitable[Any]) -> Any:
        # Any: replies come as bytes (decode_responses is off), which redis-py's types do not know.
        try:
            async with asyncio.timeout(self._deadline_s):
                return await awaitable
        except TimeoutError:
            raise StoreUnavailable(
                f"Redis gave no answer in {self._config.store_timeout_ms} ms"
            ) from None
        except (redis.exceptions.RedisError, OSError) as error:
            raise _describe(error) from error

    async def _check_server(self) -> None:
        prefix = self._config.redis_key_prefix
        schema = await self.call(self.client.get(prefix + "schema"))
        if schema is not None and int(schema) > SCHEMA_VERSION:
            raise StoreSchemaTooNew(
                f"Redis holds schema {int(schema)}, this Moorage knows up to {SCHEMA_VERSION} "
                "(hint: start the Moorage that wrote it, or a later one)"
            )
        write = Write(prefix)
        write.add("SET", prefix + "schema", SCHEMA_VERSION)
        write.add("SET", prefix + "opened", time.time_ns() // 1_000_000)
        await self.transact(write)
        self._warnings = await self._durability_warnings()
        for warning in self._warnings:
            logger.warning("redis session store: %s", warning)

    async def _durability_warnings(self) -> tuple[str, ...]:
        wanted = {
            "appendonly": ("yes", "a restart of the server loses turns"),
            "appendfsync": ("always", "a crash may lose acknowledged turns"),
            "maxmemory-policy": ("noeviction", "sessions may vanish under memory pressure"),
        }
        try:
            settings = await self.call(self.client.config_get(*wanted))
        except StoreError as error:
            return (f"cannot see how durable the server is ({error.message})",)
        found = {_text(name): _text(value) for name, value in settings.items()}
        return tuple(
            f"{name} is {found.get(name, 'unknown')!r}, not {value!r}: {consequence}"
            for name, (value, consequence) in wanted.items()
            if found.get(name) != value
        )


def _describe(error: Exception) -> StoreError:
    text = f"Redis: {error}"
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "MISCONF" in text:
        return StoreFull(f"{text} (hint: the server's memory or disk is full)")
    if type(error) is redis.exceptions.ConnectionError:
        text += " (hint: if it does not start after a crash, its log may ask for redis-check-aof)"
    return StoreUnavailable(text)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
