# SPDX-License-Identifier: Apache-2.0
"""An engine process is killed in the middle of every kind of move; what comes after reads none
half."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig, TiersConfig
from kvtiers.host_region import make_region_fd
from tests.fakes.engine_process import EngineProcess
from tests.fakes.killed_engine import KILL_AT, PHASES
from tests.fakes.live_engine import Collected, make_request
from tests.fakes.tiny_model import byte_ids, write_tiny_model

NUM_PROMPTS = 10
PROMPTS = [byte_ids(f"{place}: " + f"word{place} " * 20) for place in range(NUM_PROMPTS)]


async def traffic(client: EngineClient, name: str) -> dict[int, list[int]]:
    """Every prompt's answer, four at a time."""
    said: dict[int, list[int]] = {}
    gate = asyncio.Semaphore(4)

    async def one(place: int) -> None:
        async with gate:
            request = make_request(
                f"{name} {place}", PROMPTS[place], 40, sampling={"ignore_eos": True}
            )
            got = await asyncio.wait_for(Collected().read(client.generate(request)), 280)
            assert got.finished is not None and got.finished.error_code is None, got.finished
            said[place] = got.ids

    await asyncio.gather(*(one(place) for place in range(NUM_PROMPTS)))
    return said


async def until_dead(engine: EngineProcess) -> None:
    while engine.is_alive:
        await asyncio.sleep(0.02)


def test_a_kill_in_the_middle_of_any_move_changes_no_token_and_leaks_no_page(
    tmp_path: Path,
) -> None:
    model = str(write_tiny_model(tmp_path / "model"))
    tiers = TiersConfig(
        l2_bytes=400_000, l3="file", l3_dir=str(tmp_path / "kv"), l3_quota_bytes=64 << 20,
        l3_wait_ms=2000,
    )  # fmt: skip
    config = EngineConfig(
        model=model,
        run_dir=str(tmp_path),
        dtype="float32",
        kv_pool_tokens=1024,  # of the 2,000 that the prompts and their answers take
        max_context_len=512,
        page_size=16,
        num_threads=1,
        tiers=tiers,
    )
    fd = make_region_fd()
    interrupted: list[tuple[str, asyncio.Task[dict[int, list[int]]]]] = []

    async def main() -> None:
        client = EngineClient(config.socket_path, max_resubmits=10)
        await client.start()
        await client.wait_ready(60)
        want = await traffic(client, "calm")
        engine.kill()
        # Each life ends in its phase, while the traffic goes on; the last one in none.
        for phase in PHASES:
            if phase == "store":  # else it has all of them
                shutil.rmtree(tiers.l3_dir)
            engine.start({KILL_AT: f"{phase}:{5 if phase != 'probe' else 3}"})
            dead = asyncio.create_task(until_dead(engine))
            for number in range(10):
                task = asyncio.create_task(traffic(client, f"{phase} {number}"))
                await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
                if dead.done():
                    break
                assert await task == want, phase
            assert dead.done(), f"no {phase} came"
            assert engine.wait()[0] == -signal.SIGKILL
            interrupted.append((phase, task))
        engine.start()
        for phase, task in interrupted:
            assert await task == want, phase
        assert await traffic(client, "after") == want
        await client.drain_tiers()
        stats = await client.stats()
        places = ("free", "owned", "cached", "in_flight")
        assert sum(stats[f"{place}_pages"] for place in places) == stats["num_pages"]
        assert stats["owned_pages"] == stats["in_flight_pages"] == 0
        assert stats["l2_cached_prompt_tokens"] > 0 and stats["l3_cached_prompt_tokens"] > 0
        checked = await client.verify_tiers()
        assert checked.checked["l2"] > 0 and checked.bad == {"l2": 0, "l3": 0}
        await client.close()

    with EngineProcess(config, l2_fd=fd, module="tests.fakes.killed_engine") as engine:
        asyncio.run(main())
    os.close(fd)
