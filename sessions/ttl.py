# SPDX-License-Identifier: Apache-2.0
"""The sweep: expires idle sessions past their time, deletes the expired ones later.

Does not know: KV memory (sessions.lease_policy decides about that) or which store is behind.
The clock is an argument, so tests own time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sessions.errors import SessionNotFound, VersionConflict

if TYPE_CHECKING:
    from sessions.session import Session
    from sessions.store import SessionStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Ids whose state the sweep changed; their KV may go."""

    expired: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    forgotten_keys: int = 0


class Sweeper:
    """Expires idle sessions past their time, and later deletes the expired ones.

    An expired session answers `session_expired` for `retention_ms`, then it is gone. A session
    with a running turn is never touched: the turn's commit moves its expiry. After a clock that
    leapt by more than `max_step_ms` since the last pass, one pass is left out: a wrong clock that
    is set right in the meantime expires nothing. The clock is the store's, so that one machine of
    several whose own is wrong expires nobody's session.
    """

    def __init__(
        self,
        store: SessionStore,
        clock_ms: Callable[[], Awaitable[int]],
        *,
        retention_ms: int,
        batch: int = 100,
        max_step_ms: int = 6 * 3_600_000,
    ) -> None:
        self._store = store
        self._clock_ms = clock_ms
        self._retention_ms = retention_ms
        self._batch = batch
        self._max_step_ms = max_step_ms
        self._last_ms: int | None = None

    async def sweep(self) -> SweepResult:
        """Run one bounded pass; call it again while it returns a full batch."""
        now_ms = await self._clock_ms()
        last_ms, self._last_ms = self._last_ms, now_ms
        if last_ms is not None and now_ms - last_ms > self._max_step_ms:
            logger.warning("clock leapt by %d ms: no session expires now", now_ms - last_ms)
            return SweepResult()
        expired: list[str] = []
        deleted: list[str] = []
        for session in await self._store.due(now_ms, self._batch):
            try:
                await self._sweep_one(session, now_ms, expired, deleted)
            except (VersionConflict, SessionNotFound):
                continue  # someone used or deleted it between our read and our write
        forgotten = await self._store.forget_keys(now_ms)
        return SweepResult(expired=tuple(expired), deleted=tuple(deleted), forgotten_keys=forgotten)

    async def _sweep_one(
        self, session: Session, now_ms: int, expired: list[str], deleted: list[str]
    ) -> None:
        if session.status == "expired":
            await self._store.delete(session.id, version=session.version)
            deleted.append(session.id)
            return
        await self._store.update(session.expire(now_ms, retention_ms=self._retention_ms))
        expired.append(session.id)
        logger.info("session expired session_id=%s", session.id)
