# SPDX-License-Identifier: Apache-2.0
"""Ends a turn: stores its record, then tells its readers; in this order, whatever fails.

Does not know: how a turn runs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from appliance import turn_record, turn_view
from appliance.errors import ApiError
from appliance.metrics import Metrics
from appliance.turn_run import TERMINAL_EVENT, TurnRun
from sessions.errors import SessionError, SessionNotFound, StoreUnavailable, VersionConflict
from sessions.session import Session
from sessions.store import SessionStore
from sessions.turn_log import PendingTurn, Record

logger = logging.getLogger(__name__)

MAX_RACES = 8  # lost races against other writers of a session before giving up
LATE_RETRY_S = 15.0  # between offers of ends that those have not brought into the store
STORE_RETRIES_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


class TurnEnding:
    """Shared by all turns of a process."""

    def __init__(
        self,
        store: SessionStore,
        metrics: Metrics,
        clock_ms: Callable[[], int],
        *,
        late_retry_s: float = LATE_RETRY_S,
    ) -> None:
        # Sets what a session has cost so far; set by who counts that.
        self.settle_cost: Callable[[Session], Session] = lambda session: session
        self._store = store
        self._metrics = metrics
        self._clock_ms = clock_ms
        self._late_retry_s = late_retry_s
        # Ends that the store would not take: (session id, record) by turn id.
        self._owed: dict[str, tuple[str, Record]] = {}
        self._retrying: asyncio.Task[None] | None = None
        # Turns that are over but whose end the store has not taken yet, and why.
        self._in_trouble: dict[str, SessionError] = {}

    def trouble_of(self, turn_id: str) -> SessionError | None:
        """Why the end of a turn that is over is not stored yet; None where nothing is known."""
        return self._in_trouble.get(turn_id)

    def owes(self, turn_id: str) -> bool:
        """Whether a turn is over whose end the store has not taken yet."""
        return turn_id in self._owed

    async def finish(self, run: TurnRun) -> None:
        """Commit what the run made, or keep its failure; then send the terminal event."""
        record = turn_record.conclude(run, self._clock_ms())
        storing = asyncio.ensure_future(self._with_retries(run.session, record))
        await asyncio.sleep(0)  # the store has it: what follows is done while a disk writes
        turn = turn_view.turn_wire(run.session.id, record)
        try:
            await storing
        except SessionError as error:
            level = logging.INFO if isinstance(error, SessionNotFound) else logging.ERROR
            logger.log(level, "turn not stored: %s", error, extra={"turn_id": run.turn_id})
            await self.break_off(run, ApiError(error.code, f"the turn was not stored: {error}"))
            return
        self._tell(run, record, turn)
        await asyncio.sleep(0)  # the readers come first
        self._count(run, record)

    async def break_off(self, run: TurnRun, error: ApiError) -> None:
        """End the stream of a turn that could not be ended properly."""
        run.error = run.error or error
        record = turn_record.broken_off(run, self._clock_ms())
        try:
            await self._store_record(run.pending.session_id, record)
        except SessionError as problem:
            self._owe(run.pending.session_id, record, problem)
        self._tell(run, record, turn_view.turn_wire(run.pending.session_id, record))

    async def abandon(self, pending: PendingTurn, error: ApiError) -> None:
        """Free the session of a turn that an earlier process left and that cannot go on."""
        record = turn_record.abandoned(pending, error, self._clock_ms())
        try:
            await self._store_record(pending.session_id, record)
        except SessionError as problem:
            self._owe(pending.session_id, record, problem)

    async def settle(self, turn_id: str) -> None:
        """Store a turn's end now if it is still owed. Raises: SessionError where it stays so."""
        owed = self._owed.get(turn_id)
        if owed is not None:
            await self._store_record(*owed)
            self._owed.pop(turn_id, None)
            logger.info("turn ended late", extra={"turn_id": turn_id})

    async def close(self) -> None:
        """Stop trying; the next API process finds such turns in the store and takes them up."""
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)

    def _owe(self, session_id: str, record: Record, problem: SessionError) -> None:
        """Keep an end that the store would not take, and offer it again and again.

        A session that was deleted is owed nothing.
        """
        if isinstance(problem, SessionNotFound):
            return
        logger.error("turn left pending in the store: %s", problem, extra={"turn_id": record.id})
        self._owed[record.id] = (session_id, record)
        if self._retrying is None or self._retrying.done():
            self._retrying = asyncio.create_task(self._settle_all(), name="turns owed")

    async def _settle_all(self) -> None:
        while self._owed:
            await asyncio.sleep(self._late_retry_s * random.uniform(0.5, 1.5))
            for turn_id in tuple(self._owed):
                try:
                    await self.settle(turn_id)
                except SessionNotFound:
                    self._owed.pop(turn_id, None)
                except SessionError as problem:
                    logger.warning("turn still not ended: %s", problem, extra={"turn_id": turn_id})

    async def _store_record(
        self, session_id: str, record: Record, known: Session | None = None
    ) -> None:
        """`known`: the session as it may still be; the store refuses it where it is not."""
        for _ in range(MAX_RACES):
            session = known or await self._store.get(session_id)
            known = None
            if session.current_turn != record.id:
                return  # an earlier try got through
            now_ms = self._clock_ms()
            try:
                if record.committed:
                    ended = self.settle_cost(session.commit_turn(record, now_ms))
                    await self._store.commit_turn(ended, record)
                else:
                    await self._store.end_turn(session.end_turn(record, now_ms), record)
                return
            except VersionConflict:
                continue
        raise StoreUnavailable("the session changes too fast to end its turn")

    async def _with_retries(self, session: Session, record: Record) -> None:
        known: Session | None = session
        try:
            for wait_s in STORE_RETRIES_S:
                try:
                    return await self._store_record(session.id, record, known)
                except StoreUnavailable as error:
                    known = None  # the store may have taken it all the same
                    self._in_trouble[record.id] = error
                    logger.warning("store: %s; next try in %.2f s", error, wait_s)
                    await asyncio.sleep(wait_s)
            await self._store_record(session.id, record)
        finally:
            self._in_trouble.pop(record.id, None)

    def _tell(self, run: TurnRun, record: Record, turn: dict[str, Any]) -> None:
        run.events.emit(TERMINAL_EVENT[record.status], turn_view.terminal_fields(turn))
        run.events.close()

    def _count(self, run: TurnRun, record: Record) -> None:
        metrics, now_s = self._metrics, time.monotonic()
        reason = record.stop_reason or record.incomplete_reason or ""
        if record.error is not None:
            reason = str(record.error["code"])
        metrics.turns.labels(record.status, reason).inc()
        metrics.turn_seconds.observe(now_s - run.started_s)
        metrics.output_tokens.inc(record.usage.output_tokens)
        if run.first_token_s and not run.is_resumed:
            metrics.turn_first_token_seconds.observe(run.first_token_s - run.started_s)
        num_invalid = len(run.response.invalid_calls)
        metrics.tool_calls.labels("yes").inc(run.response.num_calls - num_invalid)
        metrics.tool_calls.labels("no").inc(num_invalid)
        if run.cache is not None:
            metrics.count_cache(run.cache, run.miss)
