# SPDX-License-Identifier: Apache-2.0
"""Cancels of turns that another API process runs: word is left in the store, and seen to there.

A process looks for word while it has turns, so an idle one asks nothing. Word about a turn whose
process is dead waits for whoever takes the turn up. Does not know: HTTP, how a turn is stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from appliance.services import Services
from appliance.turn_queue import TurnQueue
from appliance.turn_reader import TurnReader
from appliance.turn_record import CANCEL
from appliance.turn_runner import TurnRunner
from sessions.errors import SessionError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
WAIT_S = 40.0  # longer than it takes until the turns of a dead process are taken up
UNENDED = ("running", "queued")


class RemoteCancels:
    """Belongs to one event loop. `look_every_s`: how soon word is seen."""

    def __init__(
        self,
        services: Services,
        runner: TurnRunner,
        queue: Callable[[], TurnQueue],
        reader: TurnReader,
        *,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._services = services
        self._runner = runner
        self._queue = queue
        self._reader = reader
        self._look_every_s = look_every_s
        self._seen: set[str] = set()  # turns of this process that were told to stop

    async def cancel(self, tenant: str | None, session_id: str, turn_id: str) -> dict[str, Any]:
        """Have a turn stopped where it runs, and return it as it ended.

        One that did not end in time is returned as it is; the word stays. Raises: SessionError.
        """
        store = self._services.store
        await store.ask_cancel(turn_id, self._services.clock_ms())
        deadline_s = asyncio.get_running_loop().time() + WAIT_S

        async def look() -> dict[str, Any]:
            return await self._reader.get(tenant, session_id, turn_id)

        turn = await look()
        while turn["status"] in UNENDED and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(self._look_every_s)
            turn = await look()
        if turn["status"] not in UNENDED:
            await store.forget_cancels([turn_id])
        return turn

    async def run(self) -> None:
        """Look for word about the turns of this process, until cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                await self.look()
            except SessionError as error:
                logger.warning("cancels of other processes not looked at: %s", error)

    async def look(self) -> None:
        """Stop the turns of this process that others want stopped."""
        if not self._runner.num_running and not self._queue().num_waiting and not self._seen:
            return
        for turn_id in await self._services.store.asked_cancels():
            stop = self._stopper(turn_id)
            if stop is not None:
                logger.info("cancelled from another process", extra={"turn_id": turn_id})
                self._seen.add(turn_id)
                await stop()
        ended = {turn_id for turn_id in self._seen if not self._is_here(turn_id)}
        if ended:
            await self._services.store.forget_cancels(ended)
            self._seen -= ended

    def _stopper(self, turn_id: str) -> Callable[[], Awaitable[None]] | None:
        """What stops a turn of this process; None where there is nothing (more) to do yet."""
        run, waiting = self._runner.find(turn_id), self._queue().find_turn(turn_id)
        if waiting is not None and not waiting.is_beginning:
            return lambda: self._queue().cancel(waiting)
        if run is not None and not run.stop_cause:
            return lambda: run.request_stop(CANCEL)
        return None

    def _is_here(self, turn_id: str) -> bool:
        is_waiting = self._queue().find_turn(turn_id) is not None
        return is_waiting or self._runner.find(turn_id) is not None
