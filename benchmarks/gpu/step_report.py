# SPDX-License-Identifier: Apache-2.0
"""What an engine's step trace (`engine.step_trace`) says of a stretch of time, and of turns in it.

    python -m benchmarks.gpu.step_report steps.jsonl

Times are the monotonic clock's, which the benchmark's clients read too. A prefill step is one of
more tokens than rows. `idle` is the time that no step was under way.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

Line = dict[str, Any]


def read(path: pathlib.Path, start_us: float = 0, end_us: float = 1e18) -> list[Line]:
    """Steps launched and done in that time."""
    found = (json.loads(text) for text in path.read_text().splitlines())
    return [s for s in found if s["launch_us"] >= start_us and s["done_us"] <= end_us]


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def summary(steps: list[Line]) -> Line:
    """Counts and medians, decode and prefill apart; milliseconds."""
    decode = [s for s in steps if s["tokens"] == s["rows"]]
    prefill = [s for s in steps if s["tokens"] > s["rows"]]
    idle_us = reached = 0.0
    for step in steps:
        if reached:
            idle_us += max(0.0, step["launch_us"] - reached)
        reached = max(reached, step["done_us"])
    pairs = list(zip(steps, steps[1:], strict=False))
    periods = [
        (b["done_us"] - a["done_us"]) / 1e3
        for a, b in pairs
        if a["tokens"] == a["rows"] == b["rows"] == b["tokens"]
    ]
    return {
        "decode_steps": len(decode),
        "decode_forward_ms": median([s["forward_ms"] for s in decode]),
        "decode_sample_ms": median([s["sample_ms"] for s in decode]),
        "decode_launch_ms": median([(s["launched_us"] - s["launch_us"]) / 1e3 for s in decode]),
        "decode_period_ms": median(periods),
        "prefill_steps": len(prefill),
        "prefill_tokens": sum(s["tokens"] for s in prefill),
        "prefill_wall_ms": median([(s["done_us"] - s["launch_us"]) / 1e3 for s in prefill]),
        "prefill_forward_ms": median([s["forward_ms"] for s in prefill]),
        "prefill_launch_ms": median([(s["launched_us"] - s["launch_us"]) / 1e3 for s in prefill]),
        "prefill_forward_total_ms": round(sum(s["forward_ms"] for s in prefill), 1),
        "idle_ms": round(idle_us / 1e3, 1),
        "wall_ms": round((reached - steps[0]["launch_us"]) / 1e3, 1) if steps else 0.0,
    }


def first_token(steps: list[Line], start_us: float, first_us: float) -> Line | None:
    """Where a turn's time to its first token went, if it was alone; milliseconds."""
    own = [s for s in steps if s["launch_us"] >= start_us and s["done_us"] <= first_us]
    own = [s for s in own if s["tokens"] > s["rows"]]
    if not own:
        return None
    wall_us = own[-1]["done_us"] - own[0]["launch_us"]
    forward_ms = sum(s["forward_ms"] for s in own)
    return {
        "before_ms": round((own[0]["launch_us"] - start_us) / 1e3, 2),
        "steps": len(own),
        "steps_wall_ms": round(wall_us / 1e3, 2),
        "forward_ms": round(forward_ms, 2),
        "sample_ms": round(own[-1]["sample_ms"], 2),
        "longest_ms": round(max(s["forward_ms"] for s in own), 2),
        "launch_ms": median([(s["launched_us"] - s["launch_us"]) / 1e3 for s in own]),
        "between_ms": round(wall_us / 1e3 - forward_ms, 2),
        "after_ms": round((first_us - own[-1]["done_us"]) / 1e3, 2),
    }


if __name__ == "__main__":
    print(json.dumps(summary(read(pathlib.Path(sys.argv[1])))))
