# SPDX-License-Identifier: Apache-2.0
"""Turns with made-up tokens, driven through a session and a store as the appliance does."""

from __future__ import annotations

from sessions.ids import new_id
from sessions.items import FunctionCall, Item, Message, OutputText, parse_items
from sessions.session import Session, new_session
from sessions.store import SessionStore
from sessions.token_codec import encode_ids
from sessions.turn_log import PRELUDE, PendingTurn, Record, TurnTimings, TurnUsage

NOW_MS = 1_800_000_000_000


def prelude(num_tokens: int = 5) -> Record:
    """What instructions and tools render to."""
    return Record(
        id=new_id("batch"),
        kind=PRELUDE,
        input_token_ids=encode_ids(range(100, 100 + num_tokens)),
    )


def fresh_session(**fields: object) -> tuple[Session, tuple[Record, ...]]:
    """A session with a prelude, and the records to create it with."""
    records = (prelude(),)
    session = new_session(model="m", now_ms=NOW_MS, records=records, **fields)  # type: ignore[arg-type]
    return session, records


def pending(
    session: Session,
    items: tuple[Item, ...] | None = None,
    *,
    key: str | None = None,
    body_hash: str = "h",
    turn_id: str | None = None,
) -> PendingTurn:
    """A turn of one user message (or `items`): three tokens an item and two to open the answer."""
    chosen = parse_items("hello") if items is None else items
    ends = tuple(3 * (index + 1) for index in range(len(chosen)))
    return PendingTurn(
        id=turn_id or new_id("turn"),
        session_id=session.id,
        base_revision=session.revision,
        input_items=chosen,
        input_token_ids=encode_ids(range(10_000, 10_000 + 3 * len(chosen) + 2)),
        item_token_ends=ends,
        idempotency_key=key,
        body_hash=body_hash,
        created_at_ms=NOW_MS,
    )


def outcome(
    turn: PendingTurn,
    *,
    call_ids: tuple[str, ...] = (),
    token_ids: tuple[int, ...] = (7, 8, 9),
    status: str = "completed",
    committed: bool = True,
) -> Record:
    """The record of that turn: some text, then the calls; one token each and one to end."""
    text = Message(id=new_id("item"), role="assistant", content=(OutputText(text="ok"),))
    calls = tuple(
        FunctionCall(id=new_id("item"), call_id=call_id, name="run", arguments='{"b":1, "a":2}')
        for call_id in call_ids
    )
    output_items: tuple[Item, ...] = (text, *calls) if committed else ()
    start = len(turn.input_token_ids) // 4
    ends = turn.item_token_ends + tuple(start + 1 + i for i in range(len(output_items)))
    ids = token_ids + tuple(range(20_000, 20_000 + len(calls)))
    return Record(
        id=turn.id,
        revision=turn.base_revision + (1 if committed else 0),
        input_items=turn.input_items,
        input_token_ids=turn.input_token_ids,
        output_items=output_items,
        output_token_ids=encode_ids(ids) if committed else b"",
        item_token_ends=ends,
        status=status,
        stop_reason="tool_use" if call_ids else "end_turn",
        usage=TurnUsage(input_tokens=start, output_tokens=len(ids), cached_l1=0, computed=start),
        idempotency_key=turn.idempotency_key,
        body_hash=turn.body_hash,
        timings=TurnTimings(created_at_ms=NOW_MS, finished_at_ms=NOW_MS + 50, ttft_ms=1.5),
        committed=committed,
    )


async def run_turn(
    store: SessionStore,
    session: Session,
    items: tuple[Item, ...] | None = None,
    *,
    call_ids: tuple[str, ...] = (),
    token_ids: tuple[int, ...] = (7, 8, 9),
    now_ms: int = NOW_MS,
) -> tuple[Session, Record]:
    """Begin a turn and commit it."""
    turn = pending(session, items)
    claim = await store.begin_turn(session.begin_turn(turn, now_ms), turn)
    record = outcome(turn, call_ids=call_ids, token_ids=token_ids)
    committed = claim.session.commit_turn(record, now_ms)
    return await store.commit_turn(committed, record), record
