# SPDX-License-Identifier: Apache-2.0
"""A session store that tells of every write it made: where lifecycle events come from.

Whoever writes (a request, a turn's end, the sweep), the event is sent after the write is durable
and at one place. Does not know: who listens, how a store works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from sessions.errors import SessionNotFound
from sessions.session import EXPIRED, SUSPENDED, Session
from sessions.store import (
    KeyMatch,
    ListQuery,
    SessionPage,
    SessionStore,
    StoreHealth,
    TenantQuota,
    TenantUsage,
    TurnClaim,
)
from sessions.turn_log import PendingTurn, Record, TurnLog

# (event type, session as stored, more fields); for `session.closed` the session is as it was.
Tell = Callable[[str, Session, dict[str, Any]], None]


class ObservedStore:
    """A `SessionStore` around another; reads go straight through."""

    def __init__(self, store: SessionStore, tell: Tell) -> None:
        self._store = store
        self._tell = tell

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def health(self) -> StoreHealth:
        return await self._store.health()

    # Writes -------------------------------------------------------------------------------

    async def create(self, session: Session, records: Sequence[Record] = ()) -> Session:
        stored = await self._store.create(session, records)
        self._tell("session.created", stored, {})
        return stored

    async def create_many(
        self, children: Sequence[tuple[Session, Sequence[Record]]]
    ) -> tuple[Session, ...]:
        stored = await self._store.create_many(children)
        for child in stored:
            self._tell("session.created", child, {"parent_session_id": child.parent_session_id})
        return stored

    async def update(self, session: Session) -> Session:
        stored = await self._store.update(session)
        event = {EXPIRED: "session.expired", SUSPENDED: "session.suspended"}.get(stored.status)
        self._tell(event or "session.updated", stored, {})
        return stored

    async def delete(self, session_id: str, *, version: int | None = None) -> bool:
        try:
            session = await self._store.get(session_id)
        except SessionNotFound:
            return False
        is_deleted = await self._store.delete(session_id, version=version)
        if is_deleted:
            self._tell("session.closed", session, {})
        return is_deleted

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        claim = await self._store.begin_turn(session, turn)
        if claim.created:
            self._tell("session.turn_started", claim.session, {"turn_id": turn.id})
        return claim

    async def commit_turn(self, session: Session, record: Record) -> Session:
        stored = await self._store.commit_turn(session, record)
        self._tell("session.turn_ended", stored, _outcome(record))
        return stored

    async def end_turn(self, session: Session, record: Record) -> Session:
        stored = await self._store.end_turn(session, record)
        self._tell("session.turn_ended", stored, _outcome(record))
        return stored

    async def append_record(self, session: Session, record: Record) -> Session:
        stored = await self._store.append_record(session, record)
        self._tell("session.items_appended", stored, {"num_items": len(record.items)})
        return stored

    async def replace_history(self, session: Session, records: Sequence[Record]) -> Session:
        stored = await self._store.replace_history(session, records)
        self._tell("session.history_replaced", stored, {})
        return stored

    async def queue_turn(self, turn: PendingTurn) -> str:
        return await self._store.queue_turn(turn)

    async def end_queued(self, session_id: str, record: Record) -> bool:
        return await self._store.end_queued(session_id, record)

    async def claim_turn(self, turn: PendingTurn, owner: str) -> bool:
        return await self._store.claim_turn(turn, owner)

    async def beat(self, owner: str, until_ms: int) -> None:
        await self._store.beat(owner, until_ms)

    async def ask_cancel(self, turn_id: str, now_ms: int) -> None:
        await self._store.ask_cancel(turn_id, now_ms)

    async def forget_cancels(self, turn_ids: Collection[str]) -> None:
        await self._store.forget_cancels(turn_ids)

    # Reads --------------------------------------------------------------------------------

    async def get(self, session_id: str, *, tenant: str | None = None) -> Session:
        return await self._store.get(session_id, tenant=tenant)

    async def list_sessions(self, query: ListQuery) -> SessionPage:
        return await self._store.list_sessions(query)

    async def read_log(self, session: Session) -> TurnLog:
        return await self._store.read_log(session)

    async def read_tokens(self, session: Session) -> bytes:
        return await self._store.read_tokens(session)

    async def read_turn(self, session: Session, turn_id: str) -> PendingTurn | Record:
        return await self._store.read_turn(session, turn_id)

    async def pending_turns(self, *, owner: str | None = None) -> tuple[PendingTurn, ...]:
        return await self._store.pending_turns(owner=owner)

    async def queued_turns(
        self, *, session_id: str | None = None, owner: str | None = None
    ) -> tuple[PendingTurn, ...]:
        return await self._store.queued_turns(session_id=session_id, owner=owner)

    async def clock_ms(self) -> int:
        return await self._store.clock_ms()

    async def live_owners(self, now_ms: int) -> frozenset[str]:
        return await self._store.live_owners(now_ms)

    async def asked_cancels(self) -> frozenset[str]:
        return await self._store.asked_cancels()

    async def find_key(self, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
        return await self._store.find_key(session_id, key, body_hash)

    async def forget_keys(self, now_ms: int) -> int:
        return await self._store.forget_keys(now_ms)

    async def due(self, now_ms: int, limit: int) -> tuple[Session, ...]:
        return await self._store.due(now_ms, limit)

    async def get_quota(self, tenant: str) -> TenantQuota | None:
        return await self._store.get_quota(tenant)

    async def set_quota(self, tenant: str, quota: TenantQuota | None) -> None:
        await self._store.set_quota(tenant, quota)

    async def tenant_usage(self, tenant: str) -> TenantUsage:
        return await self._store.tenant_usage(tenant)


def _outcome(record: Record) -> dict[str, Any]:
    return {"turn_id": record.id, "turn_status": record.status}
