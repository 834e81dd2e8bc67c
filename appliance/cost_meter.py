# SPDX-License-Identifier: Apache-2.0
"""CostMeter: byte-seconds that the KV of each session takes in each tier.

It follows the engine's cache changes by page name, so a look at a session costs the engine nothing;
what it has counted goes into the store with the next turn. Bytes shared by several sessions are
counted for each. Does not know: HTTP, why a page is where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from appliance.services import Services
from appliance.tier_facts import TierWatch
from engine.api import CacheHit
from engine.errors import EngineError
from sessions.errors import SessionError
from sessions.lease_policy import TierTokens
from sessions.residency import HASH_BYTES, Residency, TierCost
from sessions.session import EXPIRED, Session
from sessions.store import ListQuery
from sessions.turn_log import TurnLog

logger = logging.getLogger(__name__)

SAMPLE_EVERY_S = 5.0
SLICE = 32  # sessions sampled before others get their turn
MAX_TRACKED = 1000  # sessions, those used last; a look at all of them takes some 50 ms
MAX_TRACKED_AT_START = 200
HISTORY_EVENTS = ("session.turn_ended", "session.history_replaced", "session.created")


class CostMeter:
    """Belongs to one event loop."""

    def __init__(self, services: Services, tiers: TierWatch) -> None:
        self._services = services
        self._tiers = tiers
        self._residency: Residency | None = None
        self._tenants: dict[str, str] = {}  # of the sessions that are tracked
        self._pending: dict[str, TierCost] = {}  # since the store was told
        self._gone: dict[str, TierCost] = {}  # of sessions that are closed, by tenant
        self._news: set[asyncio.Task[None]] = set()
        services.hub.listen(self._on_session_event)

    def copies(self, session_id: str) -> TierTokens | None:
        """Tokens by tier as the events tell, each copy counted, in whole pages; what costs.

        None for a session that is not tracked.
        """
        if self._residency is None or session_id not in self._tenants:
            return None
        return self._residency.tokens(session_id)

    def shared_tokens(self, session_id: str) -> int:
        """Tokens of the session's head that another tracked session has too."""
        return 0 if self._residency is None else self._residency.shared_tokens(session_id)

    def cost_of(self, session: Session) -> TierCost:
        """What the session has cost until now."""
        return session.cost.added(self._pending.get(session.id, TierCost()))

    def settled(self, session: Session) -> Session:
        """The session with its whole cost in it, as it is about to be stored."""
        return replace(session, cost=self.cost_of(session))

    def cost_of_gone(self) -> dict[str, TierCost]:
        """By tenant, what sessions cost that were closed since this process started."""
        return dict(self._gone)

    # Running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the cache, and count every few seconds, until cancelled."""
        follower = asyncio.create_task(self._follow())
        try:
            await self._track_known()
            while True:
                await asyncio.sleep(SAMPLE_EVERY_S)
                with contextlib.suppress(EngineError):
                    await self.sample()
        finally:
            follower.cancel()
            await asyncio.gather(follower, *self._news, return_exceptions=True)

    async def sample(self) -> None:
        """Add up since the last sample. Raises: EngineUnavailableError."""
        if self._residency is None:
            return
        kv_bytes = (await self._tiers.facts()).kv_bytes_per_token
        for number, session_id in enumerate(list(self._tenants)):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            self._count(session_id, kv_bytes)

    def _count(self, session_id: str, kv_bytes: int) -> None:
        if self._residency is None or session_id not in self._tenants:
            return
        now_ms = self._services.clock_ms()
        before = self._pending.get(session_id, TierCost())
        resident = self._residency.tokens(session_id)
        self._pending[session_id] = before.plus(resident, kv_bytes, now_ms)

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._services.client.kv_events()) as batches:
            async for batch in batches:
                hello = self._services.client.hello
                if hello is None:
                    continue
                if self._residency is None:
                    self._residency = Residency(hello.page_size)
                for change in batch.events:
                    if change.kind == "reset":
                        self._residency.clear()
                        self._begin(self._track_known())
                    else:
                        self._residency.apply(change.kind, change.tier, change.page_hash)

    async def _track_known(self) -> None:
        """Look once at the newest sessions: what happened before is in no event."""
        try:
            hello = await self._services.client.wait_ready(60.0)
            self._residency = self._residency or Residency(hello.page_size)
            page = await self._services.store.list_sessions(ListQuery(limit=MAX_TRACKED_AT_START))
            for session in page.sessions:
                if session.status != EXPIRED and session.num_tokens:
                    await self._track(session)
        except (EngineError, SessionError) as error:
            logger.info("residency not known yet: %s", error)

    async def _track(self, session: Session) -> None:
        services = self._services
        log = await services.store.read_log(session)
        salt = services.salt_of(session.tenant)
        hit = await services.client.query_prefix(log.token_ids, salt=salt, timeout_s=2.0)
        self._follow_log(session, log)
        if self._residency is not None:
            _seed(self._residency, log.page_hashes, hit, services.client.hello.page_size)  # type: ignore[union-attr]

    def _follow_log(self, session: Session, log: TurnLog) -> None:
        if self._residency is not None:
            self._residency.track(session.id, log.page_hashes)
            self._tenants.pop(session.id, None)  # the one used last is the last
            self._tenants[session.id] = session.tenant
            if len(self._tenants) > MAX_TRACKED:
                self._drop(next(iter(self._tenants)))

    async def _note(self, session: Session) -> None:
        with contextlib.suppress(SessionError):
            self._follow_log(session, await self._services.store.read_log(session))

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, Any]) -> None:
        if kind in HISTORY_EVENTS:
            self._forget_stored(session)
            self._begin(self._note(session))
        elif kind == "session.closed":
            cost = self.cost_of(session)
            self._gone[session.tenant] = self._gone.get(session.tenant, TierCost()).added(cost)
            self._pending.pop(session.id, None)
            self._drop(session.id)

    def _drop(self, session_id: str) -> None:
        """Count this session no further; what was counted stays until it is stored."""
        self._tenants.pop(session_id, None)
        if self._residency is not None:
            self._residency.forget(session_id)

    def _forget_stored(self, session: Session) -> None:
        """What is in the stored session is not counted a second time."""
        pending = self._pending.get(session.id)
        if pending is not None and session.cost.sampled_at_ms >= pending.sampled_at_ms:
            self._pending[session.id] = TierCost(sampled_at_ms=pending.sampled_at_ms)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._news.add(task)
        task.add_done_callback(self._news.discard)


def _seed(residency: Residency, page_hashes: bytes, hit: CacheHit, page_size: int) -> None:
    """Note where the pages of a history are, by one answer of the engine."""
    pages: Iterable[bytes] = (
        page_hashes[start : start + HASH_BYTES] for start in range(0, len(page_hashes), HASH_BYTES)
    )
    ends = (("l1", hit.l1), ("l2", hit.l1 + hit.l2), ("l3", hit.l1 + hit.l2 + hit.l3))
    for index, page_hash in enumerate(pages):
        tier = next((name for name, end in ends if (index + 1) * page_size <= end), None)
        if tier is None:
            return
        residency.apply("stored", tier, page_hash)
