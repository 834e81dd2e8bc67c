# SPDX-License-Identifier: Apache-2.0
"""Pages from L2 on a GPU: how fast they come, and the first token of a turn behind them.

    python -m benchmarks.gpu.layered [--weights nvfp4] [--rounds 5]
    python -m benchmarks.gpu.layered --dry                     on a CPU, tiny

Prints JSON lines. `look`: what it takes to look at the header of a page. `load_back`: all pages of
a 64K context, one after the other and by layers, in GB/s and as a share of the link's rate (bar:
0.80); by layers also what copied them (`copies`), how many layers were there (`layers`) after how
many milliseconds (`group_ms`), and how long the calls took that queued them (`calls_ms`).
`first_token`: a live engine, without HTTP, asked for 800 tokens behind a context that lies in L1,
or in L2 with `engine.tiers.overlap_loads` off and on (bar: 110 ms). At the end `load_back` by
layers again, with `trial`: torch's copies, pieces of other sizes, the driver's other flag. Exit
status 1 where bytes or tokens differ from those of L1, or where pages did not come the way that was
asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.layered_loads import Differs, LoadBench
from benchmarks.gpu.page_moves import CONTEXT_LEN
from benchmarks.gpu.shapes import write_shape
from benchmarks.gpu.steps import tiny_runner
from engine.client import EngineClient
from engine.config import EngineConfig, TiersConfig
from engine.execution.model_runner import build_model_runner
from engine.transport import pack_ids
from tests.fakes.live_engine import Collected, LiveEngine, make_request

NEW_TOKENS = 800
OUTPUT_TOKENS = 8


class Context:
    """A base of whole pages and turns that go on behind it, in one live engine after the other."""

    def __init__(self, runner: Any, folder: Path, base: int, new: int, l2_bytes: int) -> None:
        self.runner, self.folder, self.l2_bytes = runner, folder, l2_bytes
        rng = random.Random(1)
        most = runner.vocab_size - 1
        self.base = [rng.randrange(1000, most) for _ in range(base)]
        self.new, self.most = new, most

    def turn(self, number: int) -> list[int]:
        """What is asked for in a round."""
        rng = random.Random(f"turn {number}")
        return [*self.base, *(rng.randrange(1000, self.most) for _ in range(self.new))]

    def measure(self, where: str, rounds: int) -> dict[str, Any]:
        """Times to the first token, and the tokens; `where`: l1 | l2 | l2 overlapped."""
        tiers = TiersConfig(
            l2_bytes=self.l2_bytes, overlap_loads="on" if where == "l2 overlapped" else "off"
        )
        budget = 512 if len(self.base) < 4096 else 4096
        engine = LiveEngine(
            str(self.folder / where.replace(" ", "-")),
            self.runner,
            max_slots=4,
            token_budget=budget,
            tiers=tiers,
        )
        with engine:
            found = asyncio.run(self._rounds(engine, where, rounds))
        if engine.error is not None:
            raise engine.error
        return found

    async def _rounds(self, engine: LiveEngine, where: str, rounds: int) -> dict[str, Any]:
        client = EngineClient(engine.socket_path)
        await client.start()
        await client.wait_ready(60)
        times, tokens, cached = [], [], []
        await self._ask(client, "cold", self.base, 1)
        for number in range(-1, rounds):  # the first compiles what is compiled late
            prompt = self.turn(number)
            if where != "l1":
                await self._lower(client, self.base)
            first_s, got = await self._ask(client, f"turn {number}", prompt, OUTPUT_TOKENS)
            assert got.started is not None
            if number >= 0:
                times.append(first_s * 1e3)
                tokens.append(got.ids)
                cached.append(got.started.cache)
            if where != "l1":
                await self._lower(client, [*prompt, *got.ids])
        stats = await client.stats()
        await client.close()
        return {
            "times": times,
            "tokens": tokens,
            "l1_tokens": [hit.l1 for hit in cached],
            "l2_tokens": [hit.l2 for hit in cached],
            "layered_pages": int(stats["load_back_layered_pages"]),
            "lost_pages": int(stats["load_back_lost"]),
            "load_gb_s": round(stats["load_back_bytes_per_s"] / 1e9, 1),
        }

    async def _lower(self, client: EngineClient, ids: list[int]) -> None:
        await client.drain_tiers(timeout_s=30)
        await client.move_prefix(pack_ids(ids), "l2")
        await client.drain_tiers(timeout_s=30)

    async def _ask(
        self, client: EngineClient, name: str, prompt: list[int], num: int
    ) -> tuple[float, Collected]:
        got = Collected()
        request = make_request(name, prompt, num, sampling={"ignore_eos": True})
        start_s = time.perf_counter()
        first_s = 0.0
        stream = client.generate(request)
        async for item in stream:
            await got.read(_one(item))
            if got.ids and not first_s:
                first_s = time.perf_counter() - start_s
        if len(got.ids) != num:
            raise Differs(f"{name}: {got.finished}")
        return first_s, got


async def _one(item: object) -> Any:
    yield item


def bench_turns(folder: Path, rounds: int, weights: str, *, is_small: bool) -> Iterator[Any]:
    """Lines of first tokens."""
    base, new = (512, 40) if is_small else (CONTEXT_LEN, NEW_TOKENS)
    config = EngineConfig(
        model=str(write_shape(folder / "model", "tiny" if is_small else "v2-lite", weights)),
        load_format="dummy",
        device="cuda",
        max_slots=4,
        max_context_len=CONTEXT_LEN + 4096,
    )
    if is_small:
        runner: Any = tiny_runner(replace(config, max_context_len=1024, token_budget=512))
    else:
        runner = build_model_runner(config)
    context = Context(runner, folder, base, new, (64 << 20) if is_small else (8 << 30))
    want: list[list[int]] = []
    for where in ("l1", "l2", "l2 overlapped"):
        found = context.measure(where, rounds)
        times, tokens = found.pop("times"), found.pop("tokens")
        want = want or tokens
        yield {
            "case": "first_token",
            "context_in": where,
            "context": base,
            "new": new,
            "ms_p50": round(statistics.median(times), 2),
            "ms_max": round(max(times), 2),
            "rounds": rounds,
            "tokens_equal": tokens == want,
            **found,
        }
        if tokens != want:
            raise Differs(f"{where}: other tokens than from L1")
        in_l2 = base if where != "l1" else 0
        if any(num != in_l2 for num in found["l2_tokens"]) or found["lost_pages"]:
            raise Differs(f"{where}: the context did not come from there")
        if bool(found["layered_pages"]) != (where == "l2 overlapped"):
            raise Differs(f"{where}: pages came another way")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, small")
    parser.add_argument("--weights", default="nvfp4")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry else "cuda")
    loads = LoadBench(device, is_small=args.dry)
    for line in loads.lines():
        print(json.dumps(line), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        weights = "bf16" if args.dry else args.weights
        for line in bench_turns(Path(folder), args.rounds, weights, is_small=args.dry):
            print(json.dumps(line), flush=True)
    for line in loads.trials():
        print(json.dumps(line), flush=True)
    loads.close()


if __name__ == "__main__":
    sys.exit(main())
