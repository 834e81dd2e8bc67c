# SPDX-License-Identifier: Apache-2.0
"""Decode steps with drafts on the GPU, folded into rows of several tokens and a row a token.

    python -m benchmarks.gpu.draft_steps [--weights nvfp4] [--kv-dtype fp8] [--out FILE]
    python -m benchmarks.gpu.draft_steps --shape tiny --weights bf16 --steps 3      without a GPU

Prints JSON lines: milliseconds a step by form, all in one process and twice in turn, so that a
clock that drifts shows. `q_len` 1 is a row a token; a step of no drafts stands first, for what a
verified token costs. Steps hold 16 tokens at most, as an engine's with drafts do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.shapes import SHAPES, write_shape
from benchmarks.gpu.steps import Steps, fill_pool, measure_decode, tiny_runner
from engine.config import TOKENS_WITH_DRAFTS, EngineConfig
from engine.execution import decode_inputs
from engine.execution.decode_inputs import DecodeInputs
from engine.execution.graphs import GraphSet
from engine.execution.model_runner import build_model_runner

# (rows, context, drafts of each)
CASES = (
    (1, 65536, 0),
    (1, 65536, 1),
    (1, 65536, 3),
    (1, 65536, 4),
    (1, 65536, 7),
    (1, 65536, 8),
    (1, 8192, 4),
    (3, 65536, 4),
    (4, 32768, 3),
    (8, 32768, 0),
    (8, 32768, 1),
)
TINY_CASES = ((1, 128, 0), (1, 128, 4), (2, 64, 2))
FOLDED = "mla_decode_form=folded"
ROUNDS = 2


@contextmanager
def noted_captures() -> Iterator[dict[str, dict[str, float]]]:
    """By q_len of captured forwards: how many, and what they took of the start and of memory
    (compiling, scratch and all)."""
    totals: dict[str, dict[str, float]] = {}
    add = GraphSet.add

    def free_bytes() -> int:
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

    def noted(graphs: GraphSet, key: Any, function: Callable[[], None]) -> None:
        before_s, free = time.perf_counter(), free_bytes()
        add(graphs, key, function)
        if isinstance(key, tuple) and key[0] == "forward":
            total = totals.setdefault(f"q_len {key[2]}", {"graphs": 0, "s": 0.0, "mib": 0.0})
            total["graphs"] += 1
            total["s"] = round(total["s"] + time.perf_counter() - before_s, 2)
            total["mib"] = round(total["mib"] + (free - free_bytes()) / 2**20, 1)

    with mock.patch.object(GraphSet, "add", noted):
        yield totals


def forms_of(inputs: DecodeInputs, drafts: int) -> list[int]:
    """q_lens that a step of so many drafts may be folded to; 1 first."""
    if not drafts:
        return [1]
    q_lens = inputs.q_lens(TOKENS_WITH_DRAFTS)
    # One that holds twice the tokens wastes half of itself.
    return [1, *(q for q in q_lens[1:] if q < 2 * (1 + drafts) or q == q_lens[1])]


def measure(
    steps: Steps, inputs: DecodeInputs, rows: int, context: int, drafts: int, num_steps: int
) -> dict[str, Any]:
    """One case in all forms, by turns; the best of each form's rounds."""
    rounds: dict[int, list[float]] = {q_len: [] for q_len in forms_of(inputs, drafts)}
    for _ in range(ROUNDS):
        for q_len, times in rounds.items():
            with mock.patch.object(decode_inputs, "choose_q_len", lambda *_, q_len=q_len: q_len):
                times.append(measure_decode(steps, rows, context, num_steps, drafts)["forward_ms"])
    best = {q_len: min(times) for q_len, times in rounds.items()}
    return {
        "case": "drafts",
        "rows": rows,
        "context": context,
        "drafts": drafts,
        "forward_ms": {str(q_len): round(ms, 4) for q_len, ms in best.items()},
        "rounds": {str(q_len): [round(ms, 4) for ms in times] for q_len, times in rounds.items()},
        "folded_saves_ms": round(best[1] - min(best.values()), 4),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="v2-lite", choices=sorted(SHAPES))
    parser.add_argument("--weights", default="nvfp4")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "bf16", "fp8"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure everything; one JSON line each."""
    args = parse()
    is_tiny = args.shape == "tiny"
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        config = EngineConfig(
            model=str(write_shape(Path(folder), args.shape, args.weights)),
            load_format="dummy",
            device="cuda",
            max_slots=TOKENS_WITH_DRAFTS,
            token_budget=64,
            max_context_len=131072,
            prefill_graphs=False,
            kv_dtype=args.kv_dtype,
            speculation="ngram",
            kernels=FOLDED,
        )
        with noted_captures() as captures:
            if is_tiny:
                runner: Any = tiny_runner(replace(config, max_context_len=1024))
            else:
                runner = build_model_runner(config)
        layout = runner.layout
        fill_pool(runner.kv_pool, layout.latent_dim, layout.rope_dim)
        steps = Steps(runner, TOKENS_WITH_DRAFTS, {})
        inputs = runner.step_launcher().decode_inputs
        has_gpu = torch.cuda.is_available()
        lines: list[dict[str, Any]] = [
            {
                "device": torch.cuda.get_device_name() if has_gpu else "cpu",
                "torch": torch.__version__,
                "shape": args.shape,
                "weights": args.weights,
                "kv_dtype": args.kv_dtype,
                "ready_s": round(time.perf_counter() - started, 1),
                "captures": captures,
            }
        ]
        print(json.dumps(lines[0]), flush=True)
        with torch.inference_mode():
            for rows, context, drafts in TINY_CASES if is_tiny else CASES:
                lines.append(measure(steps, inputs, rows, context, drafts, args.steps))
                print(json.dumps(lines[-1]), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
