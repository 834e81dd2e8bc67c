# SPDX-License-Identifier: Apache-2.0
"""How the API shows turns, sessions and usage: plain JSON values, built in one place.

Does not know: stores, HTTP. An absent field means unknown, not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.cache_report import REPORT
from appliance.response_events import item_wire
from sessions.durations import format_duration
from sessions.items import Item, Message, Reasoning
from sessions.session import Session
from sessions.turn_log import PendingTurn, Record, TurnUsage

TERMINAL_FIELDS = ("stop_reason", "reason", "error", "usage", "x_cache", "revision")


def is_text(item: Item) -> bool:
    """Whether an item is prose: what a cancelled turn may keep."""
    return isinstance(item, Message | Reasoning)


def usage_wire(usage: TurnUsage) -> dict[str, Any]:
    """Return a turn's usage, OpenAI's fields first."""
    wire: dict[str, Any] = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
    if usage.computed is not None:
        wire["input_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning_tokens is not None:
        wire["output_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    wire["x_cache"] = tiers_wire(usage)
    return wire


def tiers_wire(usage: TurnUsage) -> dict[str, int]:
    """Return the prompt tokens found per tier; a tier that is not known is absent."""
    tiers = {"l1": usage.cached_l1, "l2": usage.cached_l2, "l3": usage.cached_l3}
    return {tier: tokens for tier, tokens in tiers.items() if tokens is not None}


def pending_wire(pending: PendingTurn) -> dict[str, Any]:
    """Return a turn that has not ended."""
    return {
        "id": pending.id,
        "object": "turn",
        "session_id": pending.session_id,
        "status": "running" if pending.ask is None else "queued",
        "created_at": pending.created_at_ms / 1000,
        "input": [item_wire(item) for item in pending.input_items],
        "output": [],
    }


def turn_wire(session_id: str, record: Record) -> dict[str, Any]:
    """Return a turn that has ended."""
    report = record.params.get(REPORT) or {}
    wire: dict[str, Any] = {
        "id": record.id,
        "object": "turn",
        "session_id": session_id,
        "status": record.status,
        "revision": record.revision,
        "committed": record.committed,
        "committed_tokens": report.get("committed_tokens", 0),
        "input": [item_wire(item) for item in record.input_items],
        "output": [item_wire(item) for item in record.output_items],
        "usage": usage_wire(record.usage),
        "x_cache": tiers_wire(record.usage),
        "cache": last_turn_cache(record),
    }
    if record.timings is not None:
        wire["created_at"] = record.timings.created_at_ms / 1000
        wire["finished_at"] = record.timings.finished_at_ms / 1000
        wire["timings"] = {
            name: value
            for name, value in (
                ("queued_ms", record.timings.queued_ms),
                ("first_token_ms", record.timings.ttft_ms),
            )
            if value is not None
        }
    for name, value in (
        ("stop_reason", record.stop_reason),
        ("reason", record.incomplete_reason),
        ("error", record.error),
        ("x_grammar_fallback", report.get("grammar_fallback")),
        ("x_invalid_calls", report.get("invalid_calls")),
        ("x_parse_problems", report.get("problems")),
    ):
        if value:
            wire[name] = value
    return wire


def terminal_fields(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the terminal event of this turn."""
    fields = {name: turn[name] for name in TERMINAL_FIELDS if name in turn}
    return {**fields, "items": turn["output"], "turn": turn}


def last_turn_cache(record: Record) -> dict[str, Any]:
    """Return where the prompt of this turn came from, and the miss if there was one."""
    usage = record.usage
    report = record.params.get(REPORT) or {}
    view: dict[str, Any] = {"turn_id": record.id}
    for name in ("cached_l1", "cached_l2", "cached_l3", "computed"):
        if getattr(usage, name) is not None:
            view[name] = getattr(usage, name)
    view["expected"] = report.get("expected", 0)
    view["miss"] = report.get("miss")
    return view


def recent_turns(turns: Sequence[Record]) -> dict[str, int]:
    """Return how much of these turns' prompts the cache held, of those where that is known."""
    known = [turn.usage for turn in turns if turn.usage.computed is not None]
    return {
        "turns": len(known),
        "cached_tokens": sum(usage.cached for usage in known),
        "prompt_tokens": sum(usage.input_tokens for usage in known),
    }


def session_wire(session: Session, now_ms: int | None = None) -> dict[str, Any]:
    """Return a session resource, as of `now_ms` where its time may be over by now."""
    settings = session.settings
    return {
        "id": session.id,
        "object": "session",
        "tenant": session.tenant,
        "status": session.status if now_ms is None else session.status_at(now_ms),
        "revision": session.revision,
        "model": session.model,
        "instructions": settings.instructions,
        "tools": list(settings.tools),
        "tool_choice": settings.tool_choice,
        "reasoning": {
            "effort": settings.reasoning.effort,
            "history": settings.reasoning.history,
        },
        "open_calls": [{"call_id": c.call_id, "name": c.name} for c in session.open_calls],
        "current_turn": session.current_turn,
        "last_turn": session.last_turn,
        "num_tokens": session.num_tokens,
        "num_items": session.num_items,
        "usage": {
            "input": session.usage.input,
            "output": session.usage.output,
            "cache_read": session.usage.cache_read,
            "cache_creation": session.usage.cache_creation,
        },
        "cache": {
            "hold": {
                "l1": format_duration(settings.hold.l1_ms),
                "l2": format_duration(settings.hold.l2_ms),
                "l3": format_duration(settings.hold.l3_ms),
            },
            "lease": settings.lease,
        },
        "context": {
            "max_tokens": settings.context.max_tokens,
            "on_overflow": settings.context.on_overflow,
            "compact_at": settings.context.compact_at,
            "compact_to": settings.context.compact_to,
        },
        "on_conflict": settings.on_conflict,
        "on_disconnect": settings.on_disconnect,
        "priority": settings.priority,
        "created_at": session.created_at_ms / 1000,
        "updated_at": session.updated_at_ms / 1000,
        "expires_at": session.expires_at_ms / 1000,
        "parent_session_id": session.parent_session_id,
        "metadata": session.metadata,
        "error": session.error,
    }
