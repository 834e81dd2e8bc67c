# SPDX-License-Identifier: Apache-2.0
"""Takes up turns that have no process: its own of an earlier life, and those of dead processes.

Each API process says every few seconds that it is alive. A turn of one that does not any more is
handed to whoever claims it first. Does not know: how a turn runs.
"""

from __future__ import annotations

import asyncio
import logging
import time

from appliance import turn_view
from appliance.errors import ApiError, as_api_error, known_code
from appliance.services import Services
from appliance.turn_events import TurnEvents, decode_frame
from appliance.turn_preparation import Ask, build_run
from appliance.turn_queue import WaitingTurn
from appliance.turn_record import abandoned
from appliance.turns import TurnService
from sessions.errors import SessionError, SessionNotFound
from sessions.turn_log import PendingTurn
from tools_schema.errors import ToolSchemaError

logger = logging.getLogger(__name__)

BEAT_EVERY_S = 5.0
ALIVE_MS = 20_000  # a process that is silent for longer is dead


class TurnTakeover:
    """One per process; `beat_every_s` and `alive_ms` are the same in all that share a store."""

    def __init__(
        self,
        services: Services,
        turns: TurnService,
        *,
        beat_every_s: float = BEAT_EVERY_S,
        alive_ms: int = ALIVE_MS,
    ) -> None:
        self._services = services
        self._turns = turns
        self._beat_every_s = beat_every_s
        self._alive_ms = alive_ms
        self._strays: frozenset[str] = frozenset()  # at the last look
        # By the store's clock: the last look, and from when on silence of others means death.
        self._seen_ms: int | None = None
        self._believed_from_ms = 0

    async def recover(self) -> int:
        """Take up the turns that an earlier life of this API process left; returns how many.

        Those of others that share the store are theirs; a turn without an owner is anybody's.
        """
        store = self._services.store
        await self._beat()
        owners = ("", self._services.owner)
        found = [turn for owner in owners for turn in await store.pending_turns(owner=owner)]
        found += [turn for owner in owners for turn in await store.queued_turns(owner=owner)]
        for turn in found:
            await self._take_up_guarded(turn)
        return len(found)

    async def run(self) -> None:
        """Say that this process is alive, and look after the turns of those that are not."""
        while True:
            await asyncio.sleep(self._beat_every_s)
            try:
                await self.look()
            except SessionError as error:
                logger.warning("turns of other processes not looked at: %s", error)

    async def look(self) -> None:
        """One round of `run`."""
        now_ms = await self._services.store.clock_ms()
        # The machine stood still, the store was away, or its clock jumped: others could not say
        # that they are alive either, and get the time to say it again.
        if self._seen_ms is not None and abs(now_ms - self._seen_ms) > self._alive_ms / 2:
            self._believed_from_ms = now_ms + self._alive_ms
        self._seen_ms = now_ms
        await self._beat()
        if now_ms >= self._believed_from_ms:
            await self.adopt_orphans()
        await self.adopt_strays()

    async def adopt_orphans(self) -> int:
        """Take up the turns of processes that are dead; returns how many."""
        services = self._services
        turns = (*await services.store.pending_turns(), *await services.store.queued_turns())
        others = [turn for turn in turns if turn.owner != services.owner]
        if not others or self._turns.is_draining:
            return 0
        alive = await services.store.live_owners(await services.store.clock_ms())
        num_adopted = 0
        for turn in others:
            if turn.owner in alive or not await services.store.claim_turn(turn, services.owner):
                continue
            logger.warning("took over a turn of %s", turn.owner, extra={"turn_id": turn.id})
            await self._take_up_guarded(turn)
            num_adopted += 1
        return num_adopted

    async def adopt_strays(self) -> int:
        """Take up turns of this process that it does not know of; returns how many.

        The store took them, and its answer was lost, or came too late. A turn that began or ended
        while the store was read looks like one: only who is found so twice is one.
        """
        services, turns = self._services, self._turns
        stored = (
            *await services.store.pending_turns(owner=services.owner),
            *await services.store.queued_turns(owner=services.owner),
        )
        strays = {turn.id: turn for turn in stored if not turns.is_here(turn.id)}
        known, self._strays = self._strays, frozenset(strays)
        found = [strays[turn_id] for turn_id in strays if turn_id in known]
        if turns.is_draining:
            return 0
        for turn in found:
            logger.warning("a turn that nobody runs is taken up", extra={"turn_id": turn.id})
            await self._take_up_guarded(turn)
        return len(found)

    async def _beat(self) -> None:
        until_ms = await self._services.store.clock_ms() + self._alive_ms
        await self._services.store.beat(self._services.owner, until_ms)

    async def _take_up_guarded(self, turn: PendingTurn) -> None:
        """One turn that cannot go on must not keep the others, or the process, down."""
        try:
            await (self._take_up(turn) if turn.ask is None else self._wait_again(turn))
        except SessionNotFound:
            return
        except (SessionError, ToolSchemaError, ValueError) as error:
            logger.error("turn not taken up: %s", error, extra={"turn_id": turn.id})
            await self._give_up(turn, as_api_error(error))

    async def _give_up(self, turn: PendingTurn, error: ApiError) -> None:
        if turn.ask is None:
            await self._turns.runner.ending.abandon(turn, error)
        else:
            record = abandoned(turn, error, self._services.clock_ms())
            await self._services.store.end_queued(turn.session_id, record)

    async def _take_up(self, pending: PendingTurn) -> None:
        if self._turns.runner.find(pending.id) is not None:
            return
        services = self._services
        session = await services.store.get(pending.session_id)
        log = await services.store.read_log(session)
        events = services.journals.reopen(pending.session_id, pending.id)
        if events.has_terminal:  # its readers were told a failure that the store did not take
            events.close()
            await self._turns.runner.ending.abandon(pending, _told_error(events))
            return
        run = build_run(services, session, log, pending, events)
        run.take_up()
        if session.model_fingerprint not in ("", services.assets.fingerprint):
            run.error = ApiError("model_changed", "the model changed while this turn ran")
        events.emit("turn.created", {"turn": turn_view.pending_wire(pending)})
        logger.info("turn taken up again", extra={"turn_id": pending.id})
        self._turns.runner.launch(run, time.monotonic())

    async def _wait_again(self, waiting: PendingTurn) -> None:
        """Put a turn that never began back into its queue."""
        if self._turns.queue.find(waiting.session_id, waiting.id) is not None:
            return
        events = self._services.journals.reopen(waiting.session_id, waiting.id)
        if events.has_terminal:  # its readers were told its end, the store was not
            events.close()
            record = abandoned(waiting, _told_error(events), self._services.clock_ms())
            await self._services.store.end_queued(waiting.session_id, record)
            return
        self._turns.queue.add(WaitingTurn(Ask.of_waiting(waiting), waiting, events))


def _told_error(events: TurnEvents) -> ApiError:
    """The error of the terminal event, as its readers saw it."""
    error = decode_frame(events.frames[-1]).get("error") or {}
    code = known_code(error.get("code"))
    return ApiError(code, str(error.get("message") or "it ended unstored"))
