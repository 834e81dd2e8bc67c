# SPDX-License-Identifier: Apache-2.0
"""The API process's own time on a turn: from the request to its submission, and at its end.

A session with a long history, the real store and the real HTTP server; the fake engine and the
client are processes of their own, as they must not share an interpreter with what is measured.
Prints one JSON line a length: the server's time from the request's head to its being with the
engine's socket, the time from the engine's last word until the client's socket has the terminal
event (the commit's fsync included), what of both the durable writes of the store took (a disk that
has been idle for 0.1 s takes 2 ms longer on some machines), and the CPU of the server's loop until
the turn is accepted.
The bars: 5 ms for both times together at 30K tokens, and 1.5 times at most from 1K to 100K.

    python -m benchmarks.session_overhead [--tokens 1000 30000 100000] [--turns 30]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from appliance.api.sse import FrameResponse
from appliance.api_main import settle_memory
from appliance.turn_preparation import Ask
from appliance.turn_run import TurnRun
from engine import api
from tests.fakes.appliance import RunningApp, says
from tests.fakes.engine import FakeEngine

PAUSE_S = 0.03  # between turns: the fake engine is slow to digest one
TOOLS = [
    {
        "type": "function",
        "name": f"tool_{number}",
        "description": "Reads a part of a file of the repository and returns it with numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The file"},
                "start": {"type": "integer", "minimum": 1},
                "count": {"type": "integer", "minimum": 1, "maximum": 500},
            },
            "required": ["path"],
        },
    }
    for number in range(12)
]


class Stopwatch:
    """Times turns in the server's own thread."""

    def __init__(self) -> None:
        self.submit_s: list[float] = []
        self.end_s: list[float] = []
        self.start_cpu_s: list[float] = []
        self._last_word_s = 0.0
        self.store_s: dict[str, list[float]] = {"begin_turn": [], "commit_turn": []}

    def watch(self, app: RunningApp) -> None:
        turns, client = app.asgi.state.context.turns, app.services.client
        start, finish, send = turns.start, turns.runner.ending.finish, client._send

        async def timed_start(ask: Ask) -> str:
            before_s = time.thread_time()
            turn_id = await start(ask)
            self.start_cpu_s.append(time.thread_time() - before_s)
            return str(turn_id)

        def timed_send(message: api.EngineInput) -> None:
            send(message)
            if isinstance(message, api.GenerateRequest):
                run = turns.runner.find(message.request_id)
                self.submit_s.append(time.monotonic() - run.started_s)

        async def timed_finish(run: TurnRun) -> None:
            self._last_word_s = run.progress_s
            await finish(run)

        for name, times_s in self.store_s.items():
            self._watch_store(app.services.store, name, times_s)

        async def timed_stream(
            response: FrameResponse, scope: Scope, receive: Receive, send: Send
        ) -> None:
            async def timed(message: Message) -> None:
                await send(message)
                if b"event: turn.completed" in message.get("body", b""):
                    self.end_s.append(time.monotonic() - self._last_word_s)

            await stream(response, scope, receive, timed)

        stream = FrameResponse.__call__
        FrameResponse.__call__ = timed_stream  # type: ignore[method-assign]
        turns.start, turns.runner.ending.finish = timed_start, timed_finish
        client._send = timed_send  # type: ignore[method-assign]

    def _watch_store(self, store: Any, name: str, times_s: list[float]) -> None:
        write = getattr(store, name)

        async def timed_write(*args: Any) -> Any:
            before_s = time.monotonic()
            stored = await write(*args)
            times_s.append(time.monotonic() - before_s)
            return stored

        setattr(store, name, timed_write)


def run_turns(url: str, session_id: str, num_turns: int, pipe: Connection) -> None:
    """Run turns one after the other; send back how long each took to its `turn.cache` event."""
    host, _, port = url.removeprefix("http://").partition(":")
    path = f"/v1/sessions/{session_id}/turns"
    first_s = []
    for number in range(num_turns):
        time.sleep(PAUSE_S)
        body = json.dumps({"input": f"Go on with step {number}.", "stream": True})
        connection = http.client.HTTPConnection(host, int(port))
        started_s = time.perf_counter()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        while (line := reply.readline()) and not line.startswith(b"event: turn.cache"):
            pass
        first_s.append(time.perf_counter() - started_s)
        reply.read()
        connection.close()
    pipe.send(first_s)


def serve_engine(socket_path: str, done: Event) -> None:
    """A fake engine in a process of its own: it must not share an interpreter with the server."""
    with FakeEngine(socket_path, says("Done."), max_context_len=1 << 20):
        done.wait()


@contextlib.contextmanager
def engine_beside(app: RunningApp) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    process = spawn.Process(target=serve_engine, args=(app.config.engine.socket_path, done))
    process.start()
    try:
        while not app.services.client.is_ready:
            time.sleep(0.01)
        yield
    finally:
        done.set()
        process.join()


def measure(num_tokens: int, num_turns: int) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningApp(Path(folder), with_engine=False) as app,
        engine_beside(app),
    ):
        object.__setattr__(app.services.assets, "max_context_len", 1 << 20)
        chunk = "the quick brown fox reads another file and finds nothing new in it " * 60
        session_id = app.session(instructions="You are a coding agent.", tools=TOOLS)
        while app.get(f"/v1/sessions/{session_id}").json()["num_tokens"] < num_tokens:
            app.turn(session_id, chunk)
        stopwatch = Stopwatch()
        stopwatch.watch(app)
        settle_memory()
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        args = (app.url, session_id, num_turns, theirs)
        client = spawn.Process(target=run_turns, args=args)
        client.start()
        first_s = ours.recv()
        client.join()
        session = app.get(f"/v1/sessions/{session_id}").json()
    return {
        "history_tokens": session["num_tokens"],
        "turns": num_turns,
        "submit_ms_median": median_ms(stopwatch.submit_s),
        "of_that_store_ms_median": median_ms(stopwatch.store_s["begin_turn"]),
        "end_ms_median": median_ms(stopwatch.end_s),
        "of_that_commit_ms_median": median_ms(stopwatch.store_s["commit_turn"]),
        "loop_cpu_until_accepted_ms_median": median_ms(stopwatch.start_cpu_s),
        "client_to_cache_event_ms_median": median_ms(first_s),
        "bar_ms": 5.0,
    }


def median_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 30_000, 100_000])
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    for num_tokens in arguments.tokens:
        print(json.dumps(measure(num_tokens, arguments.turns)), flush=True)


if __name__ == "__main__":
    main()
