# SPDX-License-Identifier: Apache-2.0
"""Suspend and resume: a session whose KV is given up in L1 and L2 and kept below, and its way back.

Does not know: HTTP, how pages move. Nothing depends on a resume: a turn on a suspended session
finds what is left of its KV, wherever it is, and computes the rest.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from appliance import turn_view
from appliance.leases import LeaseService
from appliance.prefill import Prefiller
from appliance.races import racing
from appliance.services import Services
from appliance.tier_facts import TierWatch
from engine.api import CacheHit
from engine.errors import EngineError
from sessions.errors import SessionError
from sessions.session import SUSPENDED, Session

logger = logging.getLogger(__name__)


class Parking:
    """All suspends and resumes of this process."""

    def __init__(
        self, services: Services, leases: LeaseService, tiers: TierWatch, prefiller: Prefiller
    ) -> None:
        self._services = services
        self._leases = leases
        self._tiers = tiers
        self._prefiller = prefiller

    async def suspend(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Flush a session's KV to the lowest tier there is and let go of what lies above.

        Its leases above that tier end. Raises: TurnInProgress, SessionExpired,
        EngineUnavailableError.
        """
        services = self._services

        async def mark() -> tuple[Session, Session]:
            session = await services.store.get(session_id, tenant=tenant)
            parked = session.suspend(services.clock_ms())
            kept = tuple(lease for lease in parked.leases if lease.tier == "l3")
            return session, await services.store.update(replace(parked, leases=kept))

        facts = await self._tiers.facts()
        before, session = await racing(mark)
        for lease in before.leases:
            if lease not in session.leases:
                await self._leases.let_go(lease.id)
        tier = "l3" if facts.has_l3 else "l2" if facts.has_l2 else "none"
        hit = await self._move(session, tier)
        logger.info("session suspended", extra={"session_id": session_id})
        kept_tokens = hit.l1 + hit.l2 + hit.l3
        await self._note_kept(session, kept_tokens)
        return {
            **turn_view.session_wire(session),
            "tier": None if tier == "none" else tier,
            "resident": {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3},
            "kept_tokens": kept_tokens,
            "dropped_tokens": session.num_tokens - kept_tokens,
        }

    async def resume(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Bring a session's KV back to L1; says how much of it was there to bring.

        What is in no tier is computed where a store had to be asked. On a session that is not
        suspended it is a prefetch. Raises: SessionExpired, TurnInProgress.
        """
        services = self._services

        async def mark() -> Session:
            session = await services.store.get(session_id, tenant=tenant)
            session.check_ready(services.clock_ms())
            if session.status != SUSPENDED:
                return session
            return await services.store.update(session.resume(services.clock_ms()))

        session = await racing(mark)
        try:
            hit = await self._restore(session)
        except EngineError as error:  # the session is back all the same
            logger.warning("nothing restored: %s", error, extra={"session_id": session_id})
            hit = CacheHit()
        restored = hit.l1 + hit.l2 + hit.l3
        logger.info("session resumed", extra={"session_id": session_id})
        return {
            **turn_view.session_wire(session),
            "restored_tokens": restored,
            "recompute_tokens": session.num_tokens - restored,
            "resident": {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3},
        }

    async def _note_kept(self, session: Session, kept_tokens: int) -> None:
        """Remember how much a suspend kept: a later miss of the rest is no eviction."""
        store = self._services.store

        async def note() -> None:
            now = await store.get(session.id)
            if now.suspended is not None and now.suspended == session.suspended:
                kept = replace(now.suspended, kept_tokens=kept_tokens)
                await store.update(replace(now, suspended=kept))

        try:
            await racing(note)
        except SessionError as error:
            logger.info("not noted: %s", error, extra={"session_id": session.id})

    async def _restore(self, session: Session) -> CacheHit:
        """Bring up what this engine knows of; what only a store may know of, a prefill asks for.

        Another appliance put it there, or this engine is younger than it.
        """
        hit = await self._move(session, "l1")
        hello = self._services.client.hello
        page_size = hello.page_size if hello is not None else 1
        is_whole = hit.to_compute < page_size
        if is_whole or not (await self._tiers.facts()).has_l3:
            return hit
        token_ids = await self._services.store.read_tokens(session)
        prefilled = await self._prefiller.run(session, token_ids, is_urgent=True)
        return hit if prefilled.cache is None else prefilled.cache

    async def _move(self, session: Session, tier: str) -> CacheHit:
        services = self._services
        token_ids = await services.store.read_tokens(session)
        if not token_ids:
            return CacheHit()
        salt = services.salt_of(session.tenant)
        return (await services.client.move_prefix(token_ids, tier, salt=salt)).cache
