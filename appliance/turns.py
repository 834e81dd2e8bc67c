# SPDX-License-Identifier: Apache-2.0
"""TurnService: all turns of this API process; the one use case of the appliance.

They are accepted by the intake, run by the runner and looked at through the reader; what stops
them is here. Does not know: HTTP, SSE, how items become tokens.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from appliance.errors import ApiError
from appliance.history_room import HistoryRoom
from appliance.remote_cancels import UNENDED, RemoteCancels
from appliance.services import Services
from appliance.turn_intake import TurnIntake
from appliance.turn_preparation import Ask
from appliance.turn_queue import TurnQueue
from appliance.turn_reader import TurnReader
from appliance.turn_record import CANCEL
from appliance.turn_run import TurnRun
from appliance.turn_runner import TurnRunner

logger = logging.getLogger(__name__)

CANCEL_WAIT_S = 30.0
BEGIN_POLL_S = 0.01


class TurnService:
    """See the module."""

    def __init__(self, services: Services, room: HistoryRoom) -> None:
        self._services = services
        self.runner = TurnRunner(services)
        self._intake = TurnIntake(services, room, self.runner, self.cancel)
        self.reader = TurnReader(services, self.runner, self.queue)
        self.remote = RemoteCancels(services, self.runner, lambda: self.queue, self.reader)
        self.is_draining = False

    @property
    def queue(self) -> TurnQueue:
        """The turns that wait."""
        return self._intake.queue

    @property
    def num_running(self) -> int:
        return self.runner.num_running

    def is_here(self, turn_id: str) -> bool:
        """Whether a turn begins, waits, runs or is yet to be ended in this process."""
        return (
            self._intake.is_beginning(turn_id)
            or self.queue.find_turn(turn_id) is not None
            or self.runner.find(turn_id) is not None
            or self.runner.ending.owes(turn_id)
        )

    async def start(self, ask: Ask) -> str:
        """Accept a turn, or find the one that its idempotency key names; return its id.

        Raises: the errors of the session room and of tools_schema; ApiError.
        """
        if self.is_draining:
            raise ApiError("draining", "the appliance is stopping")
        return await self._intake.start(ask)

    async def cancel(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Stop a turn and return it as it ended; a turn that has ended stays as it is.

        One that another process runs is stopped there. Raises: StoreError where it stopped and the
        store does not take its end for now.
        """
        await self._services.store.get(session_id, tenant=tenant)
        while (waiting := self.queue.find(session_id, turn_id)) is not None:
            if not waiting.is_beginning:
                await self.queue.cancel(waiting)
                break
            await asyncio.sleep(BEGIN_POLL_S)
        run = self.runner.find(turn_id, session_id)
        if run is not None:
            await run.request_stop(CANCEL)
            await self._wait_stopped(run)
        await self.runner.ending.settle(turn_id)
        turn = await self.reader.get(tenant, session_id, turn_id)
        if run is None and turn["status"] in UNENDED:
            return await self.remote.cancel(tenant, session_id, turn_id)
        return turn

    async def _wait_stopped(self, run: TurnRun) -> None:
        """Wait until a turn's end is stored. Raises: SessionError where the store refuses it."""
        ending = self.runner.ending
        deadline_s = asyncio.get_running_loop().time() + CANCEL_WAIT_S
        closed = asyncio.ensure_future(run.events.wait_closed())
        try:
            while not closed.done():
                await asyncio.wait({closed}, timeout=0.1)
                trouble = ending.trouble_of(run.turn_id)
                if trouble is not None and not closed.done():
                    text = f"the turn has stopped, its end is not stored yet: {trouble}"
                    raise type(trouble)(text)
                if asyncio.get_running_loop().time() > deadline_s:
                    logger.warning(
                        "cancel goes on in the background", extra={"turn_id": run.turn_id}
                    )
                    return
        finally:
            closed.cancel()

    async def cancel_waiting(self, session_id: str) -> None:
        """Cancel every turn that waits in a session."""
        await self.queue.cancel_all(session_id)

    def cancel_when_unread(self, session_id: str, turn_id: str) -> None:
        """Cancel this turn, be it waiting or running, as soon as its last reader is gone."""
        events = self._services.journals.find(session_id, turn_id)
        if events is not None:
            events.on_readers_gone = lambda: self.runner.chore(
                self._stop_unread(session_id, turn_id)
            )

    async def _stop_unread(self, session_id: str, turn_id: str) -> None:
        while (waiting := self.queue.find(session_id, turn_id)) is not None:
            if not waiting.is_beginning:
                await self.queue.cancel(waiting)
                return
            await asyncio.sleep(BEGIN_POLL_S)
        run = self.runner.find(turn_id)
        if run is not None:
            await run.request_stop(CANCEL)

    async def drain(self, timeout_s: float) -> None:
        """Let running turns finish; what does not is left for the next API process."""
        self.is_draining = self.reader.is_draining = True
        await self.queue.close()
        await self.runner.drain(timeout_s)
