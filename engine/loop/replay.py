# SPDX-License-Identifier: Apache-2.0
"""Records every input of the control plane and replays it: same inputs, bit-identical plans.

    python -m engine.loop.replay LOG     exit 0: every plan was the recorded one; 1: the first that
                                         was not is printed

Does not know: tensors, the loop, sessions. A log is JSON lines, one per call; token ids are
base64 of little-endian int32; each plan and each list of ended requests is kept as a digest.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from _scheduler import (
    Abort,
    Ended,
    LeaseGrant,
    MoveResult,
    Plan,
    ProbeDone,
    RemotePrefill,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    SendDone,
    StepDone,
    TransferAck,
)
from engine.loop.log_file import Sink

if TYPE_CHECKING:
    from _scheduler import Event  # a name of the stub alone

CONFIG_FIELDS = (
    "page_size",
    "num_pages",
    "max_slots",
    "max_context_len",
    "token_budget",
    "lone_token_budget",
    "model_fingerprint",
    "ageing_ms",
    "suffix_us_per_token",
    "spare_percent",
    "eviction",
    "attention_len",
    "lease_percent",
    "tenant_lease_percent",
    "num_l2_pages",
    "use_l3",
    "num_l3_pages",
    "probe_l3",
    "l3_wait_ms",
    "overlap_loads",
    "max_preemptions",
)
PLAN_ARRAYS = (
    "row_request_ids",
    "row_slots",
    "row_starts",
    "row_lens",
    "row_samples",
    "row_loads",
    "input_ids",
    "slot_mapping",
    "page_deltas",
    "page_copies",
    "moves",
    "move_hashes",
    "probe_ids",
    "probe_indptr",
    "probe_hashes",
)


class Configured(msgspec.Struct, tag="config"):
    values: dict[str, int | str | bool]


class SpecRecord(msgspec.Struct):
    request_id: int
    token_ids: bytes
    max_new_tokens: int
    priority: int
    tenant: str
    salt: str
    expected_return: float
    num_draft_tokens: int = 0
    remote_prefill: bool = False
    l3_wait_ms: int = -1
    send_kv: bool = False


class Submitted(msgspec.Struct, tag="submit"):
    specs: list[SpecRecord]


class Planned(msgspec.Struct, tag="next_plan"):
    now_ms: int
    digest: str


class StepRecord(msgspec.Struct, tag="step_done"):
    step_id: int
    num_columns: int
    num_accepted: bytes
    token_ids: bytes
    finished: bytes
    failed: bytes


class AbortRecord(msgspec.Struct, tag="abort"):
    request_id: int


class AckRecord(msgspec.Struct, tag="transfer_ack"):
    ticket: int
    ok: bool


class RemoteRecord(msgspec.Struct, tag="remote_prefill"):
    request_id: int
    ok: bool


class ProbeRecord(msgspec.Struct, tag="probe_done"):
    probe_id: int
    num_pages: int


class SendRecord(msgspec.Struct, tag="send_done"):
    request_id: int
    ok: bool


EventRecord = StepRecord | AbortRecord | AckRecord | RemoteRecord | ProbeRecord | SendRecord


class Advanced(msgspec.Struct, tag="advance"):
    events: list[EventRecord]
    digest: str


class Dropped(msgspec.Struct, tag="drop_prefix"):
    token_ids: bytes
    keep_tokens: int
    salt: str


class Hinted(msgspec.Struct, tag="hint_prefix"):
    token_ids: bytes
    expected_return: float
    salt: str
    l1_until_ms: int = 0
    l2_until_ms: int = 0
    l3_until_ms: int = 0


class Drafted(msgspec.Struct, tag="set_num_draft_tokens"):
    request_id: int
    num_draft_tokens: int


class Costs(msgspec.Struct, tag="set_costs"):
    l2_us_per_page: float
    l3_us_per_page: float
    prefill_us_per_token: float


class Leased(msgspec.Struct, tag="lease"):
    lease_id: int
    token_ids: bytes
    until_ms: int
    tenant: str
    salt: str
    tier: str
    digest: str


class Released(msgspec.Struct, tag="release"):
    lease_id: int


class Moved(msgspec.Struct, tag="move"):
    token_ids: bytes
    tier: str
    salt: str
    digest: str


class Adopted(msgspec.Struct, tag="adopt"):
    tier: str
    token_ids: bytes
    page_hashes: bytes
    pages: bytes
    salt: str
    before: bytes = b""
    start: int = 0


class LostInStore(msgspec.Struct, tag="lose_l3"):
    page_hashes: bytes


Record = (
    Configured
    | Submitted
    | Planned
    | Advanced
    | Dropped
    | Hinted
    | Leased
    | Released
    | Moved
    | Adopted
    | LostInStore
    | Costs
    | Drafted
)


def digest_plan(plan: Plan) -> str:
    """A name for all that a plan says."""
    sha = hashlib.sha256(str(plan.step_id).encode())
    for name in PLAN_ARRAYS:
        array = getattr(plan, name)
        sha.update(f"{name}{array.shape}".encode() + array.tobytes())
    for a in plan.admissions:
        cached = (a.cached_l1, a.cached_l2, a.cached_l3)
        sha.update(
            repr((a.request_id, a.slot, a.prompt_len, cached, a.readmitted, a.remote)).encode()
        )
    sha.update(repr(plan.retracted).encode())
    return sha.hexdigest()


def digest_ended(ended: Sequence[Ended]) -> str:
    """A name for the requests that ended and how."""
    sha = hashlib.sha256()
    for e in ended:
        sha.update(repr((e.request_id, e.status, e.message, e.num_cached_tokens)).encode())
        sha.update(e.page_hashes)
    return sha.hexdigest()


def digest_move(result: MoveResult) -> str:
    """What a move said."""
    numbers = (result.tokens_there, result.tokens_pending, result.tokens_missing, result.num_pages)
    return "/".join(map(str, numbers))


def digest_grant(grant: LeaseGrant) -> str:
    """What the answer to a lease said."""
    return f"{grant.state}/{grant.tokens_granted}/{grant.reason}"


def as_ids(token_ids: bytes) -> NDArray[np.int32]:
    return np.frombuffer(token_ids, "<i4").astype(np.int32, copy=False)


def record_event(event: Event) -> EventRecord:
    if isinstance(event, Abort):
        return AbortRecord(event.request_id)
    if isinstance(event, TransferAck):
        return AckRecord(event.ticket, event.ok)
    if isinstance(event, RemotePrefill):
        return RemoteRecord(event.request_id, event.ok)
    if isinstance(event, ProbeDone):
        return ProbeRecord(event.probe_id, event.num_pages)
    if isinstance(event, SendDone):
        return SendRecord(event.request_id, event.ok)
    return StepRecord(
        step_id=event.step_id,
        num_columns=event.token_ids.shape[1],
        num_accepted=event.num_accepted.tobytes(),
        token_ids=event.token_ids.tobytes(),
        finished=event.finished.tobytes(),
        failed=event.failed.tobytes(),
    )


def event_of(record: EventRecord) -> Event:
    if isinstance(record, AbortRecord):
        return Abort(request_id=record.request_id)
    if isinstance(record, AckRecord):
        return TransferAck(ticket=record.ticket, ok=record.ok)
    if isinstance(record, RemoteRecord):
        return RemotePrefill(request_id=record.request_id, ok=record.ok)
    if isinstance(record, ProbeRecord):
        return ProbeDone(probe_id=record.probe_id, num_pages=record.num_pages)
    if isinstance(record, SendRecord):
        return SendDone(request_id=record.request_id, ok=record.ok)
    num_accepted = as_ids(record.num_accepted)
    return StepDone(
        step_id=record.step_id,
        num_accepted=num_accepted,
        token_ids=as_ids(record.token_ids).reshape(len(num_accepted), record.num_columns),
        finished=np.frombuffer(record.finished, np.uint8),
        failed=np.frombuffer(record.failed, np.uint8),
    )


class RecordingScheduler(Scheduler):
    """A scheduler that writes down each call that may change it, after the call succeeded."""

    def __init__(self, config: SchedulerConfig, log: Sink) -> None:
        super().__init__(config)
        self._log = log
        self._encoder = msgspec.json.Encoder()
        self._write(Configured({name: getattr(config, name) for name in CONFIG_FIELDS}))

    def _write(self, record: Record) -> None:
        self._log.write(self._encoder.encode(record) + b"\n")

    def submit(self, specs: Sequence[RequestSpec]) -> None:
        super().submit(specs)
        records = [
            SpecRecord(
                request_id=spec.request_id,
                token_ids=spec.token_ids.tobytes(),
                max_new_tokens=spec.max_new_tokens,
                priority=spec.priority,
                tenant=spec.tenant,
                salt=spec.salt,
                expected_return=spec.expected_return,
                num_draft_tokens=spec.num_draft_tokens,
                remote_prefill=spec.remote_prefill,
                l3_wait_ms=spec.l3_wait_ms,
                send_kv=spec.send_kv,
            )
            for spec in specs
        ]
        self._write(Submitted(records))

    def next_plan(self, now_ms: int) -> Plan:
        plan = super().next_plan(now_ms)
        self._write(Planned(now_ms, digest_plan(plan)))
        return plan

    def advance(self, events: Sequence[Event]) -> list[Ended]:
        ended = super().advance(events)
        self._write(Advanced([record_event(event) for event in events], digest_ended(ended)))
        return ended

    def drop_prefix(
        self, token_ids: NDArray[np.int32], keep_tokens: int = 0, salt: str = ""
    ) -> int:
        freed = super().drop_prefix(token_ids, keep_tokens, salt)
        self._write(Dropped(token_ids.tobytes(), keep_tokens, salt))
        return freed

    def hint_prefix(
        self,
        token_ids: NDArray[np.int32],
        expected_return: float,
        salt: str = "",
        *,
        l1_until_ms: int = 0,
        l2_until_ms: int = 0,
        l3_until_ms: int = 0,
    ) -> int:
        until = (l1_until_ms, l2_until_ms, l3_until_ms)
        found = super().hint_prefix(
            token_ids,
            expected_return,
            salt,
            l1_until_ms=l1_until_ms,
            l2_until_ms=l2_until_ms,
            l3_until_ms=l3_until_ms,
        )
        self._write(Hinted(token_ids.tobytes(), expected_return, salt, *until))
        return found

    def set_costs(
        self,
        *,
        l2_us_per_page: float = 0.0,
        l3_us_per_page: float = 0.0,
        prefill_us_per_token: float = 0.0,
    ) -> None:
        record = Costs(l2_us_per_page, l3_us_per_page, prefill_us_per_token)
        super().set_costs(
            l2_us_per_page=l2_us_per_page,
            l3_us_per_page=l3_us_per_page,
            prefill_us_per_token=prefill_us_per_token,
        )
        self._write(record)

    def set_num_draft_tokens(self, request_id: int, num_draft_tokens: int) -> None:
        super().set_num_draft_tokens(request_id, num_draft_tokens)
        self._write(Drafted(request_id, num_draft_tokens))

    def move(self, token_ids: NDArray[np.int32], tier: str, salt: str = "") -> MoveResult:
        result = super().move(token_ids, tier, salt)
        self._write(Moved(token_ids.tobytes(), tier, salt, digest_move(result)))
        return result

    def adopt(
        self,
        tier: str,
        token_ids: NDArray[np.int32],
        page_hashes: bytes,
        pages: NDArray[np.int32],
        salt: str = "",
        *,
        before: bytes = b"",
        start: int = 0,
    ) -> int:
        num_pages = super().adopt(
            tier, token_ids, page_hashes, pages, salt, before=before, start=start
        )
        ids = (token_ids.tobytes(), page_hashes, pages.tobytes())
        self._write(Adopted(tier, *ids, salt, before, start))
        return num_pages

    def lose_l3(self, page_hashes: bytes) -> int:
        num_lost = super().lose_l3(page_hashes)
        self._write(LostInStore(page_hashes))
        return num_lost

    def lease(
        self,
        *,
        lease_id: int,
        token_ids: NDArray[np.int32],
        until_ms: int,
        tenant: str = "default",
        salt: str = "",
        tier: str = "l1",
    ) -> LeaseGrant:
        grant = super().lease(
            lease_id=lease_id,
            token_ids=token_ids,
            until_ms=until_ms,
            tenant=tenant,
            salt=salt,
            tier=tier,
        )
        digest = digest_grant(grant)
        self._write(Leased(lease_id, token_ids.tobytes(), until_ms, tenant, salt, tier, digest))
        return grant

    def release(self, lease_id: int) -> bool:
        released = super().release(lease_id)
        self._write(Released(lease_id))
        return released


def apply(scheduler: Scheduler, record: Record) -> str:
    """Make one recorded call; returns the digest of its result, "" where it has none."""
    match record:
        case Submitted(specs):
            scheduler.submit([spec_of(spec) for spec in specs])
        case Planned(now_ms):
            return digest_plan(scheduler.next_plan(now_ms))
        case Advanced(events):
            return digest_ended(scheduler.advance([event_of(event) for event in events]))
        case Dropped(token_ids, keep_tokens, salt):
            scheduler.drop_prefix(as_ids(token_ids), keep_tokens, salt)
        case Hinted():
            scheduler.hint_prefix(
                as_ids(record.token_ids),
                record.expected_return,
                record.salt,
                l1_until_ms=record.l1_until_ms,
                l2_until_ms=record.l2_until_ms,
                l3_until_ms=record.l3_until_ms,
            )
        case Costs():
            scheduler.set_costs(
                l2_us_per_page=record.l2_us_per_page,
                l3_us_per_page=record.l3_us_per_page,
                prefill_us_per_token=record.prefill_us_per_token,
            )
        case Drafted(request_id, num_draft_tokens):
            scheduler.set_num_draft_tokens(request_id, num_draft_tokens)
        case Leased():
            grant = scheduler.lease(
                lease_id=record.lease_id,
                token_ids=as_ids(record.token_ids),
                until_ms=record.until_ms,
                tenant=record.tenant,
                salt=record.salt,
                tier=record.tier,
            )
            return digest_grant(grant)
        case Moved(token_ids, tier, salt):
            return digest_move(scheduler.move(as_ids(token_ids), tier, salt))
        case Adopted():
            scheduler.adopt(
                record.tier,
                as_ids(record.token_ids),
                record.page_hashes,
                as_ids(record.pages),
                record.salt,
                before=record.before,
                start=record.start,
            )
        case LostInStore(page_hashes):
            scheduler.lose_l3(page_hashes)
        case Released(lease_id):
            scheduler.release(lease_id)
        case Configured():
            raise ValueError("log: a second configuration; one log holds one scheduler")
    return ""


def spec_of(record: SpecRecord) -> RequestSpec:
    return RequestSpec(
        request_id=record.request_id,
        token_ids=as_ids(record.token_ids),
        max_new_tokens=record.max_new_tokens,
        priority=record.priority,
        tenant=record.tenant,
        salt=record.salt,
        expected_return=record.expected_return,
        num_draft_tokens=record.num_draft_tokens,
        remote_prefill=record.remote_prefill,
        l3_wait_ms=record.l3_wait_ms,
        send_kv=record.send_kv,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """`first_difference`: line number (from 1) of the first call with another result, or 0."""

    num_calls: int
    num_plans: int
    first_difference: int


def read_log(lines: Iterable[bytes]) -> list[Record]:
    """Decode a log. Raises: ValueError naming the line that is no record."""
    decoder = msgspec.json.Decoder(Record)
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ValueError(f"log line {number}: {error}") from error
    if not records or not isinstance(records[0], Configured):
        raise ValueError("log line 1: a log begins with its configuration")
    return records


def replay(records: Sequence[Record]) -> ReplayReport:
    """Make the recorded calls on a new scheduler, up to the first result that differs."""
    first = records[0]
    assert isinstance(first, Configured)
    scheduler = Scheduler(SchedulerConfig(**first.values))  # type: ignore[arg-type]
    num_plans = 0
    for number, record in enumerate(records[1:], start=2):
        num_plans += isinstance(record, Planned)
        if apply(scheduler, record) != getattr(record, "digest", ""):
            return ReplayReport(num_calls=number - 1, num_plans=num_plans, first_difference=number)
    return ReplayReport(num_calls=len(records) - 1, num_plans=num_plans, first_difference=0)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m engine.loop.replay LOG", file=sys.stderr)
        return 2
    try:
        with Path(arguments[0]).open("rb") as log:
            report = replay(read_log(log))
    except (OSError, ValueError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    if report.first_difference:
        print(f"line {report.first_difference}: the result differs from the recorded one")
        return 1
    print(f"{report.num_calls} calls, {report.num_plans} plans: bit-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
