# SPDX-License-Identifier: Apache-2.0
"""LeaseService: leases of sessions, asked of the engine and remembered in the store.

The engine decides and forgets when it dies; the store remembers, so a lease is asserted again by
whichever process comes next. A lease that is renewed on use follows the head of its history. Does
not know: HTTP, pages, budgets.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from appliance.api.wire_sessions import LeaseCreate, LeaseWish
from appliance.errors import ApiError
from appliance.races import racing
from appliance.services import Services
from engine import api
from engine.errors import EngineError
from sessions.durations import format_duration
from sessions.errors import SessionError, SessionExpired
from sessions.ids import new_id
from sessions.lease_policy import LeaseGrant
from sessions.leases import Lease, new_lease, parse_ttl
from sessions.session import EXPIRED, Session
from sessions.store import MAX_LIST_LIMIT, ListQuery
from sessions.token_codec import TOKEN_BYTES

logger = logging.getLogger(__name__)

MAX_LEASES_OF_A_SESSION = 16
USES = ("session.turn_ended", "session.items_appended", "session.history_replaced")
ENDS = ("session.closed", "session.expired")


class LeaseService:
    """All leases that this process has seen. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._session_of: dict[str, str] = {}
        self._chores: set[asyncio.Task[None]] = set()
        services.hub.listen(self._on_session_event)
        # Changes of leases that the engine has granted and the store does not have yet.
        self._early: dict[str, builtins.list[api.LeaseChanged]] = {}
        services.client.on_lease_change(self._on_change)
        services.client.on_restart(lambda hello: self._chore(self.assert_all()))

    # What clients ask ---------------------------------------------------------------------

    async def create(
        self, tenant: str | None, session_id: str, body: LeaseCreate
    ) -> dict[str, Any]:
        """Ask for a lease; one that is denied is answered and not kept.

        Raises: SessionExpired, ItemNotFound, TurnNotFound, SettingError, EngineUnavailableError;
        ApiError.
        """
        services = self._services
        ttl_ms = parse_ttl(body.ttl, path="ttl")
        lease_id = new_id("lease")

        async def once() -> Lease:
            session = await services.store.get(session_id, tenant=tenant)
            if session.status == EXPIRED or services.clock_ms() >= session.expires_at_ms:
                raise SessionExpired(session_id)
            if len(session.leases) >= MAX_LEASES_OF_A_SESSION:
                raise ApiError(
                    "invalid_value", f"a session has at most {MAX_LEASES_OF_A_SESSION} leases"
                )
            now_ms = services.clock_ms()
            self._early[lease_id] = []
            grant = await self._ask(session, lease_id, body.tier, body.upto, ttl_ms)
            lease = replace(
                new_lease(
                    grant,
                    tier=body.tier,
                    upto=body.upto,
                    ttl_ms=ttl_ms,
                    now_ms=now_ms,
                    renew_on_use=body.renew_on_use,
                ),
                id=lease_id,
            )
            if lease.state != "denied":
                self._session_of[lease_id] = session_id
                await services.store.update(session.add_lease(lease, now_ms))
            return lease

        try:
            lease = await racing(once)
        except SessionError:
            await self.let_go(lease_id)
            raise
        finally:
            early = self._early.pop(lease_id, [])
        self._tell(session_id, lease, lease.state)
        for change in early:
            await self._take(change)
        return lease_wire(session_id, lease)

    async def release(self, tenant: str | None, session_id: str, lease_id: str) -> None:
        """Let a lease go. Raises: LeaseNotFound, SessionNotFound."""
        store = self._services.store

        async def once() -> None:
            session = await store.get(session_id, tenant=tenant)
            await store.update(session.release_lease(lease_id))

        await racing(once)
        await self.let_go(lease_id)

    async def list(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Return the live leases of a session."""
        session = await self._services.store.get(session_id, tenant=tenant)
        data = [lease_wire(session_id, lease) for lease in self._live(session)]
        return {"object": "list", "data": data, "has_more": False}

    async def list_all(self) -> dict[str, Any]:
        """Return the live leases of every session."""
        data = [
            {**lease_wire(session.id, lease), "tenant": session.tenant}
            async for session in self._sessions()
            for lease in self._live(session)
        ]
        return {"object": "list", "data": data, "has_more": False}

    # What happens by itself ---------------------------------------------------------------

    async def assert_all(self) -> None:
        """Ask the engine again for every lease in the store: both sides may have restarted."""
        num_asserted = 0
        async for session in self._sessions():
            if self._live(session):
                await self._assert_guarded(session.id)
                num_asserted += len(session.leases)
        if num_asserted:
            logger.info("asserted %d leases again", num_asserted)

    async def close(self) -> None:
        """Stop what runs by itself; leases stay."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, Any]) -> None:
        if kind in USES and (session.leases or session.settings.lease):
            self._chore(self._assert_guarded(session.id))
        elif kind in ENDS:
            for lease in session.leases:
                self._chore(self.let_go(lease.id))

    async def _assert_guarded(self, session_id: str) -> None:
        try:
            await racing(lambda: self._assert(session_id))
        except (SessionError, EngineError) as error:
            # Without an engine there is nothing to assert; the one that comes is asked for all.
            is_out = isinstance(error, EngineError) and not self._services.client.is_ready
            level = logging.INFO if is_out else logging.WARNING
            logger.log(level, "leases not asserted: %s", error, extra={"session_id": session_id})

    async def _assert(self, session_id: str) -> None:
        """Bring the engine's side of a session's leases to what the store says, and back."""
        services = self._services
        session = await services.store.get(session_id)
        wished = self._wished(session)
        self._early |= {lease.id: [] for lease in wished}
        leases: builtins.list[Lease] = []
        try:
            for lease in (*self._live(session), *wished):
                found = await self._asserted(session, lease)
                if found is None:
                    await self.let_go(lease.id)
                else:
                    self._session_of[lease.id] = session_id
                    leases.append(found)
            if tuple(leases) == session.leases:
                return
            await services.store.update(replace(session, leases=tuple(leases)))
        except SessionError:
            for lease in wished:  # the next try has another id
                await self.let_go(lease.id)
            raise
        finally:
            early = [change for lease in wished for change in self._early.pop(lease.id)]
        for lease in leases:
            if lease not in session.leases:
                self._tell(session_id, lease, lease.state)
        for change in early:
            await self._take(change)

    async def _asserted(self, session: Session, lease: Lease) -> Lease | None:
        """The lease as the engine holds it now; None where it is over."""
        left_ms = lease.expires_at_ms - self._services.clock_ms()
        if left_ms <= 0:
            return None
        most = None if lease.renew_on_use else lease.tokens_requested
        try:
            grant = await self._ask(
                session, lease.id, lease.tier, lease.upto, left_ms, most_tokens=most
            )
        except SessionError:  # what it reached to is no longer in the history
            return None
        if grant.state == "denied":
            if lease not in session.leases:
                return None
            # Its KV went with an engine; the next turn computes it, and then it is asked again.
            grant = replace(grant, state="queued")
        return replace(
            lease,
            state=grant.state,
            tokens_requested=grant.tokens_requested,
            tokens_granted=grant.tokens_granted,
            reason=grant.reason,
        )

    def _on_change(self, change: api.LeaseChanged) -> None:
        if change.lease_id in self._early:
            self._early[change.lease_id].append(change)
        else:
            self._chore(self._take(change))

    async def _take(self, change: api.LeaseChanged) -> None:
        """Remember what the engine says became of a lease."""
        session_id = self._session_of.get(change.lease_id)
        if session_id is None:
            return
        store = self._services.store

        async def once() -> Lease | None:
            session = await store.get(session_id)
            old = next((x for x in session.leases if x.id == change.lease_id), None)
            if old is None:
                return None
            if change.kind == "expired":
                changed, kept = replace(old, tokens_granted=0), None
            else:
                is_demoted = change.kind == "demoted"
                is_whole = change.kind == "granted" or (
                    is_demoted and change.num_tokens >= old.tokens_granted
                )
                state = "granted" if is_whole else "clipped" if change.num_tokens else "queued"
                reason = None if is_whole else "budget"
                if change.kind in ("revoked", "demoted"):
                    reason = "pressure"
                tier = "l2" if change.kind == "demoted" else old.tier
                changed = kept = replace(
                    old, tier=tier, state=state, tokens_granted=change.num_tokens, reason=reason
                )
            leases = tuple(kept if x is old else x for x in session.leases)
            live = tuple(lease for lease in leases if lease is not None)
            await store.update(replace(session, leases=live))
            return changed

        try:
            lease = await racing(once)
        except SessionError as error:
            logger.warning("lease change not stored: %s", error)
            return
        if lease is not None:
            self._tell(session_id, lease, change.kind)
        if change.kind == "expired":
            self._session_of.pop(change.lease_id, None)

    # Inside -------------------------------------------------------------------------------

    async def _ask(
        self,
        session: Session,
        lease_id: str,
        tier: str,
        upto: str,
        ttl_ms: int,
        *,
        most_tokens: int | None = None,
    ) -> LeaseGrant:
        """Ask the engine. Raises what `TurnLog.cut` raises."""
        services = self._services
        log = await services.store.read_log(session)
        num_tokens = log.num_tokens_until(upto, param="upto")
        if most_tokens is not None:
            num_tokens = min(num_tokens, most_tokens)
        if not num_tokens:
            return LeaseGrant(
                state="denied",
                tokens_requested=num_tokens,
                tokens_granted=0,
                reason="nothing_to_lease",
            )
        reply = await services.client.lease(
            lease_id,
            log.token_ids[: num_tokens * TOKEN_BYTES],
            ttl_ms,
            tenant=session.tenant,
            salt=services.salt_of(session.tenant),
            tier=tier,
        )
        return LeaseGrant(
            state=reply.state,
            tokens_requested=reply.tokens_requested,
            tokens_granted=reply.tokens_granted,
            reason=reply.reason or None,
        )

    async def let_go(self, lease_id: str) -> None:
        """Have the engine forget a lease that the store does not know any more."""
        self._session_of.pop(lease_id, None)
        try:
            await self._services.client.release_lease(lease_id)
        except EngineError:
            logger.debug("lease not released: no engine")

    def _live(self, session: Session) -> tuple[Lease, ...]:
        now_ms = self._services.clock_ms()
        return tuple(lease for lease in session.leases if now_ms < lease.expires_at_ms)

    def _wished(self, session: Session) -> tuple[Lease, ...]:
        """The lease that the session was created with, where it is not held."""
        if session.settings.lease is None:
            return ()
        wish = LeaseWish.model_validate(session.settings.lease)
        ttl_ms = parse_ttl(wish.ttl, path="cache.lease.ttl")
        if any(x.upto == "head" and x.ttl_ms == ttl_ms for x in self._live(session)):
            return ()
        nothing = LeaseGrant(state="queued", tokens_requested=session.num_tokens, tokens_granted=0)
        lease = new_lease(
            nothing,
            tier=wish.tier,
            upto="head",
            ttl_ms=ttl_ms,
            now_ms=self._services.clock_ms(),
            renew_on_use=wish.renew_on_use,
        )
        return (lease,)

    async def _sessions(self) -> AsyncIterator[Session]:
        after = None
        while True:
            query = ListQuery(limit=MAX_LIST_LIMIT, after=after)
            page = await self._services.store.list_sessions(query)
            for session in page.sessions:
                yield session
            if not page.has_more:
                return
            after = page.sessions[-1].id

    def _tell(self, session_id: str, lease: Lease, kind: str) -> None:
        event = {"type": f"lease.{kind}", "session_id": session_id}
        self._services.hub.put(session_id, {**event, "lease": lease_wire(session_id, lease)})

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def lease_wire(session_id: str, lease: Lease) -> dict[str, Any]:
    """Return a lease as the API shows it."""
    return {
        "id": lease.id,
        "object": "lease",
        "session_id": session_id,
        "tier": lease.tier,
        "upto": lease.upto,
        "state": lease.state,
        "tokens_requested": lease.tokens_requested,
        "tokens_granted": lease.tokens_granted,
        "ttl": format_duration(lease.ttl_ms),
        "renew_on_use": lease.renew_on_use,
        "expires_at": lease.expires_at_ms / 1000,
        "reason": lease.reason,
    }
