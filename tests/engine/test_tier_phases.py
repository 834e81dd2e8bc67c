# SPDX-License-Identifier: Apache-2.0
"""Every kind of move, held in its middle, under every fault: the same tokens, no page astray.

One request on an engine that knows nothing, over a store that has its first eight pages, goes
through all of them: probe, fetch (L3 to L2), load-back (L2 to L1), and for the pages it adds
write-back (L1 to L2) and store (L2 to L3). The kill of each phase is in test_tier_kills.py.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.heart import Keeper
from kvtiers.breaker import BreakerLimits, BreakerStore
from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.host_region import make_region_fd
from kvtiers.objects import HEADER_BYTES
from kvtiers.store import Store, StoreState
from tests.engine.test_tiers import PAGE_SIZE, ask, l2_bytes, make_runner, prompt_of, settled, want
from tests.fakes.live_engine import Collected, LiveEngine, make_request, serve
from tests.fakes.phase_gate import PHASES, STORE_PHASES, GatedStore, PhaseGate, pool_of, put_gate
from tests.fakes.scripted_runner import ScriptedLayout

PROMPT = prompt_of(1, 33)  # eight full pages, which the store has
LATER = [*PROMPT, 5, 6]
NUM_NEW = 8  # with them ten full pages
UNSEEN = [7, 8, 9]  # less than a page: nothing to look for
TIERS = TiersConfig(l2_bytes=l2_bytes(24), l3_wait_ms=60_000)
SOON, NEVER = 0.1, 120.0


@functools.cache
def stored_pages() -> dict[str, bytes]:
    """What an engine that has answered `PROMPT` leaves in its store."""
    store = GatedStore(ScriptedLayout(PAGE_SIZE).fingerprint())

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPT, 1)
        await settled(client)

    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        serve(LiveEngine(folder, make_runner(), token_budget=64, tiers=TIERS, store=store), work)
    assert len(store.objects) == 8
    return store.objects


class Case:
    """An engine held in `phase` of one request, with what may happen to it meanwhile."""

    def __init__(self, run_dir: str, phase: str, *, is_left_behind: bool = False) -> None:
        self.phase = phase
        self.gate = PhaseGate(phase)
        self.store = GatedStore(ScriptedLayout(PAGE_SIZE).fingerprint())
        self.store.objects = dict(stored_pages())
        self.store.gate = self.gate
        self.runner = make_runner()
        # Only the held call overruns: a probe that did so would be a miss, and no fetch would come.
        overrun = (phase == "probe", phase != "probe") if is_left_behind else (False, False)
        probe_s, call_s = (SOON if each else NEVER for each in overrun)
        deadlines = Deadlines(probe_s=probe_s, call_s=call_s, bytes_per_s=1e9, close_s=0.1)
        limits = BreakerLimits(first_pause_s=0.1, max_pause_s=0.2)
        layout = ScriptedLayout(PAGE_SIZE).fingerprint()
        guarded: Store = BreakerStore(DeadlineStore(self.store, deadlines), layout, limits)
        self.engine = LiveEngine(
            run_dir,
            self.runner,
            token_budget=64,
            tiers=TIERS,
            store=guarded,
            prepare=lambda server: put_gate(server, self.gate),
        )
        self.got = Collected()

    async def start(self, client: EngineClient) -> None:
        """The request runs, and its move of the phase is held."""
        request = make_request("r", LATER, NUM_NEW)
        self.answer = asyncio.create_task(self.got.read(client.generate(request)))
        assert await asyncio.to_thread(self.gate.is_in.wait, 60), f"no {self.phase} came"

    async def finish(self, client: EngineClient) -> dict[str, float]:
        """It goes on: its tokens, those of the same again, and every page in one place."""
        self.gate.may_go_on.set()
        await asyncio.wait_for(self.answer, 60)
        finished = self.got.finished
        assert finished is not None and finished.error_code is None
        expected = want(LATER, NUM_NEW)
        if finished.reason is api.FinishReason.ABORTED:
            assert self.got.ids == expected[: len(self.got.ids)]
        else:
            assert self.got.ids == expected
        self.store.before_call = lambda: None
        for number in range(2):
            await ask(client, f"again {number}", [*LATER, 9 + number], NUM_NEW)
        stats = await settled(client)
        assert stats["owned_pages"] == 0
        return stats

    def for_each_slot(self, change: Callable[[memoryview], None]) -> None:
        pool = pool_of(self.engine.server)
        for page in range(pool.num_slots):
            change(pool.slot(page))


Fault = Callable[[Case, EngineClient], Awaitable[None]]


async def delayed(case: Case, client: EngineClient) -> None:
    """Others are answered meanwhile."""
    await ask(client, "other", UNSEEN, 1)


async def cancelled(case: Case, client: EngineClient) -> None:
    await client.abort("r")
    if case.phase in ("probe", "fetch", "load_back"):  # else it has its tokens already
        case.gate.may_go_on.set()
        await asyncio.wait_for(case.answer, 60)
        assert case.got.finished is not None
        assert case.got.finished.reason is api.FinishReason.ABORTED


async def failing(case: Case, client: EngineClient) -> None:
    def fail() -> None:
        raise OSError("it broke off")

    case.gate.then = fail


async def bits_flipped(case: Case, client: EngineClient) -> None:
    def flip(slot: memoryview) -> None:
        slot[HEADER_BYTES + 3] ^= 16

    case.for_each_slot(flip)
    for key, blob in case.store.objects.items():
        case.store.objects[key] = blob[:-3] + bytes([blob[-3] ^ 16]) + blob[-2:]


async def cut_short(case: Case, client: EngineClient) -> None:
    for key, blob in case.store.objects.items():
        case.store.objects[key] = blob[:-1]


async def headers_gone(case: Case, client: EngineClient) -> None:
    """What says of the bytes of L2 and L3 which page they are."""

    def wipe(slot: memoryview) -> None:
        slot[:HEADER_BYTES] = bytes(HEADER_BYTES)

    case.for_each_slot(wipe)
    for key, blob in case.store.objects.items():
        case.store.objects[key] = bytes(HEADER_BYTES) + blob[HEADER_BYTES:]


async def objects_swapped(case: Case, client: EngineClient) -> None:
    """Whole objects, each under the name of another."""
    keys = list(case.store.objects)
    blobs = list(case.store.objects.values())
    case.store.objects.update(zip(keys, blobs[1:] + blobs[:1], strict=True))


async def objects_gone(case: Case, client: EngineClient) -> None:
    case.store.objects.clear()


async def store_full(case: Case, client: EngineClient) -> None:
    case.store._capacity_bytes = 0


async def store_down(case: Case, client: EngineClient) -> None:
    case.store.state = StoreState.DOWN


async def store_slow(case: Case, client: EngineClient) -> None:
    case.store.before_call = lambda: time.sleep(0.02)


async def another_writer(case: Case, client: EngineClient) -> None:
    """Another engine stores the very pages that this one is about to."""
    case.store.gate = None

    async def work(other: EngineClient) -> None:
        await ask(other, "r", LATER, NUM_NEW)
        await settled(other)

    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        engine = LiveEngine(folder, make_runner(), token_budget=64, tiers=TIERS, store=case.store)
        await asyncio.to_thread(serve, engine, work)
    assert len(case.store.objects) == 10


async def the_same_asked_twice(case: Case, client: EngineClient) -> None:
    """Two more requests want the same pages at the same time."""
    more = [
        asyncio.create_task(Collected().read(client.generate(make_request(name, LATER, NUM_NEW))))
        for name in ("twin", "triplet")
    ]
    await client.stats()  # they have come
    case.gate.may_go_on.set()
    for task in more:
        assert (await asyncio.wait_for(task, 60)).ids == want(LATER, NUM_NEW)


FAULTS: dict[str, Fault] = {
    "delayed": delayed,
    "cancelled": cancelled,
    "fails": failing,
    "bits flipped": bits_flipped,
    "objects cut short": cut_short,
    "headers gone": headers_gone,
    "objects under other names": objects_swapped,
    "objects gone": objects_gone,
    "store full": store_full,
    "store down": store_down,
    "store slow": store_slow,
    "another writer of the same keys": another_writer,
    "asked for twice": the_same_asked_twice,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_in_the_middle_of_a_move_changes_no_token(
    tmp_path: Path, phase: str, fault: str
) -> None:
    case = Case(str(tmp_path), phase)

    async def work(client: EngineClient) -> None:
        await case.start(client)
        await FAULTS[fault](case, client)
        await case.finish(client)

    try:
        serve(case.engine, work)
    finally:
        case.gate.may_go_on.set()


@pytest.mark.parametrize("phase", STORE_PHASES)
def test_a_call_of_the_store_that_hangs_is_left_behind(tmp_path: Path, phase: str) -> None:
    """The request and the next ones are answered while it hangs; then it comes back."""
    case = Case(str(tmp_path), phase, is_left_behind=True)

    async def work(client: EngineClient) -> None:
        await case.start(client)
        await asyncio.wait_for(case.answer, 60)
        assert case.got.ids == want(LATER, NUM_NEW)
        await ask(client, "other", prompt_of(2, 21), 3)
        assert not case.gate.may_go_on.is_set()
        await case.finish(client)

    try:
        serve(case.engine, work)
    finally:
        case.gate.may_go_on.set()


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_that_stops_in_the_middle_of_a_move_leaves_whole_pages(
    tmp_path: Path, phase: str
) -> None:
    """The next one, over the same L2 and L3, says the same and reads nothing half."""
    fd = make_region_fd()
    case = Case(str(tmp_path), phase)
    case.engine._keeper = Keeper(l2_fd=fd)

    async def stop(client: EngineClient) -> None:
        await case.start(client)
        stopping = asyncio.create_task(asyncio.to_thread(case.engine.stop))
        while case.engine.server._stop_at_s is None:
            await asyncio.sleep(0.002)
        case.gate.may_go_on.set()
        await stopping
        case.answer.cancel()

    async def go_on(client: EngineClient) -> None:
        hit = await ask(client, "again", [*LATER, 9], NUM_NEW)
        assert hit.l2 + hit.l3 == 32, "all that was whole before"
        await settled(client)
        checked = await client.verify_tiers()
        assert checked.bad == {"l2": 0, "l3": 0} and checked.checked["l3"] >= 8

    try:
        serve(case.engine, stop)
        case.store.gate = None
        run_dir = tmp_path / "next"
        run_dir.mkdir()
        after = LiveEngine(
            str(run_dir),
            make_runner(),
            token_budget=64,
            tiers=TIERS,
            store=case.store,
            keeper=Keeper(l2_fd=fd),
        )
        serve(after, go_on)
    finally:
        case.gate.may_go_on.set()
        os.close(fd)
