# SPDX-License-Identifier: Apache-2.0
"""The first bar of the CPU server, over HTTP: decode rates, first-token times, start to ready.

Starts the real appliance with its defaults, drives it with one client, prints a JSON line per
figure (median of `--runs`) with the bar it is held to. Prompts are seeded random word tokens, so
no prompt shares a prefix with an earlier one unless the case says so.

    python benchmarks/server.py [--runs 3] [--out benchmarks/results/server_cpu_202611.jsonl]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

ROOT = pathlib.Path(__file__).parents[1]
WORD_IDS = range(1000, 40000)


@dataclass(frozen=True)
class Sample:
    """One streamed completion as the client saw it."""

    ttft_s: float
    decode_tok_s: float
    start: float
    end: float
    num_tokens: int


class Server:
    """A `moorage serve` of our own on a free port."""

    def __init__(self, folder: pathlib.Path, settings: list[str]) -> None:
        self.state = folder / "run" / "state.json"
        flags = ["server.port=0", f"server.run_dir={folder}/run", f"server.state_dir={folder}/s"]
        command = [str(pathlib.Path(sys.executable).with_name("moorage")), "serve"]
        for setting in [*flags, *settings]:
            command += ["--set", setting]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
        self.url = ""

    def wait_ready(self) -> float:
        while True:
            try:
                self.url = json.loads(self.state.read_text())["url"]
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return time.perf_counter() - self.started
            except (OSError, ValueError, KeyError, httpx.TransportError):
                pass
            if self.process.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


async def complete(client: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> Sample:
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    start = time.perf_counter()
    first = end = 0.0
    received = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                ids = choice.get("token_ids") or []
                if ids:
                    end = time.perf_counter()
                    first = first or end
                    received += len(ids)
    if received != num_tokens:
        raise SystemExit(f"wanted {num_tokens} tokens, got {received}")
    rate = (received - 1) / (end - first) if received > 1 else 0.0
    return Sample(first - start, rate, start, end, received)


class Prompts:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def fresh(self, length: int) -> list[int]:
        return [self.random.choice(WORD_IDS) for _ in range(length)]


async def decode_one(client: httpx.AsyncClient, prompts: Prompts, length: int) -> float:
    return (await complete(client, prompts.fresh(length), 96)).decode_tok_s


async def decode_four(client: httpx.AsyncClient, prompts: Prompts, length: int) -> float:
    """Four warm contexts decoding at once: tokens of all over the time all of them stream."""
    contexts = [prompts.fresh(length) for _ in range(4)]
    for context in contexts:
        await complete(client, context, 1)
    samples = await asyncio.gather(*(complete(client, c, 96) for c in contexts))
    start = min(s.start + s.ttft_s for s in samples)
    return sum(s.num_tokens - 1 for s in samples) / (max(s.end for s in samples) - start)


async def cold_ttft(client: httpx.AsyncClient, prompts: Prompts, streams: int) -> float:
    jobs = [complete(client, prompts.fresh(2000), 1) for _ in range(streams)]
    return statistics.median([s.ttft_s for s in await asyncio.gather(*jobs)])


async def later_ttft(client: httpx.AsyncClient, prompts: Prompts, streams: int) -> float:
    contexts = [prompts.fresh(2000) for _ in range(streams)]
    for context in contexts:
        await complete(client, context, 1)
    jobs = [complete(client, c + prompts.fresh(92), 1) for c in contexts]
    return statistics.median([s.ttft_s for s in await asyncio.gather(*jobs)])


Case = Callable[[httpx.AsyncClient, Prompts], Awaitable[float]]
CASES: list[tuple[str, str, float, str, Case]] = [
    ("decode_1_short", "tok/s", 60, ">=", lambda c, p: decode_one(c, p, 40)),
    ("decode_1_at_2000", "tok/s", 45, ">=", lambda c, p: decode_one(c, p, 2000)),
    ("decode_4_short", "tok/s", 130, ">=", lambda c, p: decode_four(c, p, 40)),
    ("decode_4_at_2000", "tok/s", 55, ">=", lambda c, p: decode_four(c, p, 2000)),
    ("ttft_cold_2000_1", "s", 1.1, "<=", lambda c, p: cold_ttft(c, p, 1)),
    ("ttft_cold_2000_4", "s", 4.4, "<=", lambda c, p: cold_ttft(c, p, 4)),
    ("ttft_later_92_1", "s", 0.20, "<=", lambda c, p: later_ttft(c, p, 1)),
    ("ttft_later_92_4", "s", 1.0, "<=", lambda c, p: later_ttft(c, p, 4)),
]


def machine() -> dict[str, str]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


async def measure(
    url: str, runs: int, only: str, emit: Callable[[dict[str, object]], None]
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        prompts = Prompts(seed=1)
        await complete(client, prompts.fresh(40), 32)
        for name, unit, bar, sense, case in CASES:
            if only and only not in name:
                continue
            values = [await case(client, prompts) for _ in range(runs)]
            median = statistics.median(values)
            emit({
                "case": name, "unit": unit, "median": round(median, 4),
                "min": round(min(values), 4), "max": round(max(values), 4), "runs": runs,
                "bar": f"{sense} {bar}",
                "reached": median >= bar if sense == ">=" else median <= bar,
            })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="server config")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    lines: list[str] = []

    def emit(record: dict[str, object]) -> None:
        lines.append(json.dumps(record))
        print(lines[-1], flush=True)

    emit(dict(machine()))
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as folder:
        server = Server(pathlib.Path(folder), args.settings)
        try:
            ready_s = server.wait_ready()
            emit({"case": "start_to_ready", "unit": "s", "median": round(ready_s, 2),
                  "bar": "<= 10", "reached": ready_s <= 10})  # fmt: skip
            asyncio.run(measure(server.url, args.runs, args.only, emit))
        finally:
            server.stop()
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
