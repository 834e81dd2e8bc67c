# SPDX-License-Identifier: Apache-2.0
"""Moves between histories: fork, rollback, and a new history in place of an old one.

Does not know: stores (they get the session and the records its new log starts with), rendering.
Nothing is copied: a history is spans of logs, so a child or a rolled-back session refers to the
records it keeps. Only a cut inside a record makes a new record, of that record's first part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sessions.calls import open_calls_of
from sessions.errors import SettingError
from sessions.ids import new_id
from sessions.leases import clipped
from sessions.residency import TierCost
from sessions.session import Session, UsageTotals, rest_status, still_open, validate_metadata
from sessions.turn_log import TURN, Cut, LogSpan, Record, TurnLog

MAX_FORKS: Final = 32


def fork(
    session: Session,
    log: TurnLog,
    at: str | int,
    now_ms: int,
    *,
    n: int = 1,
    metadata: Mapping[str, str] | None = None,
) -> tuple[tuple[Session, tuple[Record, ...]], ...]:
    """Children that share this history up to `at`, each with the records it stores itself.

    Those records are none, or one: the head of a record that `at` cuts through. A running turn is
    not part of the history. Raises what `TurnLog.cut` raises, `SettingError`, `SessionExpired`.
    """
    if not 1 <= n <= MAX_FORKS:
        raise SettingError(f"n: expected 1 to {MAX_FORKS}, got {n}", param="n")
    session.check_alive(now_ms)
    merged = {**session.metadata, **(metadata or {})}
    validate_metadata(merged)
    cut = log.cut(at)
    return tuple(_child(session, log, cut, now_ms, merged) for _ in range(n))


def rollback(
    session: Session, log: TurnLog, to: str | int, now_ms: int
) -> tuple[Session, tuple[Record, ...]]:
    """Cut the history back to just after `to`: revision + 1, the rest is released.

    Returns the session and the records of its new log. Raises what `TurnLog.cut` and
    `Session.check_ready` raise.
    """
    session.check_ready(now_ms)
    cut = log.cut(to, param="to")
    own = () if cut.part is None else (cut.part,)
    return _moved(session, log, cut.num_records, own, now_ms)


def replace_history(
    session: Session,
    log: TurnLog,
    records: Sequence[Record],
    now_ms: int,
    *,
    keep_records: int = 0,
    model_fingerprint: str | None = None,
) -> tuple[Session, tuple[Record, ...]]:
    """Put `records` in place of all but the first `keep_records`: revision + 1.

    For compaction, for changed instructions or tools, and after the model changed. What is kept
    stays byte-identical. Returns the session and the records of its new log.
    """
    session.check_ready(now_ms)
    moved, own = _moved(session, log, keep_records, tuple(records), now_ms)
    if model_fingerprint is not None:
        moved = replace(moved, model_fingerprint=model_fingerprint)
    return moved, own


def retokenised(
    session: Session, log: TurnLog, records: Sequence[Record], now_ms: int, *, keep_records: int
) -> tuple[Session, tuple[Record, ...]]:
    """The same items in other tokens from record `keep_records` on: the revision stays.

    Returns the session and the records of its new log.
    """
    session.check_ready(now_ms)
    moved = on_history(session, log.records[:keep_records], tuple(records), now_ms)
    return replace(moved, revision=session.revision), tuple(records)


def cut_spans(spans: Iterable[LogSpan], num_records: int) -> tuple[LogSpan, ...]:
    """The spans of the first `num_records` records. Raises ValueError if they hold fewer."""
    kept: list[LogSpan] = []
    for span in spans:
        if num_records <= 0:
            break
        length = min(span.num_records, num_records)
        kept.append(replace(span, end=span.first + length))
        num_records -= length
    if num_records > 0:
        raise ValueError(f"num_records: {num_records} more than the spans hold")
    return tuple(kept)


def _moved(
    session: Session, log: TurnLog, keep_records: int, own: tuple[Record, ...], now_ms: int
) -> tuple[Session, tuple[Record, ...]]:
    revision = session.revision + 1
    own = tuple(replace(record, revision=revision) for record in own)
    moved = on_history(session, log.records[:keep_records], own, now_ms)
    return replace(moved, revision=revision), own


def on_history(
    session: Session, kept: tuple[Record, ...], own: tuple[Record, ...], now_ms: int
) -> Session:
    """The session on a new log that starts with `own`, behind the records it `kept`."""
    history = kept + own
    for record in own:
        record.validate()
    items = [item for record in history for item in record.items]
    turns = [record.id for record in history if record.kind == TURN]
    open_calls = open_calls_of(items)
    num_tokens = sum(record.num_tokens for record in history)
    moved = session.touched(
        now_ms,
        status=rest_status(open_calls),
        log_id=new_id("log"),
        lineage=cut_spans(session.spans, len(kept)),
        log_len=len(own),
        num_tokens=num_tokens,
        num_items=len(items),
        open_calls=open_calls,
        partial_outputs=still_open(session.partial_outputs, open_calls),
        last_turn=turns[-1] if turns else None,
    )
    return replace(moved, leases=clipped(moved.leases, num_tokens))


def _child(
    session: Session, log: TurnLog, cut: Cut, now_ms: int, metadata: dict[str, str]
) -> tuple[Session, tuple[Record, ...]]:
    own = () if cut.part is None else (replace(cut.part, id=new_id("batch")),)
    kept = log.records[: cut.num_records]
    history = kept + own
    child = replace(
        on_history(session, kept, own, now_ms),
        id=new_id("sess"),
        parent_session_id=session.id,
        created_at_ms=now_ms,
        revision=history[-1].revision if history else 0,
        version=0,
        usage=UsageTotals(),
        cost=TierCost(),
        leases=(),
        partial_outputs=(),
        current_turn=None,
        error=None,
        metadata=dict(metadata),
    )
    return child, own
