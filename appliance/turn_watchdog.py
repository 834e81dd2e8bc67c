# SPDX-License-Identifier: Apache-2.0
"""TurnWatchdog: notices turns that make no progress, tells their readers, and says so in health.

Progress is any word of the engine about a turn. A turn that is stalled is not ended: its client
decides, or its deadline. Does not know: HTTP, why nothing moves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from appliance.services import Services
from appliance.turn_run import TurnRun
from appliance.turn_runner import TurnRunner

logger = logging.getLogger(__name__)

STALL_S = 30.0
LOOK_EVERY_S = 1.0


def declare_stalls(registry: CollectorRegistry) -> tuple[Gauge, Counter]:
    """Declare the series of this module: turns that are stalled now, and stalls so far."""
    return (
        Gauge(
            "moorage_turns_stalled",
            f"Turns without any progress for {STALL_S:g} s or more.",
            registry=registry,
        ),
        Counter(
            "moorage_turn_stalls_total",
            "Times that a turn made no progress for too long, by what it waited for.",
            ["phase"],
            registry=registry,
        ),
    )


class TurnWatchdog:
    """One per process."""

    def __init__(self, services: Services, runner: TurnRunner, *, stall_s: float = STALL_S) -> None:
        self._runner = runner
        self._stall_s = stall_s
        self._stalled: dict[str, TurnRun] = {}
        self._gauge, self._counter = declare_stalls(services.metrics.registry)

    @property
    def stalled(self) -> list[dict[str, Any]]:
        """The turns that make no progress now."""
        now_s = time.monotonic()
        return [
            {
                "turn_id": run.turn_id,
                "phase": run.phase,
                "waiting_s": round(now_s - run.progress_s, 1),
            }
            for run in self._stalled.values()
        ]

    async def run(self) -> None:
        """Look at all running turns again and again, until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._stall_s / 4))
            self.look()

    def look(self) -> None:
        """Compare every running turn with the clock."""
        now_s = time.monotonic()
        stalled = {
            run.turn_id: run
            for run in self._runner.runs()
            if run.finished is None and now_s - run.progress_s > self._stall_s
        }
        for turn_id, run in stalled.items():
            if turn_id not in self._stalled:
                self._tell(run, now_s)
        self._stalled = stalled
        self._gauge.set(len(stalled))

    def _tell(self, run: TurnRun, now_s: float) -> None:
        waiting_s = round(now_s - run.progress_s, 1)
        logger.warning(
            "no progress for %.0f s (%s)", waiting_s, run.phase, extra={"turn_id": run.turn_id}
        )
        self._counter.labels(run.phase).inc()
        run.events.emit("turn.stalled", {"phase": run.phase, "waiting_s": waiting_s})
