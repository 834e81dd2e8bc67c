# SPDX-License-Identifier: Apache-2.0
"""Kills an engine process at random moments under traffic that no tier alone can hold.

Every answer must be the one of an undisturbed run (greedy, fp32, a tiny model), every page in one
place afterwards, every stored page whole. Prints a JSON line a life and one at the end; exits 1 at
the first difference.

    python -m benchmarks.soak.tier_kills [--kills 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig, TiersConfig
from kvtiers.host_region import make_region_fd
from tests.fakes.engine_process import EngineProcess
from tests.fakes.live_engine import Collected, make_request
from tests.fakes.tiny_model import byte_ids, write_tiny_model

NUM_PROMPTS = 24
PROMPTS = [byte_ids(f"{place}: " + f"word{place} " * 20) for place in range(NUM_PROMPTS)]
NUM_NEW = 40
STREAMS = 4


async def answer(client: EngineClient, name: str, place: int) -> list[int]:
    request = make_request(name, PROMPTS[place], NUM_NEW, sampling={"ignore_eos": True})
    got = await asyncio.wait_for(Collected().read(client.generate(request)), 180)
    if got.finished is None or got.finished.error_code is not None:
        raise SystemExit(f"{name} failed: {got.finished}")
    return got.ids


async def check(client: EngineClient) -> dict[str, float]:
    """Everything at rest and whole; what the tiers gave in this life."""
    await client.drain_tiers(timeout_s=30)
    stats = await client.stats()
    places = ("free", "owned", "cached", "in_flight")
    held = sum(stats[f"{place}_pages"] for place in places)
    lower = stats["free_l2_pages"] + stats["cached_l2_pages"]
    is_sound = (
        held == stats["num_pages"]
        and lower == stats["num_l2_pages"]
        and not stats["owned_pages"]
        and not stats["transfers_in_flight"]
    )
    verified = await client.verify_tiers()
    if not is_sound or any(verified.bad.values()):
        raise SystemExit(f"pages are astray or bad: {stats}, {verified}")
    names = ("l2_cached_prompt_tokens", "l3_cached_prompt_tokens", "transfers_lost")
    return {name: stats[name] for name in names}


async def soak(engine: EngineProcess, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    client = EngineClient(engine.config.socket_path, max_resubmits=num_kills + 1)
    await client.start()
    await client.wait_ready(60)
    want = [await answer(client, f"calm-{place}", place) for place in range(NUM_PROMPTS)]
    is_over = asyncio.Event()
    num_answers = 0

    async def stream(number: int) -> None:
        nonlocal num_answers
        while not is_over.is_set():
            place = rng.randrange(NUM_PROMPTS)
            if await answer(client, f"{number}-{time.monotonic_ns()}", place) != want[place]:
                raise SystemExit(f"prompt {place} is answered otherwise")
            num_answers += 1

    streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    for kill in range(num_kills):
        await asyncio.sleep(rng.uniform(0.05, 2.0))
        if any(task.done() for task in streams):
            break
        before = await client.stats(timeout_s=60)  # of the life that ends
        engine.kill()
        engine.start()
        await asyncio.sleep(0.5)
        stats = await client.stats(timeout_s=60)
        line = {
            "kill": kill + 1,
            "answers": num_answers,
            "l2_tokens": before["l2_cached_prompt_tokens"],
            "l3_tokens": before["l3_cached_prompt_tokens"],
            "l2_pages": stats["cached_l2_pages"],
        }
        print(json.dumps(line), flush=True)
    is_over.set()
    await asyncio.gather(*streams)
    print(json.dumps({"kills": num_kills, "answers": num_answers, **await check(client)}))
    await client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-soak-") as folder:
        tiers = TiersConfig(
            l2_bytes=700_000,
            l3="file",
            l3_dir=f"{folder}/kv",
            l3_quota_bytes=64 << 20,
            l3_wait_ms=2000,
        )
        config = EngineConfig(
            model=str(write_tiny_model(Path(folder) / "model")),
            run_dir=folder,
            dtype="float32",
            kv_pool_tokens=1024,
            max_context_len=512,
            page_size=16,
            num_threads=1,
            tiers=tiers,
        )
        with EngineProcess(config, l2_fd=make_region_fd()) as engine:
            asyncio.run(soak(engine, arguments.kills, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
