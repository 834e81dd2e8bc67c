# SPDX-License-Identifier: Apache-2.0
"""HistoryRoom: keeps histories within their context, when a client asks or as they overflow.

`context.on_overflow`: `error` refuses what does not fit; `truncate_oldest` leaves the oldest out at
once; `compact` has them summarised, beside the turns where there is time, else in front of the turn
that needs the room. Does not know: HTTP, how a summary is made (compaction).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from appliance.api.wire_sessions import CompactCreate
from appliance.compaction import Compacted, Compactor, room_of_summary
from appliance.errors import ApiError, as_api_error
from appliance.reasoning_history import ReasoningHistory, drops_reasoning
from appliance.services import Services
from appliance.text_limits import ContextExceeded
from sessions.calls import resolve_calls
from sessions.compaction import Split, split_history, split_to_fit
from sessions.errors import UnresolvedToolCalls
from sessions.items import Item, parse_items
from sessions.session import Session
from sessions.token_codec import count
from sessions.turn_log import PRELUDE, PendingTurn, TurnLog

logger = logging.getLogger(__name__)

SUMMARY = "summary"
SHORT = "compact"  # the policy that has a summary written
LEFT_OUT_LEN = 64  # tokens: what says that something was left out, roughly
NO_SUMMARY = ("context_length_exceeded", "compaction_failed")  # codes of a summary not to be had


class HistoryRoom:
    """One per process; belongs to one event loop."""

    def __init__(self, services: Services, compactor: Compactor) -> None:
        self._services = services
        self._compactor = compactor
        self._reasoning = ReasoningHistory(services)
        self._running: dict[str, asyncio.Task[Compacted]] = {}
        services.hub.listen(self._on_session_event)

    # What clients ask ---------------------------------------------------------------------

    async def compact(
        self, tenant: str | None, session_id: str, body: CompactCreate
    ) -> dict[str, Any]:
        """Compact a session now; returns once the new history is in place.

        Raises: ApiError compaction_in_progress, nothing_to_compact, compaction_failed; what
        parsing items raises.
        """
        services = self._services
        session = await services.store.get(session_id, tenant=tenant)
        session.check_alive(services.clock_ms())
        items = _items_of(body)
        log = await services.store.read_log(session)
        if session_id in self._running:  # began while the log was read
            raise ApiError("compaction_in_progress", "a compaction of this session runs already")
        split = split_history(log, session.open_calls, keep_last_turns=body.keep_last_turns)
        if split is None:
            raise ApiError(
                "nothing_to_compact",
                f"nothing lies before the last {body.keep_last_turns} turns that could be replaced",
                "keep_last_turns",
            )
        task = self._start(session, log, split, items, warm=body.warm)
        # A client that hangs up does not stop it: what it asked for happens.
        return (await self._outcome(session_id, task)).wire()

    # Room for turns -----------------------------------------------------------------------

    async def before_turn(self, session: Session, new_input: object) -> Session:
        """Do to a history what its settings ask for before a turn with this input.

        Raises: SessionError (VersionConflict where another writer came first).
        """
        if drops_reasoning(session, new_input):
            session = await self._reasoning.drop(session)
        return session

    def can_make(self, session: Session, log: TurnLog, error: ApiError) -> bool:
        """Whether this refusal of a turn is one that more room can lift.

        What does not fit behind the head alone is refused before anything is given up for it.
        """
        if error.code != "context_length_exceeded":
            return False
        if session.settings.context.on_overflow == "error":
            return False
        num_new = num_new_of(error)
        limit = self._services.context_limit(session)
        if num_new + _head_len(log) >= limit:
            return False
        return self._split(session, log, num_new) is not None

    def is_tight(self, session: Session, log: TurnLog, pending: PendingTurn) -> bool:
        """Whether a turn would leave the history longer than `compact_at`, and that can be helped.

        A turn that just fits would end at the context's limit after a few tokens.
        """
        context = session.settings.context
        prompt_len = session.num_tokens + count(pending.input_token_ids)
        is_long = prompt_len > context.compact_at * self._services.context_limit(session)
        if context.on_overflow == "error" or not is_long:
            return False
        return self._split(session, log) is not None

    def is_quick(self, session: Session) -> bool:
        """Whether room is made at once; else a turn has to wait for it."""
        return session.settings.context.on_overflow == "truncate_oldest"

    async def make(self, session: Session, num_new: int) -> Session:
        """Shorten a history down to its `compact_to`, or so that so many new tokens fit behind it.

        Where no summary can be had, or it leaves too little room, the oldest turns are left out:
        a session that asked for room is not to refuse every turn from then on. Raises: ApiError,
        SessionError.
        """
        if self.is_quick(session):
            return await self._truncate(session, num_new)
        running = self._running.get(session.id)
        if running is None:
            log = await self._services.store.read_log(session)
            split = self._split(session, log, num_new)
            if split is None:
                return session
            running = self._start(session, log, split, None, warm=False)
        try:
            await self._outcome(session.id, running)
        except ApiError as error:
            if error.code not in NO_SUMMARY:
                raise
            return await self._truncate(await self._services.store.get(session.id), num_new)
        session = await self._services.store.get(session.id)
        if session.num_tokens + num_new < self._services.context_limit(session):
            return session
        return await self._truncate(session, num_new)

    async def close(self) -> None:
        """Stop the compactions that run; their sessions stay as they are."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Inside -------------------------------------------------------------------------------

    def _is_over(self, session: Session) -> bool:
        limit = self._services.context_limit(session)
        return session.num_tokens > session.settings.context.compact_at * limit

    def _split(self, session: Session, log: TurnLog, num_new: int = 0) -> Split | None:
        limit = self._services.context_limit(session)
        stand_in = room_of_summary(limit) if session.settings.context.on_overflow == SHORT else 0
        wanted = int(session.settings.context.compact_to * limit)
        most = min(wanted, limit - num_new - stand_in - LEFT_OUT_LEN) - _head_len(log)
        return split_to_fit(log, session.open_calls, max_kept_tokens=max(0, most))

    async def _truncate(self, session: Session, num_new: int) -> Session:
        log = await self._services.store.read_log(session)
        split = self._split(session, log, num_new)
        if split is None:
            return session
        items = (self._compactor.left_out(split),)
        try:
            return (await self._compactor.replace(session, log, split, items, warm=False)).session
        except ApiError as error:
            if error.code != "compaction_failed":
                raise
            return session  # what goes is no longer than what says so: there is no room to make

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, Any]) -> None:
        """Compact beside the turns once one has left a history too long."""
        policy = session.settings.context.on_overflow
        if kind == "session.turn_ended" and policy == "compact" and self._is_over(session):
            if session.id not in self._running:
                task = asyncio.get_running_loop().create_task(self._compact_long(session))
                self._track(session.id, task)
        elif kind in ("session.closed", "session.expired") and session.id in self._running:
            self._running[session.id].cancel()

    async def _outcome(self, session_id: str, task: asyncio.Task[Compacted]) -> Compacted:
        """Wait for a compaction that goes on without us.

        Raises: what it does; SessionNotFound, SessionExpired where the end of the session ended
        it; ApiError draining where the end of this process did.
        """
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if not task.cancelled() or (waiter is not None and waiter.cancelling()):
                raise
        session = await self._services.store.get(session_id)
        session.check_alive(self._services.clock_ms())
        raise ApiError("draining", "the server stops: the session was not compacted")

    async def _compact_long(self, session: Session) -> Compacted:
        log = await self._services.store.read_log(session)
        split = self._split(session, log)
        if split is None:
            raise ApiError("nothing_to_compact", "the last turn alone is too long")
        return await self._run(session, log, split, None, True)

    def _start(
        self,
        session: Session,
        log: TurnLog,
        split: Split,
        items: tuple[Item, ...] | None,
        *,
        warm: bool,
    ) -> asyncio.Task[Compacted]:
        task = asyncio.create_task(self._run(session, log, split, items, warm))
        self._track(session.id, task)
        return task

    def _track(self, session_id: str, task: asyncio.Task[Compacted]) -> None:
        self._running[session_id] = task
        task.add_done_callback(lambda task: self._forget(session_id, task))

    def _forget(self, session_id: str, task: asyncio.Task[Compacted]) -> None:
        if self._running.get(session_id) is task:
            del self._running[session_id]
        if task.cancelled() or task.exception() is None:
            return
        error = as_api_error(task.exception() or RuntimeError())
        logger.warning("not compacted: %s", error.message, extra={"session_id": session_id})
        event = {"type": "session.compaction_failed", "session_id": session_id}
        self._services.hub.put(session_id, {**event, "code": error.code, "message": error.message})

    async def _run(
        self,
        session: Session,
        log: TurnLog,
        split: Split,
        items: tuple[Item, ...] | None,
        warm: bool,
    ) -> Compacted:
        hub = self._services.hub
        event = {"session_id": session.id, "replaced_items": split.num_replaced_items}
        hub.put(session.id, {"type": "session.compaction_started", **event})
        num_summary = 0
        if items is None:
            text, num_summary = await self._compactor.summarise(session, log, split)
            items = (self._compactor.summary(split, text),)
        done = await self._compactor.replace(session, log, split, items, warm=warm)
        done = replace(done, num_summary_tokens=num_summary)
        hub.put(session.id, {"type": "session.compacted", **done.wire()})
        return done


def num_new_of(error: ApiError) -> int:
    """How many tokens, at least, a refusal for lack of room was about."""
    return error.num_new if isinstance(error, ContextExceeded) else 0


def _head_len(log: TurnLog) -> int:
    """Tokens that stay at the front whatever goes."""
    is_head = bool(log.records) and log.records[0].kind == PRELUDE
    return log.records[0].num_tokens if is_head else 0


def _items_of(body: CompactCreate) -> tuple[Item, ...] | None:
    """The items a client wants in place of the old ones; None where the model shall write them."""
    if body.mode == SUMMARY:
        if body.summary_items is not None:
            raise ApiError("invalid_value", "summary_items: only with mode items", "summary_items")
        return None
    if not body.summary_items:
        raise ApiError(
            "missing_field", "summary_items: required, one item at least", "summary_items"
        )
    items = parse_items(body.summary_items, path="summary_items")
    left_open = resolve_calls((), items, path="summary_items")
    if left_open:
        raise UnresolvedToolCalls([c.call_id for c in left_open], param="summary_items")
    return items
