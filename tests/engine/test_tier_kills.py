# SPDX-License-Identifier: Apache-2.0
"""An engine process is killed while pages move up and down; what comes after reads none half."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig, TiersConfig
from kvtiers.host_region import make_region_fd
from tests.fakes.engine_process import EngineProcess
from tests.fakes.live_engine import Collected, make_request
from tests.fakes.tiny_model import byte_ids, write_tiny_model

NUM_PROMPTS = 10
PROMPTS = [byte_ids(f"{place}: " + f"word{place} " * 20) for place in range(NUM_PROMPTS)]


async def traffic(client: EngineClient, name: str, rounds: int) -> dict[int, list[int]]:
    """Every prompt, again and again, four at a time; each must say the same each time."""
    said: dict[int, list[int]] = {}
    gate = asyncio.Semaphore(4)

    async def one(number: int) -> None:
        async with gate:
            place = number % NUM_PROMPTS
            request = make_request(
                f"{name}{number}", PROMPTS[place], 40, sampling={"ignore_eos": True}
            )
            got = await asyncio.wait_for(Collected().read(client.generate(request)), 120)
            assert got.finished is not None and got.finished.error_code is None, got.finished
            assert said.setdefault(place, got.ids) == got.ids

    await asyncio.gather(*(one(number) for number in range(rounds * NUM_PROMPTS)))
    return said


def test_a_kill_in_the_middle_of_moves_changes_no_token_and_leaks_no_page(tmp_path: Path) -> None:
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

    async def main() -> None:
        client = EngineClient(config.socket_path, max_resubmits=10)
        await client.start()
        await client.wait_ready(60)
        want = await traffic(client, "calm", 1)
        task = asyncio.create_task(traffic(client, "killed", 4))
        await asyncio.sleep(0.7)  # in the middle of it
        assert not task.done()
        engine.kill()
        engine.start()
        assert await task == want
        await client.drain_tiers()
        stats = await client.stats()
        places = ("free", "owned", "cached", "in_flight")
        assert sum(stats[f"{place}_pages"] for place in places) == stats["num_pages"]
        assert stats["owned_pages"] == stats["in_flight_pages"] == 0
        assert stats["l2_cached_prompt_tokens"] > 0 and stats["l3_cached_prompt_tokens"] > 0
        assert stats["write_back_pages"] > 0
        checked = await client.verify_tiers()
        assert checked.checked["l2"] > 0 and checked.bad == {"l2": 0, "l3": 0}
        await client.close()

    with EngineProcess(config, l2_fd=fd) as engine:
        asyncio.run(main())
    os.close(fd)
