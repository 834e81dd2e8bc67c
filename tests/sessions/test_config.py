# SPDX-License-Identifier: Apache-2.0
"""The room's configuration is validated with paths, and names the store that is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sessions.config import SessionsConfig
from sessions.errors import SessionsConfigError
from sessions.redis_store import RedisSessionStore
from sessions.sqlite_store import SqliteSessionStore
from sessions.stores import make_store


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"store": "memory"}, "store"),
        ({"sqlite_path": ""}, "sqlite_path"),
        ({"store": "redis", "redis_url": "localhost:6379"}, "redis_url"),
        ({"idempotency_retention_ms": 86_399_999}, "idempotency_retention_ms"),
        ({"store_timeout_ms": 0}, "store_timeout_ms"),
        ({"expires_after_ms": 0}, "expires_after_ms"),
        ({"log_cache_bytes": -1}, "log_cache_bytes"),
    ],
)
def test_values_out_of_range_are_refused_with_their_path(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(SessionsConfigError, match=rf"^sessions\.{name}: expected ") as caught:
        SessionsConfig(**fields).validate()
    assert caught.value.param == f"sessions.{name}"


def test_the_configured_store_is_made(tmp_path: Path) -> None:
    assert isinstance(make_store(SessionsConfig()), SqliteSessionStore)
    redis = SessionsConfig(store="redis", redis_url=f"unix://{tmp_path}/r.sock")
    assert isinstance(make_store(redis), RedisSessionStore)
    with pytest.raises(SessionsConfigError):
        make_store(SessionsConfig(store="memory"))
