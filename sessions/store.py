# SPDX-License-Identifier: Apache-2.0
"""What a session store promises; one contract, several implementations.

Does not know: what a turn means (sessions.session decides), nor replay buffers (the appliance).

The promises:
  - a call that returned is durable: it survives kill -9 of this process and of the server;
  - a write compares the stored `version` with the one of the session it is given, and raises
    `VersionConflict` where they differ; it returns the session as stored (version + 1);
  - a write happens wholly or not at all, together with its records, key and references;
  - repeating a write with the same turn or record id changes nothing and says so;
  - `StoreUnavailable` leaves open whether the write happened: repeat it with the same ids.

Write order of a turn: where it must wait, `queue_turn`; `begin_turn` stores the pending turn and
its idempotency key, then either `commit_turn` (it becomes history) or `end_turn` (it is kept for
its readers, not as history). One that waits may end by `end_queued`.

Owners: an API process says with `beat` until when it counts as alive; `claim_turn` hands a turn of
one that is dead to another, to one of them at most. A process that wants a turn of another one
stopped leaves word with `ask_cancel`; the owner looks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sessions.errors import SettingError
from sessions.session import STATUSES, Session
from sessions.turn_log import PendingTurn, Record, TurnLog

MAX_LIST_LIMIT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """Newest first unless `ascending`; `after` is the id of the last session seen."""

    tenant: str | None = None  # None: every tenant (admin)
    after: str | None = None
    limit: int = 20
    status: str | None = None
    parent_session_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    ascending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    sessions: tuple[Session, ...]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClaim:
    """`created`: this call's turn runs now. Else the key names an earlier turn: attach to it."""

    created: bool
    turn_id: str
    session: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMatch:
    """An idempotency key that is known: which turn it started, and whether the body is the same."""

    turn_id: str
    same_body: bool
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    num_sessions: int = 0
    num_tokens: int = 0  # of token history, forks counted in full


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """Limits of one tenant; None: as configured for all, 0: no limit."""

    max_sessions: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """`ok`: it answers. `warnings` say what keeps it from writing, or from being durable."""

    ok: bool
    kind: str
    detail: str = ""
    warnings: tuple[str, ...] = ()


class SessionStore(Protocol):
    """Every method may raise `StoreUnavailable`; writes may raise `StoreFull`."""

    async def open(self) -> None:
        """Connect, migrate the schema, prove that a write works. Raises `StoreError`."""

    async def close(self) -> None:
        """Finish the writes in progress and let go; idempotent."""

    async def health(self) -> StoreHealth:
        """Answer from a real round trip; never raises."""

    async def create(self, session: Session, records: Sequence[Record] = ()) -> Session:
        """Store a new session and the first records of its log. Raises `SessionExists`."""

    async def create_many(
        self, children: Sequence[tuple[Session, Sequence[Record]]]
    ) -> tuple[Session, ...]:
        """Store all of them or none (a fork's children). Raises `SessionExists`,
        `SessionNotFound` where records they share are gone."""

    async def get(self, session_id: str, *, tenant: str | None = None) -> Session:
        """Raises `SessionNotFound`, also for another tenant's session."""

    async def list_sessions(self, query: ListQuery) -> SessionPage:
        """Raises `SettingError` for a limit or status out of range."""

    async def update(self, session: Session) -> Session:
        """Store changed fields; the history stays. Raises `VersionConflict`, `SessionNotFound`."""

    async def delete(self, session_id: str, *, version: int | None = None) -> bool:
        """Delete the session and the records nobody else shares; False if it was gone.

        With `version`: only if it is still the stored one, else `VersionConflict`.
        """

    async def begin_turn(self, session: Session, turn: PendingTurn) -> TurnClaim:
        """Store the claimed session and its pending turn.

        If the turn's idempotency key is known as another turn's, nothing is written and the claim
        names that turn; with another body hash it raises `IdempotencyKeyReused`. A turn that waited
        waits no more. Raises `VersionConflict`.
        """

    async def commit_turn(self, session: Session, record: Record) -> Session:
        """Append the turn's record; the pending turn ends. Repeating it is harmless."""

    async def end_turn(self, session: Session, record: Record) -> Session:
        """Keep an uncommitted turn's outcome; the pending turn ends. Repeating it is harmless."""

    async def append_record(self, session: Session, record: Record) -> Session:
        """Append a record that is no turn. Repeating it is harmless."""

    async def replace_history(self, session: Session, records: Sequence[Record]) -> Session:
        """Move the session to its new log (rollback, compaction); release what it left behind."""

    async def read_log(self, session: Session) -> TurnLog:
        """The records of this session as of this value of it. Raises `SessionNotFound`."""

    async def read_tokens(self, session: Session) -> bytes:
        """The exact token history, int32 bytes; cheaper than `read_log` when not cached."""

    async def read_turn(self, session: Session, turn_id: str) -> PendingTurn | Record:
        """A waiting, pending, committed or uncommitted turn. Raises `TurnNotFound`."""

    async def pending_turns(self, *, owner: str | None = None) -> tuple[PendingTurn, ...]:
        """Every turn (of one owner) that was begun and has not ended, oldest first.

        To attach to after a restart.
        """

    async def queue_turn(self, turn: PendingTurn) -> str:
        """Store a turn that waits, with its idempotency key; repeating it is harmless.

        Returns its id, or that of the turn its key names already; then nothing is written. Raises
        `IdempotencyKeyReused` for another body, `SessionNotFound`.
        """

    async def queued_turns(
        self, *, session_id: str | None = None, owner: str | None = None
    ) -> tuple[PendingTurn, ...]:
        """The turns that wait (of one session, of one owner), oldest first."""

    async def end_queued(self, session_id: str, record: Record) -> bool:
        """Keep how a turn ended before its begin; False if it does not wait (any more)."""

    async def claim_turn(self, turn: PendingTurn, owner: str) -> bool:
        """Make `owner` the owner of a pending or waiting turn; False if `turn.owner` is not."""

    async def clock_ms(self) -> int:
        """Milliseconds since the epoch, by one clock for all who share the store."""

    async def beat(self, owner: str, until_ms: int) -> None:
        """Note that an API process is alive until then, by `clock_ms`."""

    async def live_owners(self, now_ms: int) -> frozenset[str]:
        """The API processes that said they would be alive now."""

    async def ask_cancel(self, turn_id: str, now_ms: int) -> None:
        """Leave word that a turn, which another process runs, is to stop; asking twice is one."""

    async def asked_cancels(self) -> frozenset[str]:
        """The turns that are to stop and of which it was not said yet that they have."""

    async def forget_cancels(self, turn_ids: Collection[str]) -> None:
        """These turns have ended. `forget_keys` forgets what nobody saw to."""

    async def find_key(self, session_id: str, key: str, body_hash: str) -> KeyMatch | None:
        """Look an idempotency key up; None if unknown."""

    async def forget_keys(self, now_ms: int) -> int:
        """Drop idempotency keys, and turns that never became history, past the keys' retention.

        Returns how many keys went. The key of a running turn stays.
        """

    async def due(self, now_ms: int, limit: int) -> tuple[Session, ...]:
        """Sessions without a running turn whose `expires_at_ms` has come, oldest first."""

    async def get_quota(self, tenant: str) -> TenantQuota | None:
        """The tenant's own limits; None where it has none."""

    async def set_quota(self, tenant: str, quota: TenantQuota | None) -> None:
        """Keep a tenant's own limits; None forgets them."""

    async def tenant_usage(self, tenant: str) -> TenantUsage:
        """Counts over the tenant's stored sessions."""


def validate_query(query: ListQuery) -> None:
    """Raise `SettingError` for a limit or a status out of range."""
    if not 1 <= query.limit <= MAX_LIST_LIMIT:
        raise SettingError(
            f"limit: expected 1 to {MAX_LIST_LIMIT}, got {query.limit}", param="limit"
        )
    if query.status is not None and query.status not in STATUSES:
        raise SettingError(
            f"status: expected one of {', '.join(STATUSES)}, got {query.status!r}", param="status"
        )


def check_records(session: Session, records: Sequence[Record]) -> None:
    """Raise ValueError unless these are the records that `session` was made with."""
    if session.log_len != len(records):
        raise ValueError(f"records: {len(records)} for a session with {session.log_len}")
