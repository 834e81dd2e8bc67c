# SPDX-License-Identifier: Apache-2.0
"""One running turn: engine messages in, numbered events out.

The events of a turn are a function of its tokens, so a run that takes up an unfinished turn repeats
what readers saw and goes on from there. Does not know: how a turn is accepted or ended, stores.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from appliance import cache_report
from appliance.answer import AnswerReader
from appliance.cache_report import Expectation
from appliance.errors import ApiError, known_code
from appliance.grammars import constrained, spec_of
from appliance.response_events import ResponseEvents, WireEvent
from appliance.turn_events import TurnEvents
from appliance.turn_params import TurnParams
from appliance.turn_record import CANCEL, DEADLINE
from engine import api
from engine.client import EngineClient
from engine.client_streams import StreamItem
from sessions.session import Session
from sessions.token_codec import TOKEN_BYTES, count, decode_ids, encode_ids
from sessions.turn_log import CANCELLED, COMPLETED, FAILED, INCOMPLETE, PendingTurn, Record
from tools_schema.structural_tag import GrammarPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

TERMINAL_EVENT = {
    COMPLETED: "turn.completed",
    INCOMPLETE: "turn.incomplete",
    CANCELLED: "turn.cancelled",
    FAILED: "turn.failed",
}
# How an answer ends, as its journal of tokens numbers it; only ever appended to.
ENDS = (
    (api.FinishReason.STOP, ""),
    (api.FinishReason.LENGTH, ""),
    (api.FinishReason.ABORTED, CANCEL),
    (api.FinishReason.ABORTED, DEADLINE),
)


@dataclass(slots=True, kw_only=True)
class TurnRun:
    """Everything one turn needs while it runs. `records`: the history it stands on."""

    pending: PendingTurn
    params: TurnParams
    events: TurnEvents
    answer: AnswerReader
    response: ResponseEvents
    client: EngineClient
    records: Sequence[Record]
    history: bytes
    expected: Expectation
    tenant: str
    salt: str
    priority: int
    session: Session  # as it was when the turn began
    model_fingerprint: str
    started_s: float = field(default_factory=time.monotonic)
    is_resumed: bool = False
    is_in_second_life: bool = False  # an engine died under it; the next `Started` is another's
    plan: GrammarPlan | None = None
    stop_cause: str = ""  # why somebody asked for the end, once somebody did
    cache: api.CacheHit | None = None
    miss: dict[str, Any] | None = None
    submitted_s: float = 0.0
    progress_s: float = field(default_factory=time.monotonic)  # when the engine was last heard
    first_token_s: float = 0.0
    queued_ms: float | None = None
    finished: api.Finished | None = None
    engine_instance: str = ""  # of the engine that computed what this turn leaves behind
    error: ApiError | None = None
    item_ends: list[int] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def turn_id(self) -> str:
        return self.pending.id

    @property
    def prompt_len(self) -> int:
        return count(self.history) + count(self.pending.input_token_ids)

    @property
    def phase(self) -> str:
        """What it waits for: to be admitted (queued), its prompt (prefill), tokens (decode)."""
        if self.first_token_s:
            return "decode"
        return "queued" if self.cache is None else "prefill"

    def request(self, plan: GrammarPlan) -> api.GenerateRequest:
        """Return the engine request of this turn; its id is the turn's."""
        return api.GenerateRequest(
            request_id=self.turn_id,
            token_ids=self.history + self.pending.input_token_ids,
            sampling=constrained(self.params.sampling, plan),
            grammar=spec_of(plan),
            priority=self.priority,
            tenant=self.tenant,
            salt=self.salt,
        )

    async def request_stop(self, cause: str) -> None:
        """Ask for the end of this turn; it ends with what it has. Asking twice is harmless."""
        if not self.stop_cause and self.finished is None:
            self.stop_cause = cause
            self._stopping.set()
        await self.client.abort(self.turn_id)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` gives, or None once the turn is asked to stop."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            stopping.cancel()
            task.cancel()

    def take_up(self) -> None:
        """This turn was begun by an earlier API process; its events say what it had cost."""
        self.is_resumed = True
        told = self.events.told("turn.cache")
        if told:
            names = {"l1": "cached_l1", "l2": "cached_l2", "l3": "cached_l3"}
            found = {tier: told[0][name] for tier, name in names.items()}
            self.cache = api.CacheHit(**found, to_compute=told[0]["to_compute"])
            self.miss = told[-1]["miss"]

    def on_engine_restart(self) -> None:
        """Another engine goes on with this turn; its `Started` says what is computed again."""
        self.is_in_second_life = self.cache is not None and self.finished is None

    async def run(self, plan: GrammarPlan | None) -> None:
        """Sample to the end. Failures are kept in `error`, never raised (cancellation is).

        plan: None where a turn that was taken up is to stop: it ends with what it had.
        """
        self.plan = plan
        try:
            async for item in self._engine_items(plan):
                await self._take(item)
        except (ConnectionError, ValueError, RuntimeError) as error:
            logger.exception("turn failed", extra={"turn_id": self.turn_id})
            self.error = ApiError("internal_error", f"the turn failed: {error}")

    # Reading the engine -------------------------------------------------------------------

    async def _engine_items(self, plan: GrammarPlan | None) -> AsyncIterator[StreamItem]:
        """The engine's messages for this turn, whichever API or engine process began it."""
        if self.is_resumed:
            async for item in self.client.attach(self.turn_id, abort_on_close=False):
                if not _is_unknown(item):
                    yield item
                    continue
                break
            else:
                return
            # The engine died after the API process did, or never saw the request.
            await self._recall()
            if self.error is not None or self.answer.is_stopped or self.finished is not None:
                return
        # It may have been asked to stop while the engine had nothing of it that could be stopped.
        if plan is None or self.stop_cause:
            return
        request = self.request(plan)
        request.resume_token_ids = encode_ids(self.answer.token_ids)
        async for item in self.client.generate(request, abort_on_close=False):
            yield item

    async def _recall(self) -> None:
        """Bring back what the engine that died had sampled, as far as it is kept here.

        Where readers saw more than that, nobody can go on with what they saw.
        """
        sampled, num_known = self.events.sampled, len(self.answer.token_ids)
        token_ids = sampled.token_ids[num_known * TOKEN_BYTES :]
        if token_ids:
            tokens = api.Tokens(request_id=self.turn_id, start=num_known, token_ids=token_ids)
            await self._on_tokens(tokens)
        if sampled.end is not None:  # only its last events are missing, or its way to the store
            reason, cause = ENDS[sampled.end]
            self.stop_cause = self.stop_cause or cause
            num_output = len(self.answer.token_ids)
            self.finished = api.Finished(
                request_id=self.turn_id, reason=reason, num_output_tokens=num_output
            )
        elif not self.events.is_caught_up:
            self.error = ApiError(
                "engine_restarted",
                "the engine and the API process died during this turn, and what they had sampled "
                "is not kept",
            )
        self.is_in_second_life = self.cache is not None

    async def _take(self, item: StreamItem) -> None:
        self.progress_s = time.monotonic()
        match item:
            case api.Started():
                self._on_started(item)
            case api.PrefillProgress():
                fields = {"done": item.done, "total": item.total}
                self.events.emit("turn.prefill.progress", fields)
            case api.Tokens():
                await self._on_tokens(item)
            case api.Finished():
                self._on_finished(item)

    def _on_started(self, item: api.Started) -> None:
        if self.cache is not None and not self.is_in_second_life:
            return
        if self.is_in_second_life:
            self.is_in_second_life = False
            self.miss = self._restart_miss(item.cache)
        else:  # the usage of a turn is what its prompt cost at first: it adds up to the input
            self._note_engine()
            self.cache, self.queued_ms = item.cache, item.queued_ms
            self.miss = cache_report.explain_miss(
                self.expected, item.cache, self.engine_instance, self.records
            )
        self.events.emit(
            "turn.cache",
            {
                "cached_l1": item.cache.l1,
                "cached_l2": item.cache.l2,
                "cached_l3": item.cache.l3,
                "to_compute": item.cache.to_compute,
                "miss": self.miss,
            },
        )

    def _restart_miss(self, hit: api.CacheHit) -> dict[str, Any] | None:
        """What a crash in mid-turn cost: all that had been computed and is in no tier."""
        found = hit.l1 + hit.l2 + hit.l3
        had = self.prompt_len + max(0, len(self.answer.token_ids) - 1)
        if found >= had:
            return None
        return {
            "reason": cache_report.ENGINE_RESTARTED,
            "first_diverging_item": cache_report.first_item_after(self.records, found),
            "missed_tokens": had - found,
        }

    def _note_engine(self) -> None:
        hello = self.client.hello
        self.engine_instance = hello.instance_id if hello is not None else ""

    async def _on_tokens(self, item: api.Tokens) -> None:
        self._note_engine()
        self.events.note_tokens(item.start, item.token_ids)
        if not self.first_token_s:
            self.first_token_s = time.monotonic()
            self.events.emit("turn.in_progress", {})
        num_known = len(self.answer.token_ids)
        taken = self.answer.take(decode_ids(item.token_ids))
        told: list[WireEvent] = []
        for event, num_tokens in taken:
            told += self._noted(self.response.take((event,)), num_tokens)
        self.events.emit_all(told)
        if self.answer.is_stopped and len(self.answer.token_ids) > num_known:
            await self.client.abort(self.turn_id)

    def _on_finished(self, item: api.Finished) -> None:
        self.finished = item
        if not len(self.answer.token_ids):  # what is cached is all that is left of this turn
            self._note_engine()
        if item.reason is api.FinishReason.ERROR and not self.answer.is_stopped:
            code = known_code(item.error_code)
            self.error = ApiError(code, item.error_message or "the engine failed this turn")

    def note_end(self) -> None:
        """Journal how the answer ended, before the events that say so."""
        if self.finished is None or self.error is not None:
            return
        reason = self.finished.reason
        is_aborted = reason is api.FinishReason.ABORTED
        cause = (self.stop_cause or CANCEL) if is_aborted else ""
        if (reason, cause) in ENDS:
            self.events.note_end(ENDS.index((reason, cause)))

    def emit(self, events: list[WireEvent]) -> None:
        """Number and send events of the answer as far as it has come."""
        self.events.emit_all(self._noted(events, len(self.answer.token_ids)))

    def _noted(self, events: list[WireEvent], num_tokens: int) -> list[WireEvent]:
        """Note that the whole items among these end with so many tokens of the answer."""
        for event_type, fields in events:
            if event_type == "response.output_item.done" and self._is_whole(fields["item"]):
                self.item_ends.append(num_tokens)
        return events

    def _is_whole(self, item: dict[str, Any]) -> bool:
        return any(known.id == item["id"] for known in reversed(self.response.items))


def _is_unknown(item: StreamItem) -> bool:
    return isinstance(item, api.Finished) and item.error_code == "unknown_request"
