# SPDX-License-Identifier: Apache-2.0
"""How much of a session's history a turn reused, and why not all of it.

The promise: a turn finds every token that an earlier turn computed, which is all of the history
but the last token sampled (its KV is never needed by the turn that sampled it). Does not know:
the engine's protocol, stores, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.api import CacheHit
from sessions.session import Session, SuspendedKv
from sessions.turn_log import Record, TurnLog

REPORT = "report"  # key in Record.params under which a turn keeps what this module reads
EVICTED = "evicted"
SUSPENDED = "suspended"
PART_PAGE = "part_page"  # lower tiers keep whole pages; the last, partly filled one is in L1 alone
ENGINE_RESTARTED = "engine_restarted"
MODEL_CHANGED = "model_changed"
HEAD_CHANGED = "settings_changed"
COMPACTED = "compacted"
REASONING_DROPPED = "reasoning_dropped"


class StoredReport(msgspec.Struct, kw_only=True):
    """What may stand under REPORT; a turn of this process writes no other."""

    reusable: int = 0
    engine_instance: str = ""
    expected: int = 0
    miss: dict[str, Any] | None = None
    committed_tokens: int = 0
    grammar_fallback: list[dict[str, Any]] = []
    invalid_calls: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    rewritten: str = ""
    reasoning_dropped: bool = False


def report_problem(record: Record) -> str | None:
    """What is wrong with the report of a record from elsewhere, or None."""
    try:
        msgspec.convert(record.params.get(REPORT), StoredReport | None)
    except msgspec.ValidationError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the history says a turn should find, before it is submitted."""

    tokens: int = 0
    engine_instance: str = ""
    known_reason: str = ""  # set where the history was rewritten on purpose
    suspended: SuspendedKv | None = None  # what the last suspend of the session left
    page_size: int = 1


def expected_reuse(log: TurnLog) -> Expectation:
    """Return how many tokens of this history some turn has computed, and in which engine.

    Looked for from the end on: what a turn left behind covers all before it, so the last turn
    usually says it all, however long the history is.
    """
    tokens, instance, reason, rewritten = 0, "", "", ""
    total = log.num_tokens
    for record in reversed(log.records):
        report = record.params.get(REPORT) or {}
        reusable = min(int(report.get("reusable", 0)), total)
        if reusable and reusable >= tokens:
            tokens, instance = reusable, str(report.get("engine_instance", ""))
            reason = rewritten
        rewritten = rewritten or str(report.get("rewritten", ""))
        total -= record.num_tokens
        if total < tokens:
            return Expectation(tokens=tokens, engine_instance=instance, known_reason=reason)
    reason = reason if tokens else rewritten
    return Expectation(tokens=tokens, engine_instance=instance, known_reason=reason)


def of_session(expected: Expectation, session: Session, page_size: int) -> Expectation:
    """The same, with what else is known of the session."""
    return replace(expected, suspended=session.suspended, page_size=page_size)


def explain_miss(
    expected: Expectation,
    hit: CacheHit,
    engine_instance: str,
    records: Sequence[Record],
) -> dict[str, Any] | None:
    """Return the miss as the API shows it, or None where everything expected was found."""
    found = hit.l1 + hit.l2 + hit.l3
    if expected.known_reason:
        return {
            "reason": expected.known_reason,
            "first_diverging_item": first_item_after(records, found),
            "missed_tokens": hit.to_compute,
        }
    missed = expected.tokens - found
    if missed <= 0:
        return None
    return {
        "reason": _reason(expected, hit, engine_instance),
        "first_diverging_item": first_item_after(records, found),
        "missed_tokens": missed,
    }


def _reason(expected: Expectation, hit: CacheHit, engine_instance: str) -> str:
    """Why less was found than some turn has computed."""
    found, suspended = hit.l1 + hit.l2 + hit.l3, expected.suspended
    is_since = suspended is not None and expected.tokens <= suspended.num_tokens
    if is_since and suspended is not None and found >= suspended.kept_tokens:
        return SUSPENDED
    if expected.engine_instance and expected.engine_instance != engine_instance:
        return ENGINE_RESTARTED
    is_part = expected.tokens - found == expected.tokens % expected.page_size
    return PART_PAGE if is_part and hit.l2 + hit.l3 else EVICTED


def first_item_after(records: Sequence[Record], num_tokens: int) -> str | None:
    """Return the id of the first item that does not lie wholly in the first `num_tokens`."""
    start = 0
    for record in records:
        end = start + record.num_tokens
        if end > num_tokens and record.items:
            for item, item_end in zip(record.items, record.item_token_ends, strict=False):
                if start + item_end > num_tokens:
                    return item.id
            return record.items[-1].id if record.item_token_ends else record.items[0].id
        start = end
    return None
