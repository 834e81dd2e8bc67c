# SPDX-License-Identifier: Apache-2.0
"""HoldKeeper: tells the engine how long each session's KV is wanted in which tier, use by use.

The engine demotes by these deadlines; it forgets them when it dies, so they are told again to the
next one. What an expired session leaves is released. Does not know: HTTP, pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from appliance.services import Services
from appliance.session_history import release_kv
from engine.errors import EngineError
from sessions.errors import SessionError
from sessions.lease_policy import hold_left
from sessions.session import EXPIRED, Session
from sessions.store import ListQuery

logger = logging.getLogger(__name__)

USES = ("session.turn_ended", "session.items_appended", "session.history_replaced")
AFTER_A_TURN = 0.5  # how likely a history is continued, as far as anybody knows
MAX_TOLD_AGAIN = 500  # newest sessions, after an engine's restart


class HoldKeeper:
    """Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._chores: set[asyncio.Task[None]] = set()
        services.hub.listen(self._on_session_event)
        services.client.on_restart(lambda hello: self._begin(self.tell_all()))

    async def tell_all(self) -> None:
        """Tell the engine about every session whose KV is still wanted somewhere."""
        try:
            page = await self._services.store.list_sessions(ListQuery(limit=MAX_TOLD_AGAIN))
        except SessionError as error:
            logger.warning("holds not told: %s", error)
            return
        for session in page.sessions:
            if session.current_turn is None and session.status != EXPIRED:
                await self._tell(session)

    async def close(self) -> None:
        """Stop what is under way."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)

    async def _tell_soon(self, session: Session) -> None:
        """Whoever waits for the end of a turn comes first: they are woken in the loop's next round
        and served in the one after. No later: what they ask for then weighs more than this.
        """
        for _ in range(2):
            await asyncio.sleep(0)
        await self._tell(session)

    async def _tell(self, session: Session) -> None:
        services = self._services
        now_ms = services.clock_ms()
        left_ms = hold_left(session.settings.hold, session.updated_at_ms, now_ms)
        if not any(left_ms):
            return
        try:
            token_ids = await services.store.read_tokens(session)
            if token_ids:
                salt = services.salt_of(session.tenant)
                await services.client.hint_prefix(
                    token_ids, AFTER_A_TURN, salt=salt, hold_ms=left_ms
                )
        except (SessionError, EngineError) as error:
            logger.debug("hold not told: %s", error)

    async def _release(self, session: Session) -> None:
        try:
            log = await self._services.store.read_log(session)
            await release_kv(self._services, session, log)
        except (SessionError, EngineError) as error:
            logger.info("KV not released: %s", error, extra={"session_id": session.id})

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, Any]) -> None:
        if kind in USES and session.current_turn is None:
            self._begin(self._tell_soon(session))
        elif kind == "session.expired":
            self._begin(self._release(session))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
