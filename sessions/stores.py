# SPDX-License-Identifier: Apache-2.0
"""Makes the session store the configuration names. Redis's client is imported only where used."""

from __future__ import annotations

from sessions.config import SessionsConfig
from sessions.store import SessionStore


def make_store(config: SessionsConfig) -> SessionStore:
    """A store that is not open yet. Raises `SessionsConfigError`."""
    config.validate()
    if config.store == "redis":
        from sessions.redis_store import RedisSessionStore

        return RedisSessionStore(config)
    from sessions.sqlite_store import SqliteSessionStore

    return SqliteSessionStore(config)
