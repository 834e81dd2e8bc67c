# SPDX-License-Identifier: Apache-2.0
"""What a turn leaves behind: its record, made from the run when it has ended.

Does not know: stores, events, how the run came to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance import cache_report, turn_view
from appliance.answer import KeptTokens
from appliance.errors import ApiError, error_object
from engine import api
from sessions.items import Item
from sessions.token_codec import count
from sessions.turn_log import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INCOMPLETE,
    PendingTurn,
    Record,
    TurnLog,
    TurnTimings,
    TurnUsage,
)

if TYPE_CHECKING:
    from appliance.turn_run import TurnRun

DEADLINE = "deadline"
CANCEL = "cancel"
HASH_BYTES = 16
NOTHING = KeptTokens(token_ids=b"", num_sampled=0, is_closed=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn ended; one of the reasons at most is set."""

    status: str
    stop_reason: str | None = None
    incomplete_reason: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Somebody, or a deadline, ended it; it keeps its text and none of its calls."""
        return self.status == CANCELLED or self.incomplete_reason == DEADLINE


def outcome_of(run: TurnRun) -> Outcome:
    """Return how the sampling ended."""
    if run.error is not None:
        return Outcome(FAILED)
    if run.answer.is_stopped:
        return Outcome(COMPLETED, "stop_sequence")
    reason = run.finished.reason if run.finished is not None else api.FinishReason.ABORTED
    if reason is api.FinishReason.LENGTH:
        return Outcome(INCOMPLETE, None, run.params.limited_by)
    if reason is api.FinishReason.ABORTED:
        is_late = run.stop_cause == DEADLINE
        return Outcome(INCOMPLETE, None, DEADLINE) if is_late else Outcome(CANCELLED)
    return Outcome(COMPLETED, "tool_use" if run.response.num_calls else "end_turn")


def conclude(run: TurnRun, now_ms: int) -> Record:
    """Send the answer's last events and return the turn's record.

    It is committed unless the turn failed, or was stopped and is not to store what it had.
    """
    outcome = outcome_of(run)
    run.note_end()
    is_cut = outcome.status != COMPLETED or outcome.stop_reason == "stop_sequence"
    last = run.response.take(run.answer.finish(is_cut=is_cut))
    is_partial = outcome.status in (INCOMPLETE, CANCELLED)
    run.emit([*last, *run.response.finish("incomplete" if is_partial else "completed")])
    if outcome.stop_reason == "end_turn":  # the last call may have come with the last bytes
        outcome = outcome_of(run)
    kept = run.answer.kept(text_only=outcome.is_stopped)
    items = tuple(run.response.items)
    if outcome.is_stopped:
        items = tuple(item for item in items if turn_view.is_text(item))
    is_committed = outcome.status != FAILED and (run.params.store_partial or not outcome.is_stopped)
    if not is_committed:
        kept, items = NOTHING, ()
    return _record(run, outcome, kept, items, is_committed, now_ms)


def broken_off(run: TurnRun, now_ms: int) -> Record:
    """Return the record of a turn that failed in a way that leaves no output to trust."""
    assert run.error is not None
    return _record(run, Outcome(FAILED), NOTHING, (), False, now_ms)


def abandoned(pending: PendingTurn, error: ApiError, now_ms: int) -> Record:
    """Return the record of a turn that could not even be begun, or taken up again."""
    return replace(cancelled_unbegun(pending, now_ms), status=FAILED, error=error_object(error))


def cancelled_unbegun(pending: PendingTurn, now_ms: int) -> Record:
    """Return the record of a turn that was cancelled while it waited for its begin."""
    return Record(
        id=pending.id,
        revision=pending.base_revision,
        input_items=pending.input_items,
        status=CANCELLED,
        params=pending.params,
        idempotency_key=pending.idempotency_key,
        body_hash=pending.body_hash,
        timings=TurnTimings(created_at_ms=pending.created_at_ms, finished_at_ms=now_ms),
        committed=False,
    )


def _record(
    run: TurnRun,
    outcome: Outcome,
    kept: KeptTokens,
    items: tuple[Item, ...],
    is_committed: bool,
    now_ms: int,
) -> Record:
    pending = run.pending
    return Record(
        id=run.turn_id,
        revision=pending.base_revision + int(is_committed),
        input_items=pending.input_items,
        input_token_ids=pending.input_token_ids,
        output_items=items,
        output_token_ids=kept.token_ids,
        item_token_ends=_token_ends(run, items, kept),
        status=outcome.status,
        stop_reason=outcome.stop_reason,
        incomplete_reason=outcome.incomplete_reason,
        error=error_object(run.error) if run.error is not None else None,
        assistant_closed=kept.is_closed,
        usage=_usage(run),
        params={**run.params.to_stored(), cache_report.REPORT: _report(run, kept)},
        idempotency_key=pending.idempotency_key,
        body_hash=pending.body_hash,
        timings=_timings(run, now_ms),
        model_fingerprint=run.model_fingerprint,
        page_hashes=_new_page_hashes(run, kept) if is_committed else b"",
        committed=is_committed,
    )


def _token_ends(run: TurnRun, items: Sequence[Item], kept: KeptTokens) -> tuple[int, ...]:
    """Where items end, if every one is known: input ends, then positions behind the input."""
    ends = run.pending.item_token_ends
    if len(ends) != len(run.pending.input_items):
        return ()
    if not items:
        return ends
    input_len, num_kept = count(run.pending.input_token_ids), count(kept.token_ids)
    output = [input_len + min(end, num_kept) for end in run.item_ends[: len(items)]]
    if len(output) != len(items):
        return ()
    output[-1] = input_len + num_kept
    return (*ends, *output)


def _usage(run: TurnRun) -> TurnUsage:
    cache = run.cache
    return TurnUsage(
        input_tokens=run.prompt_len,
        output_tokens=len(run.answer.token_ids),
        reasoning_tokens=run.answer.num_reasoning,
        cached_l1=cache.l1 if cache is not None else None,
        cached_l2=cache.l2 if cache is not None else None,
        cached_l3=cache.l3 if cache is not None else None,
        computed=cache.to_compute if cache is not None else None,
    )


def _timings(run: TurnRun, now_ms: int) -> TurnTimings:
    # Of a turn that an earlier process began nobody knows when it was first heard of here.
    is_known = run.first_token_s and not run.is_resumed
    ttft_s = run.first_token_s - run.started_s if is_known else None
    return TurnTimings(
        created_at_ms=run.pending.created_at_ms,
        finished_at_ms=now_ms,
        queued_ms=run.queued_ms,
        ttft_ms=round(ttft_s * 1000, 3) if ttft_s is not None else None,
    )


def _new_page_hashes(run: TurnRun, kept: KeptTokens) -> bytes:
    """The hashes of the pages that this turn filled; earlier records have the others.

    Pages with tokens that were sampled but not kept are no part of the history.
    """
    hello = run.client.hello
    if run.finished is None or hello is None:
        return b""
    num_pages = (run.prompt_len + kept.num_sampled) // hello.page_size
    hashes = run.finished.page_hashes[: HASH_BYTES * num_pages]
    return TurnLog(tuple(run.records)).new_page_hashes(hashes)


def _report(run: TurnRun, kept: KeptTokens) -> dict[str, Any]:
    """What later turns and `explain` want to know of this one."""
    fallbacks = run.plan.fallbacks if run.plan is not None else ()
    return {
        "reusable": _reusable(run, kept),
        "engine_instance": run.engine_instance,
        "expected": run.expected.tokens,
        "miss": run.miss,
        "committed_tokens": count(kept.token_ids),
        "grammar_fallback": [
            {"tool": f.tool, "reason": f.reason, "path": f.path} for f in fallbacks
        ],
        "invalid_calls": run.response.invalid_calls,
        "problems": run.response.problems,
    }


def _reusable(run: TurnRun, kept: KeptTokens) -> int:
    """Tokens of the history, this turn's included, whose KV this turn leaves behind."""
    num_sampled = len(run.answer.token_ids)
    if not num_sampled:  # stopped before its first token: maybe in mid-prefill
        return run.finished.num_cached_tokens if run.finished is not None else 0
    # The last token sampled is in the history, but nothing ever computed its KV.
    return run.prompt_len + min(kept.num_sampled, num_sampled - 1)
