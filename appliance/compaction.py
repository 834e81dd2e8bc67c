# SPDX-License-Identifier: Apache-2.0
"""Compactor: puts something short in place of the older part of a history.

The model writes the summary itself, behind the very tokens that it stands for; or the client brings
items; or, where nothing but room is wanted, the older part is left out. What is kept stays
byte-identical. The new prefix is prefilled while the session goes on, then put in place in one
write; what was added meanwhile is kept too. Does not know: HTTP, when a session needs room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.cache_report import COMPACTED, REPORT
from appliance.errors import ApiError
from appliance.generation import Generation
from appliance.prefill import Prefilled, Prefiller
from appliance.response_events import item_wire
from appliance.services import Services
from appliance.session_history import release_kv
from engine import api
from sessions.compaction import Split
from sessions.errors import TurnInProgress, VersionConflict
from sessions.history import replace_history
from sessions.ids import new_id
from sessions.items import Compaction, InputText, Item, Message, OutputText
from sessions.session import Session, items_record
from sessions.token_codec import count, encode_ids
from sessions.turn_log import COMPACTION, Record, TurnLog
from tools_schema.tool_choice import NO_TOOLS
from tools_schema.tool_spec import ToolSet

logger = logging.getLogger(__name__)

SUMMARY_REQUEST = (
    "Write a summary of our conversation so far, to be read in its place. Keep what is needed to "
    "go on: the task, decisions and their reasons, names of files, commands and values, what was "
    "done, and what is left to do. Answer with the summary alone."
)
UNDERSTOOD = "Understood."
MAX_SUMMARY_TOKENS = 2048
MIN_SUMMARY_TOKENS = 16
SUMMARY_SHARE = 8  # of the context, at most one part in so many
MAX_SWAPS = 64  # lost against other writers before giving up
IDLE_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What a compaction did. `prefilled` None: the new prefix was not prefilled."""

    session: Session
    record: Record
    before: Session
    split: Split
    prefilled: Prefilled | None = None
    num_summary_tokens: int = 0

    def wire(self) -> dict[str, Any]:
        """The compaction as the API shows it."""
        session = self.session
        return {
            "id": self.record.id,
            "object": "session.compaction",
            "session_id": session.id,
            "status": "completed",
            "revision": session.revision,
            "items": [item_wire(item) for item in self.record.input_items],
            "num_tokens": session.num_tokens,
            "num_tokens_before": self.before.num_tokens,
            "replaced_items": self.split.num_replaced_items,
            "kept_turns": self.split.num_kept_turns,
            "kept_tokens": self.split.num_kept_tokens,
            "summary_tokens": self.num_summary_tokens,
            "prefill": self.prefilled.wire() if self.prefilled is not None else None,
        }


class Compactor:
    """All compactions of this process."""

    def __init__(self, services: Services, prefiller: Prefiller) -> None:
        self._services = services
        self._prefiller = prefiller

    async def summarise(self, session: Session, log: TurnLog, split: Split) -> tuple[str, int]:
        """Have the model write what stands for the replaced part; (text, tokens it took).

        Raises: ApiError compaction_failed, context_length_exceeded; EngineError.
        """
        services = self._services
        prompt = self._summary_prompt(session, split)
        limit = services.context_limit(session)
        room = min(room_of_summary(limit), limit - count(prompt))
        if room < MIN_SUMMARY_TOKENS:
            raise ApiError(
                "context_length_exceeded",
                f"the part to summarise has {count(prompt)} tokens: no room for a summary of it",
            )
        generation = Generation(
            client=services.client,
            metrics=services.metrics,
            request=api.GenerateRequest(
                request_id=new_id("turn"),
                token_ids=prompt,
                sampling=api.SamplingParams(max_new_tokens=room, temperature=0.0),
                priority=session.settings.priority,
                tenant=session.tenant,
                salt=services.salt_of(session.tenant),
            ),
            answer=services.answer_reader(
                None, ToolSet(), NO_TOOLS, (), services.reasoning_of(prompt)
            ),
        )
        async for _ in generation.steps():
            pass
        # Nobody will ever stand on the request and its answer.
        written = prompt + encode_ids(generation.answer.token_ids)
        await services.client.drop_prefix(
            written, split.replaced_log.num_tokens, salt=services.salt_of(session.tenant)
        )
        text = "".join(generation.text).strip()
        if not text:
            raise ApiError("compaction_failed", "the model wrote no summary")
        return text, generation.num_output

    async def replace(
        self, session: Session, log: TurnLog, split: Split, items: Sequence[Item], *, warm: bool
    ) -> Compacted:
        """Put items in place of what is replaced, once their KV is there (`warm`).

        Waits for turns that run. Raises: ApiError version_conflict where the replaced part itself
        changed meanwhile, context_length_exceeded where nothing is gained.
        """
        record = self._record(session, split, self._answered(split, items))
        prefilled = await self._warm(session, split, record) if warm else None
        for _ in range(MAX_SWAPS):
            try:
                return await self._swap(session.id, log, split, record, prefilled)
            except VersionConflict:
                continue
            except TurnInProgress:
                await asyncio.sleep(IDLE_POLL_S)
        raise ApiError("version_conflict", "the session changes too fast; try again")

    def left_out(self, split: Split) -> Item:
        """The item that says that the replaced part is gone."""
        return Compaction(id=new_id("item"), summary="", num_replaced=split.num_replaced_items)

    def summary(self, split: Split, text: str) -> Item:
        """The item that stands for the replaced part."""
        return Compaction(id=new_id("item"), summary=text, num_replaced=split.num_replaced_items)

    # Inside -------------------------------------------------------------------------------

    def _summary_prompt(self, session: Session, split: Split) -> bytes:
        services = self._services
        ask = Message(id=new_id("item"), role="user", content=(InputText(text=SUMMARY_REQUEST),))
        behind = split.replaced_log
        end = services.end_of(session, behind, ())
        rendered = services.renderer.render_turn(end, (ask,), services.head_of(session))
        return behind.token_ids + rendered.token_ids

    def _answered(self, split: Split, items: Sequence[Item]) -> Sequence[Item]:
        """The items, with an answer behind them where the template wants turns to alternate."""
        renderer = self._services.renderer
        is_user = renderer.role_of(items[-1], has_tokens=True) == "user"
        if renderer.takes_users_in_a_row or not is_user or split.answer is not None:
            return items
        part = OutputText(text=UNDERSTOOD)
        return (*items, Message(id=new_id("item"), role="assistant", content=(part,)))

    def _record(self, session: Session, split: Split, items: Sequence[Item]) -> Record:
        """Render the items so that what is kept can follow them as it is."""
        services = self._services
        renderer = services.renderer
        behind_answer: bool | None = None
        if split.answer is None and split.kept:
            last = next((r.items[-1] for r in reversed(split.replaced) if r.items), None)
            if renderer.role_of(last, has_tokens=True) == "assistant":
                behind_answer = split.replaced_log.is_closed
        rendered = renderer.render_before(
            items,
            services.head_of(session),
            role=renderer.role_of(None, has_tokens=bool(split.head)),
            kept_behind=behind_answer,
        )
        return items_record(
            items,
            revision=session.revision + 1,
            token_ids=rendered.token_ids,
            item_token_ends=rendered.item_token_ends,
            kind=COMPACTION,
            model_fingerprint=services.assets.fingerprint,
        )

    async def _warm(self, session: Session, split: Split, record: Record) -> Prefilled:
        token_ids = TurnLog((*split.head, record, *split.kept)).token_ids
        return await self._prefiller.run(session, token_ids, is_urgent=False)

    async def _swap(
        self,
        session_id: str,
        before: TurnLog,
        split: Split,
        record: Record,
        prefilled: Prefilled | None,
    ) -> Compacted:
        services = self._services
        session = await services.store.get(session_id)
        if session.current_turn is not None:
            raise TurnInProgress(session.current_turn)
        log = await services.store.read_log(session)
        now = split.moved_to(before, log)
        if now is None:
            raise ApiError("version_conflict", "the history was changed during the compaction")
        own = [_compacted(r, 0, "") for r in (record, *now.kept)]
        if prefilled is not None and prefilled.num_cached:
            hello = services.client.hello
            instance = hello.instance_id if hello is not None else ""
            own[-1] = _compacted(own[-1], prefilled.num_cached, instance)
        moved, records = replace_history(
            session, log, own, services.clock_ms(), keep_records=len(split.head)
        )
        if moved.num_tokens >= session.num_tokens:
            raise ApiError(
                "compaction_failed",
                f"what would stand for the older part is no shorter than it: {moved.num_tokens} "
                f"tokens instead of {session.num_tokens}",
            )
        stored = await services.store.replace_history(moved, records)
        kept_prefix = sum(r.num_tokens for r in split.head)
        await release_kv(services, session, log, keep_tokens=kept_prefix)
        logger.info(
            "session compacted: %d -> %d tokens",
            session.num_tokens,
            stored.num_tokens,
            extra={"session_id": session_id},
        )
        return Compacted(
            session=stored, record=records[0], before=session, split=now, prefilled=prefilled
        )


def room_of_summary(limit: int) -> int:
    """Tokens that a summary may take in a context of `limit`."""
    return min(MAX_SUMMARY_TOKENS, max(limit // SUMMARY_SHARE, MIN_SUMMARY_TOKENS))


def _compacted(record: Record, reusable: int, instance: str) -> Record:
    """A record at its new place: what was computed of it behind the old prefix is of no use."""
    report = {
        **(record.params.get(REPORT) or {}),
        "rewritten": COMPACTED,
        "reusable": reusable,
        "engine_instance": instance,
    }
    return replace(record, params={**record.params, REPORT: report}, page_hashes=b"")
