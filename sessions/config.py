# SPDX-License-Identifier: Apache-2.0
"""Configuration of the session room: values, defaults, units; nothing is read from the outside.

Does not know: TOML files or environment (appliance.config reads those).
"""

from __future__ import annotations

from dataclasses import dataclass

from sessions.errors import SessionsConfigError

STORES = ("sqlite", "redis")
_DAY_MS = 86_400_000
_NOT_NEGATIVE = (
    "sqlite_max_bytes",
    "log_cache_bytes",
    "max_sessions_per_tenant",
    "max_tokens_per_tenant",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    """Times in milliseconds, sizes in bytes.

    store: "sqlite" (embedded, one API process) or "redis" (several API processes).
    sqlite_path: the database file, in server.state_dir unless absolute; its directory is created.
    sqlite_max_bytes: size the file may reach, 0: the disk decides.
    redis_url: redis://, rediss:// (TLS) or unix:// with user, password and db as redis-py reads.
    redis_key_prefix: put in front of every key.
    store_timeout_ms: how long one call may wait for the store.
    log_cache_bytes: memory for histories kept decoded.
    expires_after_ms: default life of an idle session.
    expired_retention_ms: how long an expired session still answers `session_expired`.
    idempotency_retention_ms: how long an idempotency key is known, at least a day.
    max_sessions_per_tenant: 0: no limit.
    max_tokens_per_tenant: of token history, forks counted in full; 0: no limit.
    """

    store: str = "sqlite"
    sqlite_path: str = "moorage-sessions.db"
    sqlite_max_bytes: int = 0
    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_key_prefix: str = "moorage:"
    store_timeout_ms: int = 5_000
    log_cache_bytes: int = 256 << 20
    expires_after_ms: int = 7 * _DAY_MS
    expired_retention_ms: int = _DAY_MS
    idempotency_retention_ms: int = 2 * _DAY_MS
    max_sessions_per_tenant: int = 0
    max_tokens_per_tenant: int = 0

    def validate(self, *, path: str = "sessions") -> None:
        """Raise `SessionsConfigError` for the first value out of range, naming its path."""
        if self.store not in STORES:
            _fail(path, "store", self.store, f"one of {', '.join(STORES)}")
        if self.store == "sqlite" and not self.sqlite_path:
            _fail(path, "sqlite_path", self.sqlite_path, "a file path")
        schemes = ("redis://", "rediss://", "unix://")
        if self.store == "redis" and not self.redis_url.startswith(schemes):
            _fail(path, "redis_url", self.redis_url, f"a URL that starts with {schemes}")
        if self.idempotency_retention_ms < _DAY_MS:
            _fail(path, "idempotency_retention_ms", self.idempotency_retention_ms, "a day or more")
        for name in ("store_timeout_ms", "expires_after_ms", "expired_retention_ms"):
            if getattr(self, name) < 1:
                _fail(path, name, getattr(self, name), "at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                _fail(path, name, getattr(self, name), "0 or more")


def _fail(path: str, name: str, value: object, wanted: str) -> None:
    raise SessionsConfigError(
        f"{path}.{name}: expected {wanted}, got {value!r}", param=f"{path}.{name}"
    )
