# SPDX-License-Identifier: Apache-2.0
"""Many turns streaming at once: CPU of the API process per token, and how late its tokens are.

The API process is this one; the fake engine and the readers are processes of their own, on the
same clock. A token is due when its engine's schedule says; it is sampled when the engine sends it,
served when its bytes are handed to the reader's socket, and read when the reader has them. Each
way is told apart, so that a reader or an engine that gets no core is not taken for a slow server.
Prints one JSON line; the bars are 60 us of CPU a token and 50 ms at p99.

    python -m benchmarks.streaming [--idle 200] [--turns 20] [--rate 200] [--seconds 10]
        [--burst 1] [--staggered]

By default the engine steps as engines do: all its requests at once, one frame a step. `--burst`:
tokens that a step brings each turn, as speculation does (the rate stays). `--staggered`: each
request has a clock and frames of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tests.fakes.appliance as running
from appliance.api_main import settle_memory
from appliance.app import create_app
from engine import api
from engine.transport import encode_outputs
from tests.fakes.appliance import RunningApp, default_assets, ids_of
from tests.fakes.engine import FakeEngine

TEXT = "The quick brown fox reads another file and finds nothing new in it. "
DELTA = '"type":"response.output_text.delta"'
IDLE_S = 1.0  # after so long without requests the steps begin anew
Chunks = list[tuple[float, bytes]]  # when, what


class SteadyEngine(FakeEngine):
    """A fake engine whose steps do not drift: a late one is made up for.

    sent: of each request, when each token was due and when it was sent.
    """

    def __init__(self, *args: Any, is_staggered: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._is_staggered = is_staggered
        self._step_s = self.burst / self.tokens_per_s
        self._step_due_s = 0.0
        self._held: dict[bytes, list[api.EngineOutput]] | None = None

    def _unfinished(self) -> list[Any]:
        return [request for request in self._requests.values() if request.finished is None]

    def _wait_ms(self) -> int:
        """Never 0: a loop that spins would take a core from those that are measured."""
        running = self._unfinished()
        if not running:
            return 5
        own_s = min(request.due_s for request in running)
        due_s = own_s if self._is_staggered else self._step_due_s
        return max(1, min(5, int((due_s - time.monotonic()) * 1000)))

    def _sample_due(self) -> None:
        now_s = time.monotonic()
        if self._is_staggered:
            for request in self._unfinished():
                if request.due_s <= now_s:
                    self._step([request], request.due_s)
                    request.due_s += self._step_s
        elif self._step_due_s <= now_s and (running := self._unfinished()):
            due_s = self._step_due_s if now_s - self._step_due_s < IDLE_S else now_s
            self._step_due_s = due_s + self._step_s
            self._step(running, due_s)

    def _step(self, requests: list[Any], due_s: float) -> None:
        """One frame for each client, as an engine sends them."""
        self._held = defaultdict(list)
        starts = [len(request.output) for request in requests]
        for request in requests:
            self._sample(request)
        held, self._held = self._held, None
        for peer, messages in held.items():
            self._socket.send(peer, encode_outputs(messages))
        now_s = time.monotonic()
        for request, start in zip(requests, starts, strict=True):
            new = [(due_s, now_s)] * (len(request.output) - start)
            self.sent[request.wire.request_id] += new

    def _send(self, peers: Any, message: api.EngineOutput) -> None:
        if self._held is None:
            super()._send(peers, message)
        else:
            for peer in peers:
                self._held[peer].append(message)


class Stamps:
    """ASGI middleware: when each chunk of a turn's stream was handed to its socket."""

    chunks: dict[str, Chunks] = {}

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        mine: Chunks = []

        async def stamped(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                mine.append((time.monotonic(), message["body"]))
            elif b"text/event-stream" in dict(message["headers"]).get(b"content-type", b""):
                Stamps.chunks[dict(message["headers"])[b"x-turn-id"].decode()] = mine

        await self._app(scope, receive, stamped if scope["type"] == "http" else send)


def run_engine(path: str, token_ids: list[int], options: dict[str, Any], pipe: Connection) -> None:
    """Serve until told to stop; the answer is the same for every request."""
    engine = SteadyEngine(path, lambda request: token_ids, **options)
    with engine:
        pipe.send("ready")
        pipe.recv()
        pipe.send(dict(engine.sent))


async def read_turn(port: int, session_id: str, max_tokens: int) -> Chunks:
    """What one turn's stream brought, and when."""
    body = json.dumps({"input": "Go on.", "stream": True, "max_output_tokens": max_tokens})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/sessions/{session_id}/turns HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    chunks: Chunks = []
    while chunk := await reader.read(1 << 16):
        chunks.append((time.monotonic(), chunk))
    writer.close()
    return chunks


def run_readers(port: int, sessions: list[str], max_tokens: int, pipe: Connection) -> None:
    """Read one turn of each session, all at once; send back what came when."""
    gc.disable()

    async def main() -> list[Chunks]:
        turns = (read_turn(port, session_id, max_tokens) for session_id in sessions)
        return list(await asyncio.gather(*turns))

    pipe.send(asyncio.run(main()))


def token_times(chunks: Chunks, ends: list[int]) -> list[float]:
    """When each token's last character was there. `ends`: of each token, in the whole text."""
    times: list[float] = []
    num_chars, rest = 0, ""
    for at_s, data in chunks:
        lines = (rest + data.decode()).split("\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith("data: ") and DELTA in line:
                num_chars += len(json.loads(line[6:])["delta"])
        while len(times) < len(ends) and ends[len(times)] <= num_chars:
            times.append(at_s)
    return times


def spread_ms(name: str, waits_s: list[float]) -> dict[str, float]:
    late = sorted(wait_s * 1000 for wait_s in waits_s)
    places = {"p50": len(late) // 2, "p99": int(len(late) * 0.99), "max": len(late) - 1}
    return {f"{name}_ms_{what}": round(late[place], 1) for what, place in places.items()}


def lateness(
    sent: dict[str, list[tuple[float, float]]], arrivals: list[Chunks], token_ids: list[int]
) -> dict[str, float]:
    """How long tokens took from their due time to the reader, and on each part of the way."""
    tokenizer = default_assets().tokenizer
    ends = list(accumulate(len(tokenizer.token_bytes(token_id)) for token_id in token_ids))
    parts: dict[str, list[float]] = defaultdict(list)
    num_events = 0
    for chunks in arrivals:
        text = b"".join(data for _, data in chunks).decode()
        num_events += text.count(DELTA)
        turn_id = text.partition("x-turn-id: ")[2].partition("\r\n")[0]
        served = token_times(Stamps.chunks[turn_id], ends)
        read = token_times(chunks, ends)
        assert len(sent[turn_id]) == len(served) == len(read) == len(ends), turn_id
        for (due_s, sent_s), served_s, read_s in zip(sent[turn_id], served, read, strict=True):
            parts["late"].append(read_s - due_s)
            parts["engine"].append(sent_s - due_s)
            parts["server"].append(served_s - sent_s)
            parts["reader"].append(read_s - served_s)
    spreads = {k: v for name, waits in parts.items() for k, v in spread_ms(name, waits).items()}
    return {"tokens": len(parts["late"]), "tokens_per_event": len(parts["late"]) / num_events} | (
        spreads
    )


def create_stamped(services: Any) -> Any:
    app = create_app(services)
    app.add_middleware(Stamps)
    return app


def measure(options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    num_tokens = int(options.rate * options.seconds)
    token_ids = (ids_of(TEXT.rstrip()) * num_tokens)[:num_tokens]
    steps = {"tokens_per_s": options.rate, "burst": options.burst}
    steps["is_staggered"] = options.staggered
    running.create_app = create_stamped  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        app = RunningApp(Path(folder), with_engine=False)
        ours, theirs = context.Pipe()
        path = app.config.engine.socket_path
        engine = context.Process(target=run_engine, args=(path, token_ids, steps, theirs))
        engine.start()
        ours.recv()
        with app:
            while not app.services.client.is_ready:
                time.sleep(0.01)
            sessions = [app.session() for _ in range(options.idle + options.turns)]
            settle_memory()
            port = int(app.url.rpartition(":")[2])
            results, sender = context.Pipe()
            args = (port, sessions[: options.turns], num_tokens, sender)
            readers = context.Process(target=run_readers, args=args)
            readers.start()
            idle_s, started_s = time.process_time(), time.monotonic()
            arrivals = results.recv()
            cpu_s, wall_s = time.process_time() - idle_s, time.monotonic() - started_s
            readers.join()
        ours.send("stop")
        found = lateness(ours.recv(), arrivals, token_ids)
        engine.join()
    return {
        "idle_sessions": options.idle,
        "turns": options.turns,
        "tokens_per_s": options.rate,
        "burst": options.burst,
        "staggered": options.staggered,
        "wall_s": round(wall_s, 1),
        "cpu_us_per_token": round(cpu_s / found["tokens"] * 1e6, 1),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--burst", type=int, default=1)
    parser.add_argument("--staggered", action="store_true")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
