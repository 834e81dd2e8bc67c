# SPDX-License-Identifier: Apache-2.0
"""A session and its pure transitions: each returns a new value or raises, nothing else happens.

Does not know: stores, HTTP, the engine. Time comes in as `now_ms` (Unix milliseconds).

Two counters: `revision` is what clients see and counts commits to the history; `version` counts
every write of the stored session and is what stores compare before they write.

Invariants:
  - current_turn is set exactly while status is "running" or "queued";
  - revision grows by one with each commit, and never otherwise (fork and import start a session);
  - without a turn, status is "requires_action" exactly while calls are open, unless suspended,
    expired or failed;
  - open_calls lists the calls of the history without an output, oldest first;
    partial_outputs belong to open calls;
  - the history is the records of `lineage`, then the first `log_len` records of `log_id`;
    num_tokens is the length of their token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sessions.calls import OpenCall, PartialOutput, close_calls, resolve_calls
from sessions.errors import (
    LeaseNotFound,
    RevisionConflict,
    SessionExpired,
    SettingError,
    TurnInProgress,
    UnknownCallId,
)
from sessions.ids import new_id
from sessions.items import FunctionCall, Item
from sessions.leases import Lease, renewed
from sessions.residency import TierCost
from sessions.settings import HEAD_SETTINGS, SessionSettings
from sessions.turn_log import ITEMS, LogSpan, PendingTurn, Record, TurnUsage

IDLE: Final = "idle"
QUEUED: Final = "queued"
RUNNING: Final = "running"
REQUIRES_ACTION: Final = "requires_action"
SUSPENDED: Final = "suspended"
EXPIRED: Final = "expired"
FAILED: Final = "failed"
STATUSES: Final = (IDLE, QUEUED, RUNNING, REQUIRES_ACTION, SUSPENDED, EXPIRED, FAILED)

MAX_METADATA_PAIRS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Sums over all turns that ran, those rolled back included."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_creation: int = 0

    def plus(self, usage: TurnUsage) -> UsageTotals:
        return UsageTotals(
            input=self.input + usage.input_tokens,
            output=self.output + usage.output_tokens,
            cache_read=self.cache_read + usage.cached,
            cache_creation=self.cache_creation + (usage.computed or 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedKv:
    """A suspend gave up the KV of a history but for its first `kept_tokens`."""

    num_tokens: int
    kept_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """See the module docstring for the invariants."""

    id: str
    tenant: str
    model: str
    model_fingerprint: str
    settings: SessionSettings
    log_id: str
    created_at_ms: int
    updated_at_ms: int
    expires_at_ms: int
    status: str = IDLE
    revision: int = 0
    version: int = 0
    lineage: tuple[LogSpan, ...] = ()
    log_len: int = 0
    num_tokens: int = 0
    num_items: int = 0
    open_calls: tuple[OpenCall, ...] = ()
    partial_outputs: tuple[PartialOutput, ...] = ()
    suspended: SuspendedKv | None = None  # what its last suspend left of its KV
    current_turn: str | None = None
    last_turn: str | None = None
    usage: UsageTotals = field(default_factory=UsageTotals)
    leases: tuple[Lease, ...] = ()
    cost: TierCost = field(default_factory=TierCost)  # as of its last turn
    parent_session_id: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def open_call_ids(self) -> tuple[str, ...]:
        return tuple(call.call_id for call in self.open_calls)

    @property
    def num_records(self) -> int:
        """Records of the whole history, ancestors' included."""
        return sum(span.num_records for span in self.lineage) + self.log_len

    # -- turns

    def prepare_input(
        self,
        items: Sequence[Item],
        *,
        auto_close_calls: bool = False,
        allow_open_calls: bool = False,
        path: str = "input",
    ) -> tuple[Item, ...]:
        """Check new items against the open calls, before they are rendered.

        With `auto_close_calls`, calls left without an output get one that says `interrupted`, in
        front of the new items (results belong right behind their calls), with what they had put out
        so far. With `allow_open_calls`,
        outputs may come one by one, as long as nothing but outputs comes.

        Raises `UnknownCallId`, `UnresolvedToolCalls`.
        """
        return close_calls(
            self.open_calls,
            items,
            auto_close_calls=auto_close_calls,
            allow_open_calls=allow_open_calls,
            partial_outputs=self.partial_outputs,
            path=path,
        )

    def begin_turn(
        self, turn: PendingTurn, now_ms: int, *, expect_revision: int | None = None
    ) -> Session:
        """Claim the session for a turn; the revision stays.

        Raises `SessionExpired`, `TurnInProgress`, `RevisionConflict`, `UnknownCallId`,
        `UnresolvedToolCalls`.
        """
        self.check_ready(now_ms, expect_revision=expect_revision)
        if turn.base_revision != self.revision:
            raise ValueError(f"turn.base_revision: {turn.base_revision}, not {self.revision}")
        self.prepare_input(turn.input_items)
        return self.touched(now_ms, status=RUNNING, current_turn=turn.id)

    def commit_turn(self, record: Record, now_ms: int) -> Session:
        """End the current turn with its record in the history: revision + 1.

        A turn that was cancelled or stopped early commits like any other, whole items only.
        """
        if record.id != self.current_turn:
            raise ValueError(f"record.id: {record.id!r} is not the turn {self.current_turn!r}")
        for item in record.output_items:
            if isinstance(item, FunctionCall) and item.status != "completed":
                raise ValueError(f"output_items: call {item.call_id!r} is not complete")
        committed = self._with_record(record, now_ms)
        return replace(
            committed,
            current_turn=None,
            last_turn=record.id,
            error=None,
            usage=self.usage.plus(record.usage),
        )

    def end_turn(self, record: Record, now_ms: int) -> Session:
        """End the current turn (failed, or cancelled without its text); the history stays."""
        if record.id != self.current_turn:
            raise ValueError(f"record.id: {record.id!r} is not the turn {self.current_turn!r}")
        if record.committed:
            raise ValueError("record.committed: a committed turn ends with commit_turn")
        return self.touched(
            now_ms,
            status=rest_status(self.open_calls),
            current_turn=None,
            last_turn=record.id,
            usage=self.usage.plus(record.usage),
        )

    def append_items(
        self, record: Record, now_ms: int, *, expect_revision: int | None = None
    ) -> Session:
        """Append items without generating: revision + 1.

        Raises what `begin_turn` raises; outputs of open calls may come one by one.
        """
        self.check_ready(now_ms, expect_revision=expect_revision)
        self.prepare_input(record.input_items, allow_open_calls=True)
        return self._with_record(record, now_ms)

    def partial_output(self, call_id: str) -> str:
        """What an open call has put out so far. Raises `UnknownCallId`."""
        if call_id not in self.open_call_ids:
            raise UnknownCallId(call_id, param="call_id", open_call_ids=self.open_call_ids)
        texts = (p.text for p in self.partial_outputs if p.call_id == call_id)
        return next(texts, "")

    def with_partial_output(self, call_id: str, text: str, now_ms: int) -> Session:
        """Set what an open call has put out so far; the history stays. Raises `UnknownCallId`."""
        self.partial_output(call_id)
        others = tuple(p for p in self.partial_outputs if p.call_id != call_id)
        partial = PartialOutput(call_id=call_id, text=text)
        return self.touched(now_ms, partial_outputs=(*others, partial))

    def check_ready(self, now_ms: int, *, expect_revision: int | None = None) -> None:
        """Raise unless the history may grow now and is where the client expects it."""
        if now_ms >= self.expires_at_ms:
            raise SessionExpired(self.id)
        self.check_alive(now_ms)
        if self.current_turn is not None:
            raise TurnInProgress(self.current_turn)
        if expect_revision is not None and expect_revision != self.revision:
            raise RevisionConflict(expect_revision, self.revision)

    def check_alive(self, now_ms: int) -> None:
        """Raise `SessionExpired` once its time is over, whether or not a sweep has come by."""
        if self.status_at(now_ms) == EXPIRED:
            raise SessionExpired(self.id)

    def status_at(self, now_ms: int) -> str:
        """Return its status as of now; a running turn keeps it alive."""
        is_over = self.current_turn is None and now_ms >= self.expires_at_ms
        return EXPIRED if is_over else self.status

    # -- life

    def update(
        self,
        now_ms: int,
        *,
        settings: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str | None] | None = None,
    ) -> Session:
        """Change mutable settings and merge metadata (a None value removes its key).

        Raises `SettingError`; `TurnInProgress` for a setting that rewrites the head.
        """
        self.check_alive(now_ms)
        changes = dict(settings or {})
        if self.current_turn is not None and any(name in HEAD_SETTINGS for name in changes):
            raise TurnInProgress(self.current_turn)
        merged = {**self.metadata, **(metadata or {})}
        kept = {key: value for key, value in merged.items() if value is not None}
        validate_metadata(kept)
        return replace(self, settings=self.settings.changed(**changes), metadata=kept).touched(
            now_ms
        )

    def add_lease(self, lease: Lease, now_ms: int) -> Session:
        """Hold a lease; those past their deadline go. Raises `SessionExpired`."""
        self.check_alive(now_ms)
        touched = self.touched(now_ms)
        return replace(touched, leases=(*touched.leases, lease))

    def release_lease(self, lease_id: str) -> Session:
        """Let a lease go. Raises `LeaseNotFound`."""
        kept = tuple(lease for lease in self.leases if lease.id != lease_id)
        if len(kept) == len(self.leases):
            raise LeaseNotFound(lease_id)
        return replace(self, leases=kept)

    def suspend(self, now_ms: int) -> Session:
        """Mark its KV as given up; the next turn resumes it. Raises `TurnInProgress`."""
        self.check_ready(now_ms)
        given_up = SuspendedKv(num_tokens=self.num_tokens)
        return self.touched(now_ms, status=SUSPENDED, suspended=given_up)

    def resume(self, now_ms: int) -> Session:
        """Back from suspension; anything else stays as it is. Raises `SessionExpired`."""
        self.check_alive(now_ms)
        if self.status != SUSPENDED:
            return self
        return self.touched(now_ms, status=rest_status(self.open_calls))

    def fail(self, now_ms: int, *, code: str, message: str) -> Session:
        """Record a failure of the session itself; a later turn that commits clears it."""
        return self.touched(
            now_ms, status=FAILED, current_turn=None, error={"code": code, "message": message}
        )

    def expire(self, now_ms: int, *, retention_ms: int) -> Session:
        """Its time is over; `expires_at_ms` now says when it may be deleted."""
        if self.current_turn is not None:
            raise TurnInProgress(self.current_turn)
        return replace(
            self, status=EXPIRED, updated_at_ms=now_ms, expires_at_ms=now_ms + retention_ms
        )

    # -- the parts

    def _with_record(self, record: Record, now_ms: int) -> Session:
        if record.revision != self.revision + 1 or not record.committed:
            raise ValueError(f"record.revision: {record.revision} after {self.revision}")
        record.validate()
        open_calls = resolve_calls(self.open_calls, record.items)
        return self.touched(
            now_ms,
            status=rest_status(open_calls),
            revision=record.revision,
            log_len=self.log_len + 1,
            num_tokens=self.num_tokens + record.num_tokens,
            num_items=self.num_items + len(record.items),
            open_calls=open_calls,
            partial_outputs=still_open(self.partial_outputs, open_calls),
        )

    def touched(self, now_ms: int, **changes: Any) -> Session:
        """A copy with `changes`, used just now: its expiry and its leases' move."""
        expires_at_ms = now_ms + self.settings.expires_after_ms
        return replace(
            self,
            updated_at_ms=now_ms,
            expires_at_ms=expires_at_ms,
            leases=renewed(self.leases, now_ms),
            **changes,
        )

    @property
    def spans(self) -> tuple[LogSpan, ...]:
        """Where the records of its history are, in order."""
        if not self.log_len:
            return self.lineage
        return (*self.lineage, LogSpan(log_id=self.log_id, first=0, end=self.log_len))


def new_session(
    *,
    model: str,
    now_ms: int,
    tenant: str = "default",
    model_fingerprint: str = "",
    settings: SessionSettings | None = None,
    metadata: Mapping[str, str] | None = None,
    parent_session_id: str | None = None,
    records: Sequence[Record] = (),
) -> Session:
    """A session at revision 0 whose history starts with `records` (prelude, initial items).

    Raises `SettingError`, `UnknownCallId`.
    """
    chosen = settings or SessionSettings()
    chosen.validate()
    validate_metadata(metadata or {})
    for record in records:
        record.validate()
    items = [item for record in records for item in record.items]
    open_calls = resolve_calls((), items, path="initial_items")
    return Session(
        id=new_id("sess"),
        tenant=tenant,
        model=model,
        model_fingerprint=model_fingerprint,
        settings=chosen,
        log_id=new_id("log"),
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        expires_at_ms=now_ms + chosen.expires_after_ms,
        status=rest_status(open_calls),
        log_len=len(records),
        num_tokens=sum(record.num_tokens for record in records),
        num_items=len(items),
        open_calls=open_calls,
        parent_session_id=parent_session_id,
        metadata=dict(metadata or {}),
    )


def items_record(
    items: Sequence[Item],
    *,
    revision: int,
    token_ids: bytes = b"",
    item_token_ends: tuple[int, ...] = (),
    kind: str = ITEMS,
    model_fingerprint: str = "",
) -> Record:
    """A record of items without a generation."""
    return Record(
        id=new_id("batch"),
        kind=kind,
        revision=revision,
        input_items=tuple(items),
        input_token_ids=token_ids,
        item_token_ends=item_token_ends,
        model_fingerprint=model_fingerprint,
    )


def validate_metadata(metadata: Mapping[str, object]) -> None:
    """Raise `SettingError` unless it is at most 64 pairs of short strings."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise SettingError(
            f"metadata: {len(metadata)} pairs, at most {MAX_METADATA_PAIRS}", param="metadata"
        )
    for key, value in metadata.items():
        path = f"metadata.{key}"
        if not isinstance(value, str):
            raise SettingError(f"{path}: expected a string, got {value!r}", param=path)
        if not 1 <= len(key) <= 64 or len(value) > 512:
            raise SettingError(
                f"{path}: keys hold 1 to 64 characters, values up to 512", param=path
            )


def still_open(
    partial_outputs: Sequence[PartialOutput], open_calls: Sequence[OpenCall]
) -> tuple[PartialOutput, ...]:
    """The partial outputs whose calls are still open."""
    open_ids = {call.call_id for call in open_calls}
    return tuple(partial for partial in partial_outputs if partial.call_id in open_ids)


def rest_status(open_calls: Sequence[OpenCall]) -> str:
    """The status of a session without a turn."""
    return REQUIRES_ACTION if open_calls else IDLE
