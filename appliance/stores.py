# SPDX-License-Identifier: Apache-2.0
"""Which session store the configuration asks for, and whether it can be used.

Does not know: what is stored. A store's module is imported only if it is the one.
"""

from __future__ import annotations

import asyncio

from sessions.config import SessionsConfig
from sessions.errors import StoreError
from sessions.store import SessionStore


def build_store(config: SessionsConfig) -> SessionStore:
    """Return the configured store, not yet open."""
    if config.store == "redis":
        from sessions.redis_store import RedisSessionStore

        return RedisSessionStore(config)
    from sessions.sqlite_store import SqliteSessionStore

    return SqliteSessionStore(config)


def store_problem(config: SessionsConfig) -> str | None:
    """Open the store, write to it and close it; return what went wrong."""

    async def try_it() -> str | None:
        store = build_store(config)
        try:
            await store.open()
        except StoreError as error:
            return f"sessions.store: {config.store}: {error}"
        finally:
            await store.close()
        return None

    return asyncio.run(try_it())
