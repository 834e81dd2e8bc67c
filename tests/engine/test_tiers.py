# SPDX-License-Identifier: Apache-2.0
"""Pages go down the tiers and come back: the real loop, scheduler and transfers, a scripted model.

The scripted model's KV is its token ids, so a page that came back wrong changes tokens or fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from _scheduler import Scheduler, SchedulerConfig
from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig, TiersConfig
from engine.errors import ConfigError, QueryRefusedError
from engine.execution.batch import ForwardBatch
from engine.loop.control_plane import ControlPlane
from engine.loop.heart import Keeper
from engine.loop.outbox import Outbox
from engine.loop.replay import read_log, replay
from engine.loop.server import EngineServer
from engine.loop.tier_plane import TierPlane
from engine.loop.tier_setup import build_lower_tiers
from engine.transport import pack_ids
from kvtiers.file_store import FileStore
from kvtiers.host_pool import HostPool, PoolShape, kept_slots
from kvtiers.host_region import make_region_fd
from kvtiers.keys import ObjectKeys
from kvtiers.objects import HEADER_BYTES
from kvtiers.store import StoreState
from tests.fakes.live_engine import EOS, LiveEngine, make_request, run, serve
from tests.fakes.memory_store import MemoryStore
from tests.fakes.scripted_runner import (
    ScriptedLayout,
    ScriptedRunner,
    expected_tokens,
    hashed_script,
)

VOCAB = 300
PAGE_SIZE = 4
SCRIPT = hashed_script(VOCAB)
Work = Callable[[EngineClient], Awaitable[None]]


def make_runner(num_pages: int = 16) -> ScriptedRunner:
    return ScriptedRunner(
        SCRIPT, vocab_size=VOCAB, page_size=PAGE_SIZE, num_pages=num_pages, max_context_len=60
    )


class PairRunner(ScriptedRunner):
    """Holds the second step that two requests share: the last of the one that asks for two ids."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if len(batch.row_slots) == 2 and self.row_counts.count(2) == 1:
            self.hold_at = self.num_steps
        return super().forward(batch)


def make_store() -> MemoryStore:
    return MemoryStore(ScriptedLayout(PAGE_SIZE).fingerprint())


def prompt_of(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * 104729) % (VOCAB - 3) for i in range(length)]


def want(prompt: list[int], num: int) -> list[int]:
    return expected_tokens(SCRIPT, prompt, num, stop_ids=[EOS], banned_ids=(0, 1))


async def settled(client: EngineClient) -> dict[str, float]:
    """Statistics once nothing moves; every page is in its one place."""
    limit_s = time.monotonic() + 60
    while True:  # a page that L2 had no room for is tried again by itself
        await client.drain_tiers()
        stats = await client.stats()
        if stats["transfers_in_flight"] == 0:
            break
        assert time.monotonic() < limit_s, "the tiers do not come to rest"
    held = sum(stats[f"{kind}_pages"] for kind in ("free", "owned", "cached", "in_flight"))
    assert held == stats["num_pages"]
    lower = stats["free_l2_pages"] + stats["cached_l2_pages"] + stats["in_flight_l2_pages"]
    assert lower == stats["num_l2_pages"]
    assert stats["in_flight_pages"] == stats["in_flight_l2_pages"] == 0
    assert stats["transfers_in_flight"] == 0
    return stats


async def ask(client: EngineClient, name: str, prompt: list[int], num: int = 3) -> api.CacheHit:
    """Run a request, check its tokens, and say what it found."""
    result = await run(client, make_request(name, prompt, num))
    assert result.ids == want(prompt, num)
    assert result.started is not None
    return result.started.cache


def test_what_l1_had_no_room_for_comes_back_from_l2(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompts = [prompt_of(seed, 33) for seed in range(6)]
        for seed, prompt in enumerate(prompts):
            hit = await ask(client, f"a{seed}", prompt)
            assert hit.to_compute == 33
        await settled(client)
        for seed, prompt in enumerate(prompts):
            hit = await ask(client, f"b{seed}", prompt)
            assert hit.l1 + hit.l2 == 32 and hit.to_compute == 1
        stats = await settled(client)
        assert stats["load_back_pages"] > 20
        assert stats["write_back_lost"] == stats["load_back_lost"] == 0

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64), work)


def test_without_l2_there_is_one_tier_and_it_says_so(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(1, 33)
        await ask(client, "a", prompt, 1)
        states = {tier.tier: tier.state for tier in await client.tiers()}
        assert states == {"l1": "up", "l2": "off", "l3": "off"}
        reply = await client.move_prefix(pack_ids(prompt), "l2")
        assert reply.cache.l1 == 33
        assert (await client.drain_tiers()).num_pages == 0
        assert (await client.verify_tiers()).checked == {"l2": 0, "l3": 0}
        assert (await client.move_prefix(pack_ids(prompt), "none")).cache.to_compute == 33

    tiers = TiersConfig(l2_bytes=0)
    serve(LiveEngine(str(tmp_path), make_runner(), tiers=tiers), work)


def test_a_prefix_is_moved_where_it_is_wanted_and_the_answer_says_where_it_is(
    tmp_path: Path,
) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(1, 33)
        await ask(client, "a", prompt, 1)
        ids = pack_ids(prompt)
        moved = await client.move_prefix(ids, "l2")
        assert moved.cache == api.CacheHit(l2=32, to_compute=1) and moved.num_pending == 0
        moved = await client.move_prefix(ids, "l1")
        assert moved.cache == api.CacheHit(l1=32, to_compute=1)
        hit = await ask(client, "b", [*prompt, 9], 1)
        assert hit == api.CacheHit(l1=32, to_compute=2)
        moved = await client.move_prefix(pack_ids([*prompt, 9]), "none")
        assert moved.cache == api.CacheHit(to_compute=34)
        hit = await ask(client, "c", prompt)
        assert hit == api.CacheHit(to_compute=33)
        await settled(client)

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64), work)


def test_status_counts_what_each_tier_holds(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        await ask(client, "a", prompt_of(1, 33), 1)
        await settled(client)
        l1, l2, l3 = await client.tiers()
        assert (l1.kind, l1.num_pages, l1.used_bytes) == ("cpu", 9, 9 * 4 * PAGE_SIZE)
        assert (l2.kind, l2.state, l2.num_pages) == ("private_memory", "up", 8)
        assert l2.counters["write_back_pages"] == 8
        assert (l3.kind, l3.state, l3.num_pages) == ("memory", "up", 8)
        checked = await client.verify_tiers()
        assert checked.checked == {"l2": 8, "l3": 8} and checked.bad == {"l2": 0, "l3": 0}

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, store=make_store()), work)


def test_l2_outlives_the_engine_where_another_process_keeps_the_memory(tmp_path: Path) -> None:
    fd = make_region_fd()
    prompts = [prompt_of(seed, 33) for seed in range(4)]
    prompts += [[*prompts[0][:20], *prompt_of(9, 17)]]  # a fork
    try:

        async def before(client: EngineClient) -> None:
            for seed, prompt in enumerate(prompts):
                await ask(client, f"a{seed}", prompt)
            await settled(client)

        async def after(client: EngineClient) -> None:
            stats = await settled(client)
            assert stats["cached_l2_pages"] == 4 * 8 + 4
            for seed, prompt in enumerate(prompts):
                hit = await client.query_prefix(prompt)
                full = len(prompt) // PAGE_SIZE * PAGE_SIZE
                assert hit.l1 + hit.l2 == full and hit.l2 >= 16
                hit = await ask(client, f"b{seed}", [*prompt, 5])
                assert hit.l1 + hit.l2 == full
            await settled(client)

        for work in (before, after):
            keeper = Keeper(l2_fd=fd)
            serve(LiveEngine(str(tmp_path), make_runner(64), token_budget=64, keeper=keeper), work)
    finally:
        os.close(fd)


def test_what_was_forgotten_is_not_there_after_a_restart(tmp_path: Path) -> None:
    fd = make_region_fd()
    prompt, other = prompt_of(1, 33), prompt_of(2, 33)
    try:

        async def before(client: EngineClient) -> None:
            await ask(client, "a", prompt, 1)
            await ask(client, "b", other)
            await client.move_prefix(pack_ids(prompt), "none")
            await settled(client)

        async def after(client: EngineClient) -> None:
            assert (await client.query_prefix(prompt)).l2 == 0
            assert (await client.query_prefix(other)).l2 == 32

        for work in (before, after):
            keeper = Keeper(l2_fd=fd)
            serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, keeper=keeper), work)
    finally:
        os.close(fd)


def test_a_sampled_turn_is_in_l2_for_the_engine_that_comes_after(tmp_path: Path) -> None:
    """Pages of tokens that were sampled are told to a restart as those of a prompt are."""
    fd = make_region_fd()
    prompt = prompt_of(3, 6)
    try:

        async def before(client: EngineClient) -> None:
            await ask(client, "a", prompt, 31)
            await settled(client)

        async def after(client: EngineClient) -> None:
            history = prompt + want(prompt, 31)
            hit = await ask(client, "b", [*history, 7])
            assert hit.l2 == 36 and hit.l1 == 0

        for work in (before, after):
            keeper = Keeper(l2_fd=fd)
            serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, keeper=keeper), work)
    finally:
        os.close(fd)


def test_what_ends_in_the_last_step_before_a_stop_is_in_l2_for_the_engine_that_comes_after(
    tmp_path: Path,
) -> None:
    """Its result comes when the loop turns no more; the rest, still running, goes down too."""
    fd = make_region_fd()
    runner = PairRunner(
        SCRIPT, vocab_size=VOCAB, page_size=PAGE_SIZE, num_pages=64, max_context_len=60
    )
    runner.hold_at = 1
    prompts = [prompt_of(seed, 21) for seed in range(2)]

    def prepare(server: EngineServer) -> None:
        close = server._executor.close

        def close_with_the_step_under_way() -> None:
            runner.gate.set()
            close()

        server._executor.close = close_with_the_step_under_way  # type: ignore[method-assign]

    async def before() -> None:
        client = EngineClient(engine.socket_path)
        await client.start()
        await client.wait_ready(20)
        tasks = [asyncio.create_task(run(client, make_request("b", prompts[1], 30)))]
        while not runner.is_held:
            await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(run(client, make_request("a", prompts[0], 2))))
        while (await client.stats())["requests_received"] < 2:
            await asyncio.sleep(0.001)
        runner.gate.set()
        while not (runner.row_counts.count(2) == 1 and runner.is_held):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.stop)
        for task in tasks:
            task.cancel()
        await client.close()

    async def after(client: EngineClient) -> None:
        assert [(await client.query_prefix(prompt)).l2 for prompt in prompts] == [20, 20]

    keeper = Keeper(l2_fd=fd)
    try:
        options = {"token_budget": 64, "keeper": keeper}
        engine = LiveEngine(str(tmp_path), runner, prepare=prepare, **options)  # type: ignore[arg-type]
        with engine:
            asyncio.run(before())
        assert engine.error is None
        serve(LiveEngine(str(tmp_path), make_runner(64), **options), after)  # type: ignore[arg-type]
    finally:
        os.close(fd)


def test_a_move_to_a_store_that_is_not_there_says_where_the_prefix_is(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(1, 33)
        await ask(client, "a", prompt, 1)
        moved = await client.move_prefix(pack_ids(prompt), "l3")
        assert moved.num_pending == 0 and moved.cache == api.CacheHit(l1=33)
        await ask(client, "b", prompt, 1)

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64), work)


@pytest.mark.parametrize("tier", ["l1", "l2", "l3", "none"])
def test_a_move_of_ids_that_no_token_has_is_answered_and_the_engine_goes_on(
    tmp_path: Path, tier: str
) -> None:
    async def work(client: EngineClient) -> None:
        for ids in ([], [-5] * 9, [1 << 30] * 9):
            with contextlib.suppress(QueryRefusedError):
                assert (await client.move_prefix(pack_ids(ids), tier)).num_pending == 0
        await ask(client, "a", prompt_of(1, 9), 1)

    serve(LiveEngine(str(tmp_path), make_runner(), store=make_store()), work)


@pytest.mark.parametrize("tier", ["l4", ""])
def test_a_move_to_no_tier_is_refused_and_the_engine_goes_on(tmp_path: Path, tier: str) -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(QueryRefusedError, match=f"tier = '{tier}': allowed: l1 | l2 | l3"):
            await client.move_prefix(pack_ids([3, 4]), tier)
        assert (await client.stats())["messages_malformed"] == 1

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def l2_bytes(num_pages: int) -> int:
    """Enough for so many pages of the scripted model and no more."""
    layout = ScriptedLayout(PAGE_SIZE)
    shape = PoolShape(num_slots=num_pages, page_bytes=layout.page_bytes, page_size=layout.page_size)
    return shape.num_bytes


def test_the_least_l2_that_an_error_names_is_allowed() -> None:
    runner = make_runner()
    with pytest.raises(ConfigError, match="at least one page") as caught:
        build_lower_tiers(EngineConfig(tiers=TiersConfig(l2_bytes=1)), runner, lambda: None)
    least = int(re.findall(r"\((\d+)\)", caught.value.allowed)[0])
    assert least == l2_bytes(1)
    config = EngineConfig(tiers=TiersConfig(l2_bytes=least))
    transfers = build_lower_tiers(config, runner, lambda: None).transfers
    assert transfers is not None and transfers.pool.num_slots == 1
    transfers.close()
    with pytest.raises(ConfigError, match=f"l2_bytes = {least - 1}: allowed: 0, -1, or at least"):
        build_lower_tiers(EngineConfig(tiers=TiersConfig(l2_bytes=least - 1)), runner, lambda: None)


def test_what_l2_had_no_room_for_comes_back_from_the_store(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompts = [prompt_of(seed, 33) for seed in range(8)]
        for seed, prompt in enumerate(prompts):
            await ask(client, f"a{seed}", prompt)
            await settled(client)
        hits = []
        for seed, prompt in enumerate(prompts):
            hits.append(await ask(client, f"b{seed}", prompt))
            await settled(client)
        assert all(hit.to_compute == 1 for hit in hits)
        assert sum(hit.l3 for hit in hits) >= 100
        stats = await client.stats()
        assert stats["fetch_pages"] * PAGE_SIZE == sum(hit.l3 for hit in hits)

    tiers = TiersConfig(l2_bytes=l2_bytes(24), l3_wait_ms=60_000)
    engine = LiveEngine(
        str(tmp_path), make_runner(), token_budget=64, tiers=tiers, store=make_store()
    )
    serve(engine, work)


def test_the_store_is_asked_for_what_another_engine_left_there(tmp_path: Path) -> None:
    store = make_store()
    prompt = prompt_of(1, 33)

    async def before(client: EngineClient) -> None:
        await ask(client, "a", prompt)
        await settled(client)

    async def after(client: EngineClient) -> None:
        assert (await client.query_prefix(prompt)).l3 == 0  # nobody has asked the store yet
        hit = await ask(client, "b", [*prompt, 5])
        assert hit == api.CacheHit(l3=32, to_compute=2)
        await settled(client)

    tiers = TiersConfig(l3_wait_ms=60_000)
    for work in (before, after):
        store.state = StoreState.UP  # the engine before has closed it
        engine = LiveEngine(str(tmp_path), make_runner(), token_budget=64, tiers=tiers, store=store)
        serve(engine, work)


def test_a_suspended_prefix_lies_in_the_store_alone_and_wakes_from_there(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(1, 33)
        await ask(client, "a", prompt, 1)
        moved = await client.move_prefix(pack_ids(prompt), "l3")
        assert moved.cache == api.CacheHit(l3=32, to_compute=1)
        stats = await settled(client)
        assert stats["cached_pages"] == stats["cached_l2_pages"] == 0
        hit = await ask(client, "b", [*prompt, 9])
        assert hit == api.CacheHit(l3=32, to_compute=2)

    tiers = TiersConfig(l3_wait_ms=60_000)
    engine = LiveEngine(
        str(tmp_path), make_runner(), token_budget=64, tiers=tiers, store=make_store()
    )
    serve(engine, work)


def test_what_is_forgotten_leaves_the_store_too(tmp_path: Path) -> None:
    store = make_store()

    async def work(client: EngineClient) -> None:
        prompt = prompt_of(1, 33)
        await ask(client, "a", prompt, 1)
        await settled(client)
        assert len(store.objects) == 8
        await client.move_prefix(pack_ids(prompt), "none")
        await settled(client)
        assert len(store.objects) == 0

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, store=store), work)


def test_a_prefix_that_is_rolled_back_leaves_every_tier_from_there_on(tmp_path: Path) -> None:
    store = make_store()

    async def work(client: EngineClient) -> None:
        prompt, other = prompt_of(1, 33), [*prompt_of(1, 33)[:24], *prompt_of(2, 9)]
        await ask(client, "a", prompt, 1)
        await client.drop_prefix(pack_ids(prompt), 18)  # at once: pages are still going down
        await settled(client)
        assert len(store.objects) == 5
        await ask(client, "b", prompt, 1)
        await ask(client, "c", other, 1)
        await settled(client)
        assert len(store.objects) == 10
        await client.drop_prefix(pack_ids(prompt), 2)
        await settled(client)
        assert len(store.objects) == 8, "the other goes on from the sixth page"
        hit = await client.query_prefix(other)
        assert hit.l1 + hit.l2 + hit.l3 >= 32

    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, store=store), work)


def test_a_prefetch_after_a_restart_finds_what_only_the_store_knows(tmp_path: Path) -> None:
    store = make_store()
    prompt = prompt_of(1, 33)

    async def before(client: EngineClient) -> None:
        await ask(client, "a", prompt)
        await settled(client)

    async def after(client: EngineClient) -> None:
        moved = await client.move_prefix(pack_ids(prompt), "l1")
        assert moved.num_pending == 0
        assert moved.cache == api.CacheHit(l1=32, to_compute=1)
        nowhere = await client.move_prefix(pack_ids(prompt_of(7, 33)), "l1")
        assert nowhere.cache == api.CacheHit(to_compute=33)
        hit = await ask(client, "b", [*prompt, 5])
        assert hit == api.CacheHit(l1=32, to_compute=2)
        await settled(client)

    tiers = TiersConfig(l3_wait_ms=60_000)
    for work in (before, after):
        store.state = StoreState.UP
        engine = LiveEngine(str(tmp_path), make_runner(), token_budget=64, tiers=tiers, store=store)
        serve(engine, work)


@pytest.mark.parametrize("has_store", [True, False])
def test_what_l2_has_of_a_prefix_counts_where_its_head_is_only_in_the_store(
    tmp_path: Path, has_store: bool
) -> None:
    fd = make_region_fd()
    store = make_store() if has_store else None
    prompt = prompt_of(1, 33)
    layout = make_runner().layout
    head: list[int] = []

    async def before(client: EngineClient) -> None:
        await ask(client, "a", prompt)
        await settled(client)

    async def after(client: EngineClient) -> None:
        stats = await settled(client)
        assert stats["cached_l2_pages"] == (6 if has_store else 0)
        hit = await ask(client, "b", [*prompt, 5])
        assert hit == (
            api.CacheHit(l2=24, l3=8, to_compute=2) if has_store else api.CacheHit(to_compute=34)
        )
        await settled(client)

    tiers = TiersConfig(l3_wait_ms=60_000)
    try:
        for work in (before, after):
            if store is not None:
                store.state = StoreState.UP
            keeper = Keeper(l2_fd=fd)
            if work is after:  # the slots of the first two pages were damaged meanwhile
                slots = kept_slots(fd, layout)
                shape = PoolShape(
                    num_slots=slots, page_bytes=layout.page_bytes, page_size=layout.page_size
                )
                keys = ObjectKeys(make_runner().model_fingerprint, layout)
                pool = HostPool(shape, layout, keys, fd)
                for slot, name in list(pool.survivors()):
                    if name.start < 8:
                        pool.slot(slot)[HEADER_BYTES] ^= 1
                        head.append(slot)
                assert len(head) == 2
            engine = LiveEngine(
                str(tmp_path),
                make_runner(),
                token_budget=64,
                tiers=tiers,
                store=store,
                keeper=keeper,
            )
            serve(engine, work)
    finally:
        os.close(fd)


def test_a_directory_that_another_process_owns_is_said_to_be_and_nothing_waits_for_it(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "kv" / "rank-0"
    layout = ScriptedLayout(PAGE_SIZE).fingerprint()
    owner = FileStore(directory, 1 << 20, layout)
    assert owner.probe(["a"]) == 0

    async def state_of_l3(client: EngineClient) -> api.TierStatus:
        return (await client.tiers())[2]

    async def work(client: EngineClient) -> None:
        await ask(client, "a", prompt_of(1, 33))
        status = await state_of_l3(client)
        assert (status.state, status.num_pages) == ("down", 0)
        assert str(directory) in status.reason and "another process owns" in status.reason
        owner.close()
        limit_s = time.monotonic() + 60
        while (await state_of_l3(client)).state != "up":
            assert time.monotonic() < limit_s, "it is not taken over"
            await asyncio.sleep(0.05)
        await ask(client, "b", prompt_of(2, 33))
        await settled(client)
        assert (await state_of_l3(client)).num_pages > 0

    tiers = TiersConfig(l3="file", l3_dir=str(directory.parent), l3_quota_bytes=1 << 20)
    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, tiers=tiers), work)


def test_a_machine_that_stood_still_is_no_cost_that_breaks_the_engine() -> None:
    class Stalled:
        """Measured while nothing got any time."""

        def measured_costs(self) -> tuple[float, float]:
            return 1e15, 1e15

    limits = SchedulerConfig(
        page_size=4, num_pages=8, max_slots=2, max_context_len=16, num_l2_pages=4
    )
    control = ControlPlane(Scheduler(limits), cast(Outbox, None))
    control.attach_tiers(cast(TierPlane, Stalled()))
    control.tell_costs(1e12)


def test_the_inputs_of_the_scheduler_can_be_logged_and_replayed(tmp_path: Path) -> None:
    """Moves, acks, probes and measured costs among them."""
    log = tmp_path / "inputs.jsonl"

    async def work(client: EngineClient) -> None:
        prompts = [prompt_of(seed, 33) for seed in range(5)]
        for wave in range(2):
            for seed, prompt in enumerate(prompts):
                await ask(client, f"{wave}-{seed}", prompt)
        await client.move_prefix(pack_ids(prompts[0]), "l3")
        await settled(client)

    tiers = TiersConfig(l2_bytes=l2_bytes(24), l3_wait_ms=60_000, record_inputs=str(log))
    engine = LiveEngine(
        str(tmp_path), make_runner(), token_budget=64, tiers=tiers, store=make_store()
    )
    serve(engine, work)
    report = replay(read_log(log.read_bytes().splitlines()))
    assert report.first_difference == 0 and report.num_plans > 20


def test_what_the_store_gives_is_used_up_to_the_first_bad_page(tmp_path: Path) -> None:
    store = make_store()
    prompt = prompt_of(1, 33)

    async def work(client: EngineClient) -> None:
        await ask(client, "a", prompt, 1)
        await client.move_prefix(pack_ids(prompt), "l3")
        fifth = list(store.objects)[4]  # they were put in order
        store.objects[fifth] = store.objects[fifth][:-1] + b"?"
        hit = await ask(client, "b", [*prompt, 9])
        assert hit == api.CacheHit(l3=4 * PAGE_SIZE, to_compute=34 - 4 * PAGE_SIZE)
        await settled(client)
        hit = await ask(client, "c", [*prompt, 8])
        assert hit.to_compute <= 2
        checked = await client.verify_tiers()
        assert checked.bad == {"l2": 0, "l3": 0}

    tiers = TiersConfig(l3_wait_ms=60_000)
    serve(LiveEngine(str(tmp_path), make_runner(), token_budget=64, tiers=tiers, store=store), work)
