# SPDX-License-Identifier: Apache-2.0
"""Where a history may be cut so that its older part can be replaced by something shorter.

What is kept stays byte-identical: whole records, or the answer of one from its generation prompt
on. A kept tool output always has its call in front of it. Does not know: rendering, summaries,
stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sessions.calls import OpenCall
from sessions.items import Compaction, FunctionCall, FunctionCallOutput, Item, Message, Reasoning
from sessions.token_codec import TOKEN_BYTES
from sessions.turn_log import ITEMS, PRELUDE, TURN, Record, TurnLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A history in two: the `head` stays (the prelude), what is replaced goes, the rest is kept.

    num_records: records of the log up to the cut, the one it goes through included.
    answer: what is kept of that one; its front is the last of the replaced records.
    """

    head: tuple[Record, ...]
    replaced: tuple[Record, ...]
    kept: tuple[Record, ...]
    num_records: int
    answer: Record | None = None

    @property
    def replaced_log(self) -> TurnLog:
        """The history up to the cut, head included."""
        return TurnLog(self.head + self.replaced)

    @property
    def num_replaced_items(self) -> int:
        return sum(len(record.items) for record in self.replaced)

    @property
    def num_kept_tokens(self) -> int:
        return sum(record.num_tokens for record in self.kept)

    @property
    def num_kept_turns(self) -> int:
        return sum(record.kind == TURN for record in self.kept)

    def moved_to(self, before: TurnLog, now: TurnLog) -> Split | None:
        """The same split of a history that has grown since; None where it has changed."""
        ids = [record.id for record in before.records[: self.num_records]]
        if [record.id for record in now.records[: self.num_records]] != ids:
            return None
        rest = now.records[self.num_records :]
        return replace(self, kept=rest if self.answer is None else (self.answer, *rest))


def split_history(
    log: TurnLog, open_calls: Sequence[OpenCall], *, keep_last_turns: int
) -> Split | None:
    """Cut a history in front of its last turns, or earlier where a kept output needs its call.

    None where nothing lies before the cut that could be replaced.
    """
    records = log.records
    num_head = 1 if records and records[0].kind == PRELUDE else 0
    start = _start_of_last(records, num_head, keep_last_turns)
    split = _with_calls(records, num_head, start, open_calls)
    gone = [item for record in split.replaced for item in record.items]
    return split if any(not isinstance(item, Compaction) for item in gone) else None


def split_to_fit(
    log: TurnLog, open_calls: Sequence[OpenCall], *, max_kept_tokens: int
) -> Split | None:
    """The split that keeps as many last turns as fit into so many tokens; none may fit."""
    num_turns = sum(record.kind == TURN for record in log.records)
    best = split_history(log, open_calls, keep_last_turns=0)
    for keep in range(1, num_turns + 1):
        split = split_history(log, open_calls, keep_last_turns=keep)
        if split is None or split.num_kept_tokens > max_kept_tokens:
            break
        best = split
    return best


def _start_of_last(records: Sequence[Record], num_head: int, keep: int) -> int:
    """Index of the first record of the last turns; what was appended for them comes along."""
    turns = [i for i in range(num_head, len(records)) if records[i].kind == TURN]
    if not turns:
        return num_head
    if keep == 0:
        return turns[-1] + 1
    start = turns[-keep] if keep <= len(turns) else num_head
    while start > num_head and _is_input(records[start - 1]):
        start -= 1
    return start


def _is_input(record: Record) -> bool:
    spoken = Reasoning | FunctionCall | Compaction
    return record.kind == ITEMS and not any(
        isinstance(item, spoken) or (isinstance(item, Message) and item.role == "assistant")
        for item in record.items
    )


def _with_calls(
    records: Sequence[Record], num_head: int, start: int, open_calls: Sequence[OpenCall]
) -> Split:
    """Move the cut back until every kept output, and every open call, has its call kept."""
    front: Record | None = None  # of the record that the cut goes through
    answer: Record | None = None
    while True:
        kept = tuple(records[start:]) if answer is None else (answer, *records[start:])
        end = start if answer is None else start - 1
        at = _record_of(records[:end], _missing_calls(kept, open_calls), num_head)
        if at is None:
            gone = tuple(records[num_head:end])
            return Split(
                head=tuple(records[:num_head]),
                replaced=gone if front is None else (*gone, front),
                kept=kept,
                num_records=start,
                answer=answer,
            )
        cut = _cut_before_answer(records[at])
        start = at if cut is None else at + 1
        front, answer = (None, None) if cut is None else cut


def _missing_calls(kept: Iterable[Record], open_calls: Sequence[OpenCall]) -> set[str]:
    known: set[str] = set()
    missing: set[str] = set()
    for record in kept:
        for item in record.items:
            if isinstance(item, FunctionCall):
                known.add(item.call_id)
            elif isinstance(item, FunctionCallOutput) and item.call_id not in known:
                missing.add(item.call_id)
    return missing | ({call.call_id for call in open_calls} - known)


def _record_of(records: Sequence[Record], call_ids: set[str], first: int) -> int | None:
    """The first of these records that makes one of the calls; None where none does."""
    for index in range(first, len(records)):
        calls = (item for item in records[index].items if isinstance(item, FunctionCall))
        if any(call.call_id in call_ids for call in calls):
            return index
    return None


def _cut_before_answer(record: Record) -> tuple[Record, Record] | None:
    """A turn as (its input, its answer with the generation prompt); None where it has no seam."""
    inputs: tuple[Item, ...] = record.input_items
    if record.kind != TURN or any(isinstance(item, FunctionCall) for item in inputs):
        return None
    if inputs and len(record.item_token_ends) != len(record.items):
        return None
    end = record.item_token_ends[len(inputs) - 1] if inputs else 0
    at = TOKEN_BYTES * end
    front = replace(
        record,
        kind=ITEMS,
        input_token_ids=record.input_token_ids[:at],
        output_items=(),
        output_token_ids=b"",
        item_token_ends=record.item_token_ends[: len(inputs)],
        assistant_closed=True,
        idempotency_key=None,
        page_hashes=b"",
    )
    answer = replace(
        record,
        input_items=(),
        input_token_ids=record.input_token_ids[at:],
        item_token_ends=tuple(e - end for e in record.item_token_ends[len(inputs) :]),
    )
    return front, answer
