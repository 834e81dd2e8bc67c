# SPDX-License-Identifier: Apache-2.0
"""What becomes of reasoning in a history once the user speaks again: `reasoning.history`.

`keep` leaves the sampled ids alone. `drop_before_last_user` renders earlier answers anew without
their reasoning, as a full render by a template that drops it would; from the first of them on, KV
is computed again. The items stay in the transcript. Does not know: HTTP, turns.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from appliance.cache_report import REASONING_DROPPED, REPORT
from appliance.services import Services
from sessions.history import retokenised
from sessions.items import Reasoning
from sessions.session import Session
from sessions.token_codec import TOKEN_BYTES, count
from sessions.turn_log import Record, TurnLog

logger = logging.getLogger(__name__)


class ReasoningHistory:
    """Rewrites histories whose settings ask for it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def drop(self, session: Session) -> Session:
        """Take the reasoning out of every answer so far. Raises: VersionConflict, StoreError."""
        services = self._services
        log = await services.store.read_log(session)
        first = first_with_reasoning(log)
        if first is None:
            return session
        records = tuple(
            self._without_reasoning(session, log, index) if has_reasoning(record) else record
            for index, record in enumerate(log.records[first:], start=first)
        )
        moved, own = retokenised(
            session, log, [_moved(r) for r in records], services.clock_ms(), keep_records=first
        )
        stored = await services.store.replace_history(moved, own)
        logger.info(
            "reasoning dropped: %d -> %d tokens",
            session.num_tokens,
            stored.num_tokens,
            extra={"session_id": session.id},
        )
        return stored

    def _without_reasoning(self, session: Session, log: TurnLog, index: int) -> Record:
        """The same record, its answer rendered from the items that are not reasoning."""
        services = self._services
        record = log.records[index]
        head = services.head_of(session)
        fronts = (record.input_items, *(r.items for r in reversed(log.records[:index])))
        last = next((items[-1] for items in fronts if items), None)
        role = services.renderer.role_of(last, has_tokens=True)
        at = _input_end(record, services.renderer.generation_prompt(role, head))
        answer = [item for item in record.output_items if not isinstance(item, Reasoning)]
        spoken = services.renderer.render_spoken(role, answer, head, record.assistant_closed)
        if at is None or spoken is None:
            logger.info("reasoning kept: no seam", extra={"turn_id": record.id})
            return record
        changed = replace(
            record, input_token_ids=record.input_token_ids[:at], output_token_ids=spoken
        )
        return replace(changed, item_token_ends=_ends(record, changed, len(answer)))


def first_with_reasoning(log: TurnLog) -> int | None:
    """Index of the first record whose tokens hold reasoning."""
    return next((i for i, record in enumerate(log.records) if has_reasoning(record)), None)


def has_reasoning(record: Record) -> bool:
    """Whether the tokens of a record hold the model's reasoning."""
    report = record.params.get(REPORT) or {}
    is_dropped = bool(report.get("reasoning_dropped"))
    return not is_dropped and any(isinstance(item, Reasoning) for item in record.output_items)


def drops_reasoning(session: Session, new_input: object) -> bool:
    """Whether this input makes earlier reasoning go."""
    policy = session.settings.reasoning.history
    return policy == "drop_before_last_user" and has_user_message(new_input)


def has_user_message(new_input: object) -> bool:
    """Whether a turn's raw input has something that the user says."""
    if isinstance(new_input, str):
        return True
    if not isinstance(new_input, list | tuple):
        return False
    return any(isinstance(entry, dict) and entry.get("role") == "user" for entry in new_input)


def reasoning_wire(session: Session, log: TurnLog) -> dict[str, Any]:
    """What the reasoning in a history weighs, and what dropping it would cost once."""
    first = first_with_reasoning(log)
    behind = log.records[first:] if first is not None else ()
    return {
        "history": session.settings.reasoning.history,
        "tokens": sum(r.usage.reasoning_tokens or 0 for r in behind if has_reasoning(r)),
        "recompute_tokens": sum(record.num_tokens for record in behind),
    }


def _input_end(record: Record, generation_prompt: bytes) -> int | None:
    """Where a record's generation prompt begins, in bytes of its input ids."""
    num_inputs = len(record.input_items)
    if record.item_token_ends and num_inputs:
        return record.item_token_ends[num_inputs - 1] * TOKEN_BYTES
    if record.input_token_ids.endswith(generation_prompt):
        return len(record.input_token_ids) - len(generation_prompt)
    return None


def _ends(old: Record, new: Record, num_spoken: int) -> tuple[int, ...]:
    """Where its items end now: reasoning nowhere, and what was said at the end, if it is one."""
    num_inputs = len(old.input_items)
    if num_spoken > 1 or len(old.item_token_ends) != len(old.items):
        return ()
    start = count(new.input_token_ids)
    outputs: list[int] = []
    for item in old.output_items:
        is_spoken = not isinstance(item, Reasoning)
        outputs.append(new.num_tokens if is_spoken or outputs[-1:] == [new.num_tokens] else start)
    return (*old.item_token_ends[:num_inputs], *outputs)


def _moved(record: Record) -> Record:
    report = {**(record.params.get(REPORT) or {}), "rewritten": REASONING_DROPPED, "reusable": 0}
    report["reasoning_dropped"] = True
    return replace(record, params={**record.params, REPORT: report}, page_hashes=b"")
