# SPDX-License-Identifier: Apache-2.0
"""TurnRunner: the turns that run in this process, from their launch to their stored end.

Does not know: how a turn is accepted, HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from appliance.errors import ApiError
from appliance.grammars import GrammarQuestion
from appliance.services import Services
from appliance.turn_ending import TurnEnding
from appliance.turn_record import DEADLINE
from appliance.turn_run import TurnRun

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.05
MAX_IDLE_POLL_S = 1.0


@dataclass(slots=True)
class _Active:
    run: TurnRun
    task: asyncio.Task[None] | None = None


class TurnRunner:
    """Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._metrics = services.metrics
        self._active: dict[str, _Active] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.ending = TurnEnding(services.store, services.metrics, services.clock_ms)
        services.client.on_restart(lambda hello: self._on_engine_restart())

    @property
    def num_running(self) -> int:
        return len(self._active)

    def runs(self) -> Iterator[TurnRun]:
        """The turns that run now."""
        return (active.run for active in list(self._active.values()))

    def find(self, turn_id: str, session_id: str | None = None) -> TurnRun | None:
        """Return a running turn (of this session)."""
        active = self._active.get(turn_id)
        if active is None or session_id not in (None, active.run.pending.session_id):
            return None
        return active.run

    def launch(self, run: TurnRun, received_s: float) -> None:
        """Run a turn that the store has as pending; too late here, it is the next process'."""
        if self._is_closed:
            self._leave(run)
            return
        run.started_s = received_s
        active = _Active(run)
        self._active[run.turn_id] = active
        active.task = asyncio.create_task(self._drive(run), name=f"turn {run.turn_id}")

    async def wait_idle(self, session_id: str) -> None:
        """Wait until the session has no turn, be it of this process or of another.

        Raises: SessionError.
        """
        for active in list(self._active.values()):
            if active.run.pending.session_id == session_id and active.task is not None:
                await asyncio.wait({active.task})
        wait_s = IDLE_POLL_S
        while (await self._services.store.get(session_id)).current_turn is not None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_IDLE_POLL_S)

    def chore(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside all else."""
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def drain(self, timeout_s: float) -> None:
        """Let running turns finish; those that do not are left for the next API process.

        Their readers are told to come back. A turn that was accepted before may begin meanwhile.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while (tasks := self._tasks()) and (left_s := deadline_s - loop.time()) > 0:
            await asyncio.wait(tasks, timeout=left_s)
        self._is_closed = True
        for run in self.runs():
            self._leave(run)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ending.close()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [active.task for active in self._active.values() if active.task is not None]

    def _leave(self, run: TurnRun) -> None:
        logger.info("turn left for the next process", extra={"turn_id": run.turn_id})
        run.events.detach()

    async def _drive(self, run: TurnRun) -> None:
        deadline = self._arm_deadline(run)
        self._metrics.turns_running.inc()
        try:
            await self._work(run)
            await self.ending.finish(run)
        except Exception:
            logger.exception("turn broke off", extra={"turn_id": run.turn_id})
            await self.ending.break_off(run, ApiError("internal_error", "the turn broke off"))
        finally:
            if deadline is not None:
                deadline.cancel()
            self._metrics.turns_running.dec()
            self._active.pop(run.turn_id, None)

    async def _work(self, run: TurnRun) -> None:
        """Compile what constrains the answer, and sample it."""
        num_ahead = sum(not other.first_token_s for other in self.runs()) - 1
        run.events.emit("turn.queued", {"position": num_ahead})
        toolset = run.response.toolset
        question = GrammarQuestion(
            toolset,
            run.params.choice(toolset),
            run.params.parsed_response_format(),
            self._services.reasoning_of(run.pending.input_token_ids),
        )
        grammars = self._services.grammars
        plan = None if run.stop_cause else grammars.ready(question)
        if plan is None:
            plan = await run.unless_stopped(grammars.compiled(question))
        if plan is not None and plan.fallbacks:
            self._metrics.grammar_fallbacks.inc()
        # One that was taken up has an answer to end with, even if it is to stop by now.
        if run.error is None and (run.is_resumed or not run.stop_cause):
            run.submitted_s = time.monotonic()
            self._metrics.turn_submit_seconds.observe(run.submitted_s - run.started_s)
            await run.run(plan)

    def _arm_deadline(self, run: TurnRun) -> asyncio.TimerHandle | None:
        if run.pending.deadline_ms is None:
            return None
        spent_ms = self._services.clock_ms() - run.pending.created_at_ms
        wait_s = max(0.0, (run.pending.deadline_ms - spent_ms) / 1000)
        return asyncio.get_running_loop().call_later(
            wait_s, lambda: self.chore(run.request_stop(DEADLINE))
        )

    def _on_engine_restart(self) -> None:
        self._metrics.engine_restarts.inc()
        for run in self.runs():
            run.on_engine_restart()
            if run.stop_cause:  # the new engine has not heard that it shall stop
                self.chore(run.request_stop(run.stop_cause))
