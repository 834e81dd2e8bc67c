# SPDX-License-Identifier: Apache-2.0
"""Many turns streaming at once: CPU of the API process per token, and how late its events are.

The API process is this one; the fake engine and the readers are processes of their own. A reader
dates an event by its arrival against its turn's own clock: the earliest schedule of equal steps
that no event of the turn beats. Prints one JSON line; the bars are 60 us and 50 ms.

    python -m benchmarks.streaming [--idle 200] [--turns 20] [--rate 200] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fakes.appliance import RunningApp, ids_of
from tests.fakes.engine import FakeEngine

TEXT = "The quick brown fox reads another file and finds nothing new in it. "
DELTA = b'"type":"response.output_text.delta"'


class SteadyEngine(FakeEngine):
    """A fake engine whose steps do not drift: a late one is made up for."""

    def _sample_due(self) -> None:
        now_s = time.monotonic()
        for request in list(self._requests.values()):
            if request.finished is None and request.due_s <= now_s:
                due_s = request.due_s
                self._sample(request)
                request.due_s = due_s + 1 / self.tokens_per_s


def run_engine(socket_path: str, token_ids: list[int], rate: float, pipe: Connection) -> None:
    """Serve until told to stop; the answer is the same for every request."""
    with SteadyEngine(socket_path, lambda request: token_ids, tokens_per_s=rate):
        pipe.send("ready")
        pipe.recv()


async def read_turn(port: int, session_id: str, max_tokens: int) -> list[float]:
    """Arrival times of one turn's text."""
    body = json.dumps({"input": "Go on.", "stream": True, "max_output_tokens": max_tokens})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/sessions/{session_id}/turns HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    times: list[float] = []
    while chunk := await reader.read(1 << 16):
        times += [time.monotonic()] * chunk.count(DELTA)
    writer.close()
    return times


def run_readers(port: int, sessions: list[str], max_tokens: int, pipe: Connection) -> None:
    """Read one turn of each session, all at once; send back the arrival times."""

    async def main() -> list[list[float]]:
        turns = (read_turn(port, session_id, max_tokens) for session_id in sessions)
        return list(await asyncio.gather(*turns))

    pipe.send(asyncio.run(main()))


def lateness_ms(times: list[float], rate: float) -> list[float]:
    start = min(at - place / rate for place, at in enumerate(times))
    return [(at - start - place / rate) * 1000 for place, at in enumerate(times)]


def measure(num_idle: int, num_turns: int, rate: float, seconds: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    num_tokens = int(rate * seconds)
    token_ids = (ids_of(TEXT) * num_tokens)[:num_tokens]
    with tempfile.TemporaryDirectory() as folder:
        app = RunningApp(Path(folder), with_engine=False)
        ours, theirs = context.Pipe()
        path = app.config.engine.socket_path
        engine = context.Process(target=run_engine, args=(path, token_ids, rate, theirs))
        engine.start()
        ours.recv()
        with app:
            while not app.services.client.is_ready:
                time.sleep(0.01)
            sessions = [app.session() for _ in range(num_idle + num_turns)][:num_turns]
            port = int(app.url.rpartition(":")[2])
            results, sender = context.Pipe()
            args = (port, sessions, num_tokens, sender)
            readers = context.Process(target=run_readers, args=args)
            idle_s, started_s = time.process_time(), time.monotonic()
            readers.start()
            arrivals = results.recv()
            cpu_s, wall_s = time.process_time() - idle_s, time.monotonic() - started_s
            readers.join()
        ours.send("stop")
        engine.join()
    late = sorted(ms for times in arrivals for ms in lateness_ms(times, rate))
    num = len(late)
    return {
        "idle_sessions": num_idle,
        "turns": num_turns,
        "tokens_per_s": rate,
        "tokens": num,
        "wall_s": round(wall_s, 1),
        "cpu_us_per_token": round(cpu_s / num * 1e6, 1),
        "late_ms_p50": round(late[num // 2], 1),
        "late_ms_p99": round(late[int(num * 0.99)], 1),
        "late_ms_max": round(late[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    print(json.dumps(measure(options.idle, options.turns, options.rate, options.seconds)))


if __name__ == "__main__":
    main()
