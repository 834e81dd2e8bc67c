# SPDX-License-Identifier: Apache-2.0
"""An engine over real Mooncake processes that die or stand still under its moves: the same tokens.

The processes are looked after as the supervisor does; the engine has the guards it always has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import TiersConfig
from kvtiers.breaker import BreakerLimits, BreakerStore
from kvtiers.mooncake_store import MooncakeStore
from kvtiers.objects import object_bytes
from kvtiers.store import Store, StoreState, StoreStatus
from tests.engine.test_tiers import PAGE_SIZE, ask, l2_bytes, make_runner, prompt_of, settled
from tests.fakes.live_engine import LiveEngine, serve
from tests.fakes.mooncake_processes import HASTY, MooncakeMachine, require_mooncake
from tests.fakes.phase_gate import PhaseGate
from tests.fakes.scripted_runner import ScriptedLayout
from tests.fakes.signals import kill_now, stop_now

LAYOUT = ScriptedLayout(PAGE_SIZE)
SOON = BreakerLimits(failures=2, first_pause_s=0.2, max_pause_s=0.4)
TIERS = TiersConfig(l2_bytes=l2_bytes(12), l3_wait_ms=500)


class WatchedMachine(MooncakeMachine):
    """Its processes are looked after by a thread."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            self.children.watch()

    def close(self) -> None:
        self._is_over.set()
        self._watcher.join()
        super().close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[WatchedMachine]:
    require_mooncake()
    machine = WatchedMachine(tmp_path / "mooncake")
    yield machine
    machine.close()


class GatedStore:
    """A store whose puts and gets pass a gate, once there is one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.gate: PhaseGate | None = None
        self.kind = store.kind
        self.probe = store.probe
        self.surely_lacks = store.surely_lacks
        self.remove = store.remove
        self.flush = store.flush
        self.close = store.close

    def _enter(self, phase: str) -> None:
        if self.gate is not None:
            self.gate.enter(phase)

    def status(self) -> StoreStatus:
        return self._store.status()

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        self._enter("store")
        return self._store.put(keys, blobs, parents)

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        self._enter("fetch")
        return self._store.get(keys, into)


@pytest.mark.parametrize(
    ("victim", "fault", "phase"),
    [
        ("mooncake_master", "killed", "store"),
        ("mooncake_master", "stopped", "fetch"),
        ("mooncake_client", "killed", "fetch"),
        ("mooncake_client", "stopped", "store"),
    ],
)
def test_a_process_of_the_store_that_fails_under_a_move_costs_time_alone(
    tmp_path: Path, machine: WatchedMachine, victim: str, fault: str, phase: str
) -> None:
    bare = MooncakeStore(
        machine.endpoints, LAYOUT.fingerprint(), object_bytes(LAYOUT.page_bytes), HASTY
    )
    store = GatedStore(BreakerStore(bare, LAYOUT.fingerprint(), SOON))
    gate = PhaseGate(phase)
    seeds = iter(range(100_000))
    stopped: list[int] = []

    async def up() -> None:
        while store.status().state is not StoreState.UP:
            await asyncio.sleep(0.02)

    async def from_the_store(client: EngineClient, name: str, *, times: int = 40) -> None:
        """Prompts go down to the store and come back from there, sooner or later."""
        for number in range(times):
            await up()
            before = (await client.stats())["l3_cached_prompt_tokens"]
            prompts = [prompt_of(next(seeds) * 7 + len(name), 33) for _ in range(4)]  # 8 pages each
            for place, prompt in enumerate(prompts):
                await ask(client, f"{name} {number} {place}", prompt)
            await client.drain_tiers(timeout_s=5)
            for place, prompt in enumerate(prompts):
                await ask(client, f"{name} {number} {place} again", [*prompt, 5 + place])
            if (await client.stats())["l3_cached_prompt_tokens"] > before:
                return
        pytest.fail("nothing comes back from the store")

    async def work(client: EngineClient) -> None:
        await from_the_store(client, "before")
        store.gate = gate
        prompts = [prompt_of(next(seeds), 33) for _ in range(4)]
        held = asyncio.create_task(asyncio.to_thread(gate.is_in.wait, 60))

        async def asking() -> None:
            number = 0
            while not (store.gate is None and number % 8 == 0):
                number += 1
                prompt = [*prompts[number % 4], 5 + number % 200]
                await ask(client, f"under way {number}", prompt)

        under_way = asyncio.create_task(asking())
        assert await held, f"no {phase} came"
        pid = machine.children.pids[victim]
        if fault == "killed":
            kill_now(pid)
        else:
            stop_now(pid)
            stopped.append(pid)
        gate.may_go_on.set()
        store.gate = None
        await under_way
        for place, prompt in enumerate(prompts):
            await ask(client, f"behind it {place}", [*prompt, 9])
        if stopped:
            os.kill(stopped.pop(), signal.SIGCONT)
        await from_the_store(client, "after")
        await settled(client)

    engine = LiveEngine(str(tmp_path), make_runner(), token_budget=64, tiers=TIERS, store=store)
    try:
        serve(engine, work)
    finally:
        gate.may_go_on.set()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
