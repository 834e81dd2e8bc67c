# SPDX-License-Identifier: Apache-2.0
"""The turn log: append-only records of items and exact token ids.

Does not know: how a record is stored, nor how items become tokens. The token history of a session
is the concatenation of its records' ids, verbatim: what was sampled is never tokenised again.

Invariants of a log:
  - records are appended, never changed; a log loses records only from its tail, and only those
    that no session refers to any more;
  - `revision` never decreases along a log;
  - `item_token_ends`, where known, has one entry per item (input, then output), never decreases,
    and its last entry is <= the record's token count. An item's end is the first token after it
    that the item alone would not have; the generation prompt lies behind the last input item.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from sessions import token_codec
from sessions.errors import ForkPointError, ItemNotFound, TurnNotFound
from sessions.ids import new_id
from sessions.items import Item

TURN: Final = "turn"  # a generation: input items and what the model made of them
ITEMS: Final = "items"  # items appended without generating
PRELUDE: Final = "prelude"  # the head of the history: instructions and tools as tokens
COMPACTION: Final = "compaction"  # starts a new history that stands for an older one
KINDS: Final = (TURN, ITEMS, PRELUDE, COMPACTION)

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
CANCELLED: Final = "cancelled"
FAILED: Final = "failed"
STATUSES: Final = (COMPLETED, INCOMPLETE, CANCELLED, FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnUsage:
    """Tokens of one turn. A tier's count is None where the engine did not say."""

    input_tokens: int = 0  # the whole prompt, history included
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    cached_l1: int | None = None
    cached_l2: int | None = None
    cached_l3: int | None = None
    computed: int | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens found in any tier."""
        return (self.cached_l1 or 0) + (self.cached_l2 or 0) + (self.cached_l3 or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimings:
    """Wall-clock milliseconds since the epoch, durations in milliseconds."""

    created_at_ms: int
    finished_at_ms: int = 0
    queued_ms: float | None = None
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A turn that was accepted and has not ended: enough to attach to it again after a crash.

    `input_items` and `input_token_ids` are not yet history; they become so with its commit.
    `ask`: the request as it came, while the turn waits for its begin; then it has no tokens yet.
    """

    id: str
    session_id: str
    base_revision: int
    input_items: tuple[Item, ...] = ()
    input_token_ids: bytes = b""
    item_token_ends: tuple[int, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    body_hash: str = ""
    created_at_ms: int = 0
    deadline_ms: int | None = None
    owner: str = ""  # who runs it, where several API processes share a store: a name that stays
    ask: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry of a turn log, or (not committed) a turn that ended without one."""

    id: str  # turn_... for a turn, batch_... otherwise; appending the same id twice is one append
    kind: str = TURN
    revision: int = 0  # of the session once this record is in
    input_items: tuple[Item, ...] = ()
    input_token_ids: bytes = b""
    output_items: tuple[Item, ...] = ()
    output_token_ids: bytes = b""
    item_token_ends: tuple[int, ...] = ()
    status: str = COMPLETED
    stop_reason: str | None = None  # end_turn | tool_use | stop_sequence
    incomplete_reason: str | None = None  # max_output_tokens | context_limit | deadline
    error: dict[str, Any] | None = None
    assistant_closed: bool = True  # the output ended with the model's end-of-turn token
    usage: TurnUsage = field(default_factory=TurnUsage)
    params: dict[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    body_hash: str = ""
    timings: TurnTimings | None = None
    model_fingerprint: str = ""
    page_hashes: bytes = b""  # 16 bytes for each page of the history that this record filled
    committed: bool = True

    @property
    def items(self) -> tuple[Item, ...]:
        """Input items, then output items."""
        return self.input_items + self.output_items

    @property
    def token_ids(self) -> bytes:
        """Its whole stretch of the history, int32 bytes."""
        return self.input_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        return token_codec.count(self.input_token_ids) + token_codec.count(self.output_token_ids)

    def validate(self) -> None:
        """Raise ValueError where an invariant of the module docstring does not hold."""
        ends = self.item_token_ends
        if ends and len(ends) != len(self.items):
            raise ValueError(f"item_token_ends: {len(ends)} entries for {len(self.items)} items")
        if any(later < earlier for earlier, later in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"item_token_ends: {ends} decreases")
        if ends and not 0 <= ends[0] <= ends[-1] <= self.num_tokens:
            raise ValueError(f"item_token_ends: {ends} leaves the {self.num_tokens} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSpan:
    """Records [first, end) of a log."""

    log_id: str
    first: int
    end: int

    @property
    def num_records(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A point in a history: after `num_records` whole records and, where set, `part`."""

    num_records: int
    part: Record | None = None  # the beginning of the next record, as a record of its own


@dataclass(frozen=True)
class TurnLog:
    """The records of one session in order, ancestors' first. A snapshot; never changes."""

    records: tuple[Record, ...] = ()

    @cached_property
    def token_ids(self) -> bytes:
        """The exact token history, int32 bytes."""
        return b"".join(record.token_ids for record in self.records)

    @property
    def num_tokens(self) -> int:
        return token_codec.count(self.token_ids)

    @property
    def items(self) -> tuple[Item, ...]:
        """The transcript."""
        return tuple(item for record in self.records for item in record.items)

    @property
    def page_hashes(self) -> bytes:
        """The manifest: 16 bytes for each full page of the history, in order, where known."""
        return b"".join(record.page_hashes for record in self.records)

    def new_page_hashes(self, page_hashes: bytes) -> bytes:
        """Of all hashes of a history that goes on from this one, those this log does not have.

        Empty where the engine's answer does not continue the manifest (another page size, a
        failed turn in between): a manifest never has a gap.
        """
        known = self.page_hashes
        return page_hashes[len(known) :] if page_hashes.startswith(known) else b""

    @property
    def is_closed(self) -> bool:
        """Whether the history ends where a new message may start."""
        for record in reversed(self.records):
            if record.num_tokens:
                return record.assistant_closed
        return True

    def extended(self, *records: Record) -> TurnLog:
        """This log and `records` behind it; joins no ids again that are joined already."""
        log = TurnLog(self.records + records)
        if "token_ids" in self.__dict__:
            added = b"".join(record.token_ids for record in records)
            log.__dict__["token_ids"] = self.token_ids + added
        return log

    def find(self, record_id: str) -> Record | None:
        """The record with this id, or None."""
        return next((r for r in reversed(self.records) if r.id == record_id), None)

    def cut(self, at: str | int, *, param: str = "at") -> Cut:
        """Resolve "head", a turn id, an item id or a revision to the point just after it.

        `param`: the field that `at` stands in, for the errors.

        Raises `TurnNotFound`, `ItemNotFound`, or `ForkPointError` for a point inside a record
        whose item boundaries are unknown.
        """
        if at == "head":
            return Cut(num_records=len(self.records))
        if isinstance(at, int):
            return self._cut_at_revision(at, param)
        for index in range(len(self.records) - 1, -1, -1):
            if self.records[index].id == at:
                return Cut(num_records=index + 1)
        if at.startswith("turn_"):
            raise TurnNotFound(at, param=param)
        return self._cut_at_item(at, param)

    def num_tokens_until(self, at: str | int, *, param: str = "at") -> int:
        """Length in tokens of the history up to `at`. Raises what `cut` raises."""
        cut = self.cut(at, param=param)
        whole = sum(record.num_tokens for record in self.records[: cut.num_records])
        return whole + (cut.part.num_tokens if cut.part is not None else 0)

    def _cut_at_revision(self, revision: int, param: str) -> Cut:
        num_records = sum(record.revision <= revision for record in self.records)
        if revision < 0 or (self.records and revision > self.records[-1].revision):
            raise ForkPointError(f"revision {revision} is not in this history", param=param)
        return Cut(num_records=num_records)

    def _cut_at_item(self, item_id: str, param: str) -> Cut:
        for index in range(len(self.records) - 1, -1, -1):
            record = self.records[index]
            for position, item in enumerate(record.items):
                if item.id == item_id:
                    return _cut_inside(record, index, position + 1, param)
        raise ItemNotFound(item_id, param=param)


def _cut_inside(record: Record, index: int, num_items: int, param: str) -> Cut:
    if num_items == len(record.items):
        return Cut(num_records=index + 1)
    if not record.item_token_ends:
        raise ForkPointError(
            f"item {record.items[num_items - 1].id!r} lies inside {record.id!r}, whose item "
            f"boundaries are unknown (allowed: {record.id!r} itself)",
            param=param,
        )
    return Cut(num_records=index, part=_head_of(record, num_items))


def _head_of(record: Record, num_items: int) -> Record:
    """The first `num_items` items of a record and exactly their tokens."""
    end = token_codec.TOKEN_BYTES * record.item_token_ends[num_items - 1]
    input_end = len(record.input_token_ids)
    num_input_items = len(record.input_items)
    return replace(
        record,
        id=new_id("batch"),
        kind=ITEMS,
        input_items=record.input_items[:num_items],
        output_items=record.output_items[: max(0, num_items - num_input_items)],
        input_token_ids=record.input_token_ids[:end],
        output_token_ids=record.output_token_ids[: max(0, end - input_end)],
        item_token_ends=record.item_token_ends[:num_items],
        # Cut between two output items, the assistant's message is still open.
        assistant_closed=num_items <= num_input_items,
        usage=TurnUsage(),
        idempotency_key=None,
        body_hash="",
        page_hashes=b"",
    )
