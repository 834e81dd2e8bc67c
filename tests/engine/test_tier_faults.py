# SPDX-License-Identifier: Apache-2.0
"""Faults under the tiers: the same tokens as without them, and no page astray.

The scripted model's KV is its token ids and every page is read back by every later step, so a
foreign or stale page changes the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop import tier_desk
from engine.loop.heart import Keeper
from engine.transport import pack_ids
from kvtiers.breaker import BreakerLimits, BreakerStore
from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.host_pool import PoolShape, kept_slots
from kvtiers.host_region import make_region_fd
from kvtiers.objects import object_bytes
from kvtiers.store import Store, StoreState, resolve_parents
from kvtiers.stores import StoreSpec, open_store
from tests.engine.test_tiers import (
    PAGE_SIZE,
    ask,
    l2_bytes,
    make_runner,
    make_store,
    prompt_of,
    settled,
    want,
)
from tests.fakes.live_engine import Collected, LiveEngine, make_request, serve
from tests.fakes.memory_store import MemoryStore
from tests.fakes.mooncake_processes import MooncakeMachine, require_mooncake
from tests.fakes.scripted_runner import ScriptedLayout

PROMPTS = [prompt_of(seed, 33) for seed in range(6)]
TIERS = TiersConfig(l2_bytes=l2_bytes(24), l3_wait_ms=2000)


def guarded(store: MemoryStore) -> Store:
    """As the engine opens a store: no call takes long, and one that fails is cut off."""
    deadlines = Deadlines(probe_s=0.1, call_s=0.1, bytes_per_s=1e9, close_s=0.1)
    limits = BreakerLimits(first_pause_s=0.2, max_pause_s=0.4)
    layout = ScriptedLayout(PAGE_SIZE).fingerprint()
    return BreakerStore(DeadlineStore(store, deadlines), layout, limits)


def damage(store: MemoryStore, change: Callable[[bytes], bytes]) -> None:
    for key in list(store.objects):
        store.objects[key] = change(store.objects[key])


def flip(blob: bytes) -> bytes:
    return blob[:-3] + bytes([blob[-3] ^ 16]) + blob[-2:]


def fail() -> None:
    raise OSError("no such disk")


# name: (before any request, between the two rounds)
Fault = Callable[[MemoryStore], None]


def nothing(store: MemoryStore) -> None:
    pass


def slow(store: MemoryStore) -> None:
    store.before_call = lambda: time.sleep(0.02)


def raising(store: MemoryStore) -> None:
    store.before_call = fail


def hung(store: MemoryStore) -> None:
    store.before_call = lambda: time.sleep(1.0)


def full(store: MemoryStore) -> None:
    store._capacity_bytes = 0


def down(store: MemoryStore) -> None:
    store.state = StoreState.DOWN


def lying(store: MemoryStore) -> None:
    """It says that it has everything, and has half."""
    for key in list(store.objects)[::2]:
        del store.objects[key]


FAULTS: dict[str, tuple[Fault, Fault]] = {
    "slow": (slow, nothing),
    "raises from the start": (raising, nothing),
    "raises later": (nothing, raising),
    "hangs from the start": (hung, nothing),
    "hangs later": (nothing, hung),
    "full": (full, nothing),
    "down later": (nothing, down),
    "lost half": (nothing, lying),
    "lost everything": (nothing, lambda store: store.objects.clear()),
    "flipped bits": (nothing, lambda store: damage(store, flip)),
    "cut short": (nothing, lambda store: damage(store, lambda blob: blob[:-1])),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_store_that_fails_costs_time_alone(tmp_path: Path, name: str) -> None:
    at_first, later = FAULTS[name]
    store = make_store()
    at_first(store)

    async def work(client: EngineClient) -> None:
        for seed, prompt in enumerate(PROMPTS):
            await ask(client, f"a{seed}", prompt)
        await client.drain_tiers(timeout_s=0.5)
        later(store)
        for seed, prompt in enumerate(PROMPTS):
            await ask(client, f"b{seed}", [*prompt, seed + 5])
        store.before_call = lambda: None
        await settled(client)

    engine = LiveEngine(
        str(tmp_path), make_runner(), token_budget=64, tiers=TIERS, store=guarded(store)
    )
    serve(engine, work)


class FollowedStore(MemoryStore):
    """Takes its time while `gate` is clear; knows which page each page follows."""

    def __init__(self) -> None:
        super().__init__(ScriptedLayout(PAGE_SIZE).fingerprint())
        self.parents: dict[str, str] = {}
        self.gate = threading.Event()
        self.before_call = self.wait

    def wait(self) -> None:
        assert self.gate.wait(60)

    def probe(self, keys: Sequence[str]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.objects), len(keys))

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        self.parents |= dict(zip(keys, resolve_parents(keys, parents), strict=True))
        return super().put(keys, blobs, parents)


@pytest.mark.parametrize("is_suspended", [False, True])
@pytest.mark.parametrize("num_l2_pages", [12, 24, 40, 90])
def test_a_slow_store_keeps_no_tail_without_its_head_and_loses_nothing_of_a_suspend(
    tmp_path: Path, num_l2_pages: int, is_suspended: bool
) -> None:
    store = FollowedStore()
    prompts = [prompt_of(seed, 53) for seed in range(4)]  # 13 full pages each

    async def work(client: EngineClient) -> None:
        for seed, prompt in enumerate(prompts[:2]):
            await ask(client, f"a{seed}", prompt, 1)
        parked = pack_ids(prompts[1])
        if is_suspended:
            moving = asyncio.create_task(client.move_prefix(parked, "l3"))
            while (await client.stats())["move_orders"] == 0 and not moving.done():
                await asyncio.sleep(0)
        for seed, prompt in enumerate(prompts[2:]):
            await ask(client, f"b{seed}", prompt, 1)
        store.gate.set()
        if is_suspended:
            await moving
            async with asyncio.timeout(60):  # a busy machine's store may bring none for seconds
                while (moved := await client.move_prefix(parked, "l3")).num_pending:
                    pass
            assert moved.cache == api.CacheHit(l3=52, to_compute=1)
        await settled(client)
        heads = [store.parents[key] for key in store.objects]
        assert all(head in store.objects for head in heads if head)
        assert len(store.objects) >= 13 * (1 if is_suspended else 0)

    tiers = TiersConfig(l2_bytes=l2_bytes(num_l2_pages), l3_wait_ms=0)
    engine = LiveEngine(str(tmp_path), make_runner(80), token_budget=64, tiers=tiers, store=store)
    try:
        serve(engine, work)
    finally:
        store.gate.set()


def test_a_move_to_a_store_that_takes_nothing_is_answered_and_keeps_no_engine_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_desk, "MOVE_STUCK_MS", 500)
    store = make_store()
    store.state = StoreState.DOWN
    prompt = PROMPTS[0]

    async def work(client: EngineClient) -> None:
        await ask(client, "a", prompt, 1)
        moved = await client.move_prefix(pack_ids(prompt), "l3")
        assert moved.cache == api.CacheHit(l1=32, to_compute=1) and moved.num_pending == 8
        # Some tries in half a second (20 a second at most, then two a look), not tens of thousands.
        assert (await client.stats())["store_lost"] <= 8 * 60
        store.state = StoreState.UP
        monkeypatch.setattr(tier_desk, "MOVE_STUCK_MS", tier_desk.MOVE_ANSWER_MS)
        moved = await client.move_prefix(pack_ids(prompt), "l3")
        assert moved.cache == api.CacheHit(l3=32, to_compute=1)

    serve(LiveEngine(str(tmp_path), make_runner(), tiers=TIERS, store=store), work)


@pytest.mark.parametrize("where", ["bodies", "headers"])
def test_memory_that_flips_bits_is_not_believed(tmp_path: Path, where: str) -> None:
    fd = make_region_fd()
    try:

        async def work(client: EngineClient) -> None:
            for seed, prompt in enumerate(PROMPTS):
                await ask(client, f"a{seed}", prompt)
            await settled(client)
            layout = ScriptedLayout(PAGE_SIZE)
            shape = PoolShape(
                num_slots=kept_slots(fd, layout), page_bytes=layout.page_bytes, page_size=PAGE_SIZE
            )
            offset = 256 + 7 if where == "bodies" else 20
            with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
                for slot in range(0, shape.num_slots, 2):
                    memory[shape.slots_offset + slot * shape.slot_bytes + offset] ^= 32
            hits = [
                await ask(client, f"b{seed}", [*prompt, seed + 5])
                for seed, prompt in enumerate(PROMPTS)
            ]
            assert sum(hit.to_compute for hit in hits) > 2 * len(PROMPTS)
            stats = await settled(client)
            assert stats["load_back_lost"] > 0

        keeper = Keeper(l2_fd=fd)
        tiers = TiersConfig(l2_bytes=l2_bytes(60))
        engine = LiveEngine(
            str(tmp_path), make_runner(), token_budget=64, tiers=tiers, keeper=keeper
        )
        serve(engine, work)
    finally:
        os.close(fd)


@pytest.mark.parametrize("seed", range(4))
def test_requests_cancelled_in_every_phase_leave_no_page_behind(tmp_path: Path, seed: int) -> None:
    """Aborts, moves and forgets while pages are on their way down and up."""
    store = make_store()
    rng = random.Random(seed)
    store.before_call = lambda: time.sleep(rng.choice((0.0, 0.002, 0.01)))

    async def one(client: EngineClient, number: int) -> None:
        prompt = [*rng.choice(PROMPTS)[: rng.randrange(9, 34)], 3 + number % 200]
        request = make_request(f"r{number}", prompt, rng.randrange(1, 12))
        await asyncio.sleep(rng.random() * 0.3)
        got = Collected()
        task = asyncio.create_task(got.read(client.generate(request)))
        dice = rng.random()
        if dice < 0.4:
            await asyncio.sleep(rng.random() * 0.03)
            await client.abort(request.request_id)
        elif dice < 0.7:
            tier = rng.choice(("l1", "l2", "l3", "none"))
            await client.move_prefix(pack_ids(prompt), tier)
        await asyncio.wait_for(task, 30)
        assert got.ids == want(prompt, 12)[: len(got.ids)]
        assert got.finished is not None and got.finished.error_code is None
        is_whole = got.finished.reason is not api.FinishReason.ABORTED
        assert not is_whole or got.ids == want(prompt, request.sampling.max_new_tokens)

    async def work(client: EngineClient) -> None:
        for wave in range(3):
            await asyncio.gather(*(one(client, wave * 16 + i) for i in range(16)))
        store.before_call = lambda: None
        await settled(client)

    engine = LiveEngine(
        str(tmp_path), make_runner(), token_budget=32, tiers=TIERS, store=guarded(store)
    )
    serve(engine, work)


@pytest.fixture(params=["memory", "file", "mooncake"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An L3 of each kind, the real ones as an engine opens them."""
    if request.param == "memory":
        yield make_store()
        return
    layout = ScriptedLayout(PAGE_SIZE)
    spec = StoreSpec(
        kind=request.param,
        layout_fingerprint=layout.fingerprint(),
        object_bytes=object_bytes(layout.page_bytes),
        directory=str(tmp_path / "l3"),
        quota_bytes=32 << 20,
        run_dir=str(tmp_path / "mooncake"),
    )
    with contextlib.ExitStack() as stack:
        if request.param == "mooncake":
            require_mooncake()
            machine = MooncakeMachine(tmp_path / "mooncake")
            stack.callback(machine.close)
        store = open_store(spec)
        assert store is not None
        stack.callback(store.close)
        deadline_s = time.monotonic() + 60
        while store.status().state is not StoreState.UP:
            assert time.monotonic() < deadline_s, store.status().reason
            time.sleep(0.02)
        yield store


def test_tenants_under_churn_in_all_tiers_never_get_a_foreign_token(
    tmp_path: Path, any_store: Store
) -> None:
    """Each tenant's prompts share one public head, then carry a canary of its own tokens.

    Same tokens under another salt must be found nowhere; and whatever was evicted, loaded back or
    fetched meanwhile, every answer is the one that follows from the tenant's own tokens.
    """
    head = prompt_of(50, 12)
    canaries = {f"tenant-{place}": [100 + 20 * place + i for i in range(12)] for place in range(4)}
    rng = random.Random(7)

    async def turn(client: EngineClient, number: int, salt: str) -> None:
        prompt = [*head, *canaries[salt], *prompt_of(number % 5, rng.randrange(1, 12))]
        got = Collected()
        request = make_request(f"t{number}", prompt, 6, salt=salt, tenant=salt)
        await asyncio.wait_for(got.read(client.generate(request)), 30)
        assert got.ids == want(prompt, 6)
        assert got.started is not None
        seen[salt] += got.started.cache.l2 + got.started.cache.l3

    seen = dict.fromkeys(canaries, 0)

    async def work(client: EngineClient) -> None:
        own = [*head, *canaries["tenant-0"]]
        await turn(client, 0, "tenant-0")
        await settled(client)
        for salt in ("tenant-1", ""):
            assert (await client.query_prefix(own, salt=salt)).to_compute == len(own)
        for wave in range(12):
            salts = rng.choices(list(canaries), k=6)
            await asyncio.gather(
                *(turn(client, 1 + wave * 6 + i, salt) for i, salt in enumerate(salts))
            )
            moved = rng.choice(list(canaries))
            ids = pack_ids([*head, *canaries[moved]])
            await client.move_prefix(ids, rng.choice(("l2", "l3")), salt=moved)
        await settled(client)

    tiers = TiersConfig(l2_bytes=l2_bytes(20), l3_wait_ms=60_000)
    engine = LiveEngine(
        str(tmp_path), make_runner(16), token_budget=48, tiers=tiers, store=any_store
    )
    serve(engine, work)
    assert all(tokens > 0 for tokens in seen.values()), "every tenant came back from below L1"


def test_a_drain_says_whether_the_store_made_it_safe(tmp_path: Path) -> None:
    store = make_store()

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPTS[0])
        drained = await client.drain_tiers()
        assert (drained.num_pending, drained.is_flushed) == (0, True)
        store.flush = lambda timeout_s: False  # type: ignore[method-assign]
        drained = await client.drain_tiers()
        assert (drained.num_pending, drained.is_flushed) == (0, False)

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, tiers=TIERS, store=store), work)


def test_what_was_promised_is_in_the_store_when_the_engine_has_stopped(tmp_path: Path) -> None:
    store = make_store()
    store.before_call = lambda: time.sleep(0.02)
    started = threading.Event()

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPTS[0])
        started.set()

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, store=store), work)
    assert started.is_set() and len(store.objects) == 8
