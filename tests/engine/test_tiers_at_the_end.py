# SPDX-License-Identifier: Apache-2.0
"""An engine stops while a move hangs: what the other tickets bring is stored, and made to last.

Each kind of move hangs in turn, until the store is asked to make its pages last: nothing else lets
it go on. When the engine stops, four pages are on their way from L1 to L2, and none of them is
stored yet.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.server import EngineServer
from engine.loop.tier_plane import Mover, TierPlane
from engine.transport import pack_ids
from kvtiers.device_memory import Body, DeviceMemory, Incoming, Wait
from kvtiers.layered_load import LayeredLoad
from kvtiers.transfer import BATCH, MoveKind
from tests.engine.test_tiers import PAGE_SIZE, ask, l2_bytes, make_runner, prompt_of, settled
from tests.fakes.live_engine import Collected, LiveEngine, make_request, serve
from tests.fakes.memory_store import MemoryStore
from tests.fakes.scripted_runner import ScriptedLayout

NUM_PAGES = BATCH["cpu"][MoveKind.WRITE_BACK]
LONGEST_S = 30.0


class Hang:
    """`kind`: of the move that hangs, once `is_set_up`. A write-back before it waits for the end of
    the engine alone."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_set_up = False
        self.stops = threading.Event()  # the engine does
        self.is_flushed = threading.Event()
        self.num_reads = 0

    def read(self) -> None:
        if not self.is_set_up:
            return
        self.num_reads += 1
        if self.num_reads == 1:
            self.stops.wait(LONGEST_S)
        else:
            self.enter("write_back")

    def enter(self, kind: str) -> None:
        if self.is_set_up and kind == self.kind:
            self.is_flushed.wait(LONGEST_S)


class HangingMemory:
    """L1, copied to and from as `hang` says."""

    kind = "cpu"

    def __init__(self, memory: DeviceMemory, hang: Hang) -> None:
        self._memory = memory
        self._hang = hang

    def read(self, pages: Sequence[int], into: Sequence[Body]) -> None:
        self._hang.read()
        self._memory.read(pages, into)

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        self._hang.enter("load_back")
        return self._memory.write(pages)

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        self._memory.write_layers(pages, load)


class HangingStore(MemoryStore):
    """Notes of each flush how long it may take, and how many objects there are."""

    def __init__(self, hang: Hang) -> None:
        super().__init__(ScriptedLayout(PAGE_SIZE).fingerprint())
        self._hang = hang
        self.flushes: list[tuple[float, int]] = []

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        self._hang.enter("fetch")
        return super().get(keys, into)

    def flush(self, timeout_s: float) -> bool:
        self.flushes.append((timeout_s, len(self.objects)))
        self._hang.is_flushed.set()
        return super().flush(timeout_s)


async def until(holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < limit_s, "it never comes to that"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("kind", ["write_back", "load_back", "fetch"])
def test_a_move_that_hangs_keeps_nothing_else_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("engine.loop.server.TIER_FLUSH_S", LONGEST_S)
    hang = Hang(kind)
    store = HangingStore(hang)
    planes: list[TierPlane] = []

    def prepare(server: EngineServer) -> None:
        plane = server._tiers._plane
        assert plane is not None
        plane.transfers._device = HangingMemory(plane.transfers._device, hang)
        finish, wait_acked = plane.finish, plane.transfers.wait_acked

        def wait_less(timeout_s: float) -> bool:
            """Half of a time that is enough for a busy machine is too long for a test."""
            return wait_acked(min(timeout_s, 3.0))

        plane.transfers.wait_acked = wait_less  # type: ignore[method-assign]

        def watched(control: Mover, timeout_s: float, *, may_plan: bool = True) -> None:
            store.flushes.clear()
            hang.stops.set()
            finish(control, timeout_s, may_plan=may_plan)

        plane.finish = watched  # type: ignore[method-assign]
        planes.append(plane)

    engine = LiveEngine(
        str(tmp_path),
        make_runner(num_pages=32),
        token_budget=64,
        tiers=TiersConfig(l2_bytes=l2_bytes(40), l3_wait_ms=60_000, overlap_loads="off"),
        store=store,
        prepare=prepare,
    )
    before = prompt_of(1, 4 * PAGE_SIZE + 1)
    # Of the pages of one, the second half is in the batch that hangs.
    fresh = prompt_of(2, (2 if kind == "write_back" else 1) * NUM_PAGES * PAGE_SIZE + 1)

    async def work(client: EngineClient) -> None:
        plane = planes[0]
        await ask(client, "before", before, 1)
        await settled(client)
        await client.move_prefix(pack_ids(before), "l3" if kind == "fetch" else "l2")
        await settled(client)
        num_before = len(store.objects)
        hang.is_flushed.clear()
        hang.is_set_up = True
        await ask(client, "fresh", fresh, 1)
        await until(lambda: hang.num_reads == 1)
        readings = []
        if kind != "write_back":
            num_moves = plane.num_in_flight
            request = make_request("again", [*before, 9], 1)
            readings.append(asyncio.create_task(Collected().read(client.generate(request))))
            await until(lambda: plane.num_in_flight > num_moves)
        await asyncio.to_thread(engine.stop)
        for reading in readings:
            reading.cancel()
        timeout_s, num_objects = store.flushes[0]
        assert timeout_s > 0 and num_objects == num_before + NUM_PAGES
        # What hung went on then, and is not lost either.
        assert plane.num_in_flight == 0
        assert len(store.objects) == num_before + len(fresh) // PAGE_SIZE
        assert store.flushes[-1][1] == len(store.objects)

    serve(engine, work)
