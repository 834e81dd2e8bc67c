# SPDX-License-Identifier: Apache-2.0
"""The API process's own cost of a turn: from the request to its submission, and of its end.

A session with a long history, a fake engine, the real store and the real HTTP server. Prints one
JSON line a length: the server's time from request to submit, the time from the last token to the
terminal event (the commit's fsync included), and the CPU that the event loop spends until submit,
which other processes on the machine do not change. The bars: 5 ms for both times together at 30K
tokens, and 1.5 times at most from 1K to 100K.

    python -m benchmarks.session_overhead [--tokens 1000 30000 100000] [--turns 30]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

from appliance.turn_preparation import Ask
from appliance.turn_run import TurnRun
from tests.fakes.appliance import RunningApp, says
from tests.fakes.engine import FakeEngine

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
    """Times calls of the turn service in the server's own thread."""

    def __init__(self) -> None:
        self.start_cpu_s: list[float] = []
        self.end_s: list[float] = []

    def watch(self, app: RunningApp) -> None:
        turns = app.asgi.state.context.turns
        start, finish = turns.start, turns.runner.ending.finish

        async def timed_start(ask: Ask) -> str:
            before_s = time.thread_time()
            turn_id = await start(ask)
            self.start_cpu_s.append(time.thread_time() - before_s)
            return str(turn_id)

        async def timed_finish(run: TurnRun) -> None:
            before_s = time.perf_counter()
            await finish(run)
            self.end_s.append(time.perf_counter() - before_s)

        turns.start, turns.runner.ending.finish = timed_start, timed_finish


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
        submit_s, first_s = [], []
        histogram = app.services.metrics.turn_submit_seconds
        for number in range(num_turns):
            before_s = histogram._sum.get()
            started_s = time.perf_counter()
            body = {"input": f"Go on with step {number}.", "stream": True}
            path = f"/v1/sessions/{session_id}/turns"
            with app.http.stream("POST", path, json=body) as reply:
                lines = reply.iter_lines()
                next(line for line in lines if line.startswith("event: turn.cache"))
                first_s.append(time.perf_counter() - started_s)
                for _ in lines:
                    pass
            submit_s.append(histogram._sum.get() - before_s)
        session = app.get(f"/v1/sessions/{session_id}").json()
    return {
        "history_tokens": session["num_tokens"],
        "turns": num_turns,
        "submit_ms_median": median_ms(submit_s),
        "end_ms_median": median_ms(stopwatch.end_s),
        "loop_cpu_until_submit_ms_median": median_ms(stopwatch.start_cpu_s),
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
