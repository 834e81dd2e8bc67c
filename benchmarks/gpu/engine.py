# SPDX-License-Identifier: Apache-2.0
"""Agent sessions against the real server on a GPU, over HTTP, on a model of random weights.

    python -m benchmarks.gpu.engine [--weights nvfp4] [--api completions|session] [--out FILE]
                                    [--cases 1x65536x4,8x32768x5,16x65536x4] [--url URL]
                                    [--gap S] [--arrival S] [--shared N]
                                    [--set engine.kv_pool_tokens=N ...]

Sessions start together, or `--arrival` seconds apart. A context is 4,000 tokens shared by all (or
`--shared`, as forks of one session have), then tokens of its own; every turn adds `--new` tokens
and asks for `--output`, greedy, `--gap` seconds after the last.
`completions` resends the whole history as token ids, `session` sends the new items
alone (text of one byte a token). One JSON line a case: tokens a second of each user (1 / time per
output token, per turn), output tokens a second of all, in the whole run and while every session is
in its later turns (`output_tok_s_later`), times to the first token, cold and of later turns, and
the share of later turns that computed nothing but their new tokens (and at most the page that the
history ended in). A client keeps its history as the JSON it sends: no clock counts the writing of
64K numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.gpu import step_report
from benchmarks.gpu.machine import machine_facts
from benchmarks.gpu.shapes import SHAPES, write_shape

ROOT = pathlib.Path(__file__).parents[2]
SHARED_TOKENS = 4000
WORD_IDS = range(1000, 100_000)
LETTERS = "abcdefghijklmnopqrstuvwxyz    "
START_TIMEOUT_S = 540.0
PAGE_TOKENS = 64
# Floors of a decode step on one H200: bytes of weights and KV over 4.54 TB/s, V2-Lite shape.
WEIGHT_BYTES = {"bf16": 4.8e9, "fp8": 2.5e9, "nvfp4": 1.35e9, "mxfp4": 1.28e9, "mxint4": 1.28e9}
KV_BYTES_A_TOKEN = {"bf16": 27 * 576 * 2, "fp8": 27 * 656}
HBM_BYTES_A_S = 4.54e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One case."""

    sessions: int
    context: int
    turns: int
    new: int
    output: int
    api: str
    gap_s: float = 0.0
    arrival_s: float = 0.0
    shared: int | None = None  # tokens that all contexts begin with; None: 4,000, or half of one


@dataclass(slots=True, kw_only=True)
class Turn:
    """What the client saw of one turn."""

    ttft_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_s: float  # 1 / time per output token
    num_tokens: int
    start_s: float
    times: list[tuple[float, int]]  # when so many tokens came


@dataclass(slots=True, kw_only=True)
class User:
    """One session and its client."""

    http: httpx.AsyncClient
    load: Load
    number: int
    history: list[str] = field(default_factory=list)  # token ids, as JSON
    session_id: str = ""
    turns: list[Turn] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)  # of the last turn: prompt tokens, those of them cached

    async def run(self) -> None:
        """All turns, one after the other."""
        await asyncio.sleep(self.number * self.load.arrival_s)
        shared, own = random.Random(0), random.Random(f"user {self.number}")
        num_shared = self.load.shared
        if num_shared is None:
            num_shared = min(SHARED_TOKENS, self.load.context // 2)
        first = self.load.context - num_shared
        if self.load.api == "session":
            text = "".join(shared.choices(LETTERS, k=num_shared))
            body = {"model": "default", "instructions": text}
            reply = await self.http.post("/v1/sessions", json=body)
            reply.raise_for_status()
            self.session_id = reply.json()["id"]
        self.history = list(map(str, shared.choices(WORD_IDS, k=num_shared)))
        for index in range(self.load.turns):
            num_new = first if index == 0 else self.load.new
            if index:
                await asyncio.sleep(self.load.gap_s)
            self.turns.append(await self._turn(own, num_new))

    async def _turn(self, own: random.Random, num_new: int) -> Turn:
        is_session = self.load.api == "session"
        body = self._session_body(own, num_new) if is_session else self._body(own, num_new)
        start = time.perf_counter()
        times: list[tuple[float, int]] = []
        events = self._session_tokens(body) if is_session else self._completion_tokens(body)
        async for count in events:
            times.append((time.perf_counter(), count))
        num_tokens = sum(count for _, count in times)
        if num_tokens != self.load.output:
            raise SystemExit(f"wanted {self.load.output} tokens, got {num_tokens}")
        spread = max(times[-1][0] - times[0][0], 1e-9)
        return Turn(
            ttft_s=times[0][0] - start,
            tokens_s=(num_tokens - 1) / spread,
            start_s=start,
            times=times,
            num_tokens=num_tokens,
            prompt_tokens=self.usage[0],
            cached_tokens=self.usage[1],
        )

    def _body(self, own: random.Random, num_new: int) -> bytes:
        self.history += map(str, own.choices(WORD_IDS, k=num_new))
        settings = {
            "model": "default",
            "max_tokens": self.load.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return f'{{"prompt":[{",".join(self.history)}],{json.dumps(settings)[1:]}'.encode()

    async def _completion_tokens(self, body: bytes) -> AsyncIterator[int]:
        async for event in self._events("/v1/completions", body):
            if event.get("error"):
                raise SystemExit(f"the stream failed: {event['error']}")
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                self.usage = (usage["prompt_tokens"], details.get("cached_tokens", 0))
            for choice in event.get("choices", []):
                ids = choice.get("token_ids") or []
                self.history += map(str, ids)
                if ids:
                    yield len(ids)

    def _session_body(self, own: random.Random, num_new: int) -> bytes:
        text = "".join(own.choices(LETTERS, k=num_new))
        body = {
            "input": [{"type": "message", "role": "user", "content": text}],
            "stream": True,
            "max_output_tokens": self.load.output,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return json.dumps(body).encode()

    async def _session_tokens(self, body: bytes) -> AsyncIterator[int]:
        seen = 0
        async for event in self._events(f"/v1/sessions/{self.session_id}/turns", body):
            kind = event.get("type")
            if kind in ("turn.failed", "turn.cancelled"):
                raise SystemExit(f"{kind}: {event.get('error')}")
            if kind == "response.output_text.delta":
                seen += 1
                yield 1
            elif kind in ("turn.completed", "turn.incomplete"):
                usage = event["usage"]
                cached = usage.get("input_tokens_details", {}).get("cached_tokens", 0)
                self.usage = (usage["input_tokens"], cached)
                # Several tokens may come as one piece of text; the usage counts them all.
                yield event["usage"]["output_tokens"] - seen

    async def _events(self, path: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
        headers = {"content-type": "application/json"}
        async with self.http.stream("POST", path, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise SystemExit((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


class Server:
    """An appliance of our own on a free port."""

    def __init__(self, folder: pathlib.Path, settings: list[str]) -> None:
        self.state = folder / "run" / "state.json"
        flags = ["server.port=0", f"server.run_dir={folder}/run", f"server.state_dir={folder}/s"]
        command = [sys.executable, "-m", "appliance", "serve"]
        for setting in [*flags, *settings]:
            command += ["--set", setting]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def wait_ready(self) -> str:
        """Its address."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            try:
                url = str(json.loads(self.state.read_text())["url"])
                if httpx.get(f"{url}/ready").status_code == 200:
                    return url
            except (OSError, ValueError, KeyError, httpx.TransportError):
                pass
            time.sleep(0.1)
        raise SystemExit("the server did not become ready")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def traced(path: pathlib.Path, users: list[User], start_s: float) -> list[dict[str, Any]]:
    """What the engine's steps were in a case; of one user alone also where first tokens went."""
    time.sleep(1.1)  # the trace is written once a second
    steps = step_report.read(path, start_s * 1e6)
    lines: list[dict[str, Any]] = [{"trace": "steps", **step_report.summary(steps)}]
    for turn in users[0].turns if len(users) == 1 else []:
        first_us = (turn.start_s + turn.ttft_s) * 1e6
        found = step_report.first_token(steps, turn.start_s * 1e6, first_us)
        lines.append(
            {"trace": "first token", "ttft_ms": round(turn.ttft_s * 1e3, 1), **(found or {})}
        )
    return lines


async def import_client(url: str) -> None:
    """One request by a client that is thrown away: the process's first one imports for 20 ms and
    more what it is sent with, which is no server's time. Users still connect on their own clock."""
    async with httpx.AsyncClient(base_url=url) as http:
        (await http.get("/ready")).raise_for_status()


async def drive(url: str, load: Load) -> list[User]:
    """All users at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        users = [User(http=http, load=load, number=n) for n in range(load.sessions)]
        await asyncio.gather(*(user.run() for user in users))
        for user in users:
            if user.session_id:
                await http.delete(f"/v1/sessions/{user.session_id}")
    return users


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def later_tokens_s(users: list[User]) -> float | None:
    """Output tokens a second of all, from when the last session's first turn has ended until the
    first session's last one has."""
    start_s = max(user.turns[0].times[-1][0] for user in users)
    end_s = min(user.turns[-1].times[-1][0] for user in users)
    if end_s <= start_s:
        return None
    every = (came for user in users for turn in user.turns for came in turn.times)
    return round(sum(num for at_s, num in every if start_s < at_s <= end_s) / (end_s - start_s), 1)


def measure(
    url: str, load: Load, weights: str, kv: str, trace: pathlib.Path | None = None
) -> list[dict[str, Any]]:
    """Drive one case; its line, and more of a server that writes a trace."""
    start = time.perf_counter()
    users = asyncio.run(drive(url, load))
    wall_s = time.perf_counter() - start
    turns = [turn for user in users for turn in user.turns]
    later_turns = [turn for user in users for turn in user.turns[1:]]
    later = [turn.ttft_s for turn in later_turns]
    computed = [turn.prompt_tokens - turn.cached_tokens - load.new for turn in later_turns]
    rates = [turn.tokens_s for turn in turns]
    kv_bytes = load.sessions * load.context * KV_BYTES_A_TOKEN[kv]
    floor_s = (WEIGHT_BYTES[weights] + kv_bytes) / HBM_BYTES_A_S
    line = {
        "case": f"{load.sessions} x {load.context}",
        "api": load.api,
        "weights": weights,
        "kv": kv,
        "turns": load.turns,
        "tps_user_p50": round(statistics.median(rates), 1),
        "tps_user_p10": round(quantile(rates, 0.1), 1),
        "tps_user_floor": round(1 / floor_s, 1),
        "output_tok_s": round(sum(turn.num_tokens for turn in turns) / wall_s, 1),
        "output_tok_s_later": later_tokens_s(users),
        "ttft_cold_p50_s": round(statistics.median(u.turns[0].ttft_s for u in users), 3),
    }
    if later:  # of one turn each, there are none
        line |= {
            "ttft_later_p50_ms": round(statistics.median(later) * 1e3, 1),
            "ttft_later_p99_ms": round(quantile(later, 0.99) * 1e3, 1),
            "later_all_cached": round(sum(n <= PAGE_TOKENS for n in computed) / len(computed), 3),
        }
    return [line] if trace is None else [line, *traced(trace, users, start)]


def loads_of(args: argparse.Namespace) -> list[Load]:
    """The cases asked for, sessions x context x turns each."""
    loads = []
    for case in args.cases.split(","):
        sessions, context, turns = (int(part) for part in case.split("x"))
        loads.append(
            Load(
                sessions=sessions,
                context=context,
                turns=turns,
                new=args.new,
                output=args.output,
                api=args.api,
                gap_s=args.gap,
                arrival_s=args.arrival,
                shared=args.shared,
            )
        )
    return loads


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="v2-lite", choices=sorted(SHAPES))
    parser.add_argument("--weights", default="nvfp4", choices=sorted(WEIGHT_BYTES))
    parser.add_argument("--kv", default="bf16", choices=sorted(KV_BYTES_A_TOKEN))
    parser.add_argument("--api", default="completions", choices=("completions", "session"))
    parser.add_argument("--cases", default="1x65536x4,8x32768x5,16x65536x4")
    parser.add_argument("--new", type=int, default=800)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between turns")
    parser.add_argument("--arrival", type=float, default=0.0, help="seconds between sessions")
    parser.add_argument("--shared", type=int, help="tokens that all contexts begin with (4000)")
    parser.add_argument("--url", default="", help="a server that is running already")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="its settings")
    parser.add_argument("--trace", action="store_true", help="lines of the engine's steps too")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    shortest = min(load.context for load in loads_of(args))
    if args.shared is not None and not 0 <= args.shared < shortest:
        parser.error(f"--shared: got {args.shared}; allowed: 0 to less than {shortest}, a context")
    if args.trace and args.url:
        parser.error("--trace: only for a server that the benchmark starts, without --url")
    return args


def main() -> None:
    """Start the server, drive every case, write the lines."""
    args = parse()
    loads = loads_of(args)
    lines = [machine_facts()]
    print(json.dumps(lines[0]), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        server = None
        trace = folder / "steps.jsonl" if args.trace else None
        url = args.url
        if not url:
            model = write_shape(folder / args.shape, args.shape, args.weights)
            settings = {
                "engine.model": str(model),
                "engine.load_format": "dummy",
                "engine.max_slots": max(load.sessions for load in loads),
                "engine.kv_dtype": args.kv,
            }
            if trace is not None:
                settings["engine.step_trace"] = str(trace)
            flags = [f"{key}={value}" for key, value in settings.items()]
            server = Server(folder, [*flags, *args.settings])
            url = server.wait_ready()
        try:
            asyncio.run(import_client(url))
            for load in loads:
                for line in measure(url, load, args.weights, args.kv, trace):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
        finally:
            if server is not None:
                server.stop()
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
