# SPDX-License-Identifier: Apache-2.0
"""The API process's own cost of a turn: from the request to its submission to the engine.

A session with a long history (30K tokens), a fake engine, the real store and the real HTTP
server. Prints one JSON line: client-side time to the first event, and the server-side time from
request to submit (the figure with the bar: at most 10 ms).

    python -m benchmarks.session_overhead [--tokens 30000] [--turns 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from tests.fakes.appliance import RunningApp, says

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


def measure(num_tokens: int, num_turns: int) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningApp(Path(folder), says("Done."), max_context_len=1 << 20) as app,
    ):
        object.__setattr__(app.services.assets, "max_context_len", 1 << 20)
        chunk = "the quick brown fox reads another file and finds nothing new in it " * 60
        session_id = app.session(instructions="You are a coding agent.", tools=TOOLS)
        while app.get(f"/v1/sessions/{session_id}").json()["num_tokens"] < num_tokens:
            app.turn(session_id, chunk)
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
        "submit_ms_median": round(statistics.median(submit_s) * 1000, 2),
        "submit_ms_max": round(max(submit_s) * 1000, 2),
        "client_to_cache_event_ms_median": round(statistics.median(first_s) * 1000, 2),
        "bar_ms": 10.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.tokens, arguments.turns)))


if __name__ == "__main__":
    main()
