# SPDX-License-Identifier: Apache-2.0
"""Steps of a model on the GPU without scheduler and HTTP: what the device alone allows.

    python -m benchmarks.gpu.steps [--weights nvfp4] [--kv-dtype fp8] [--kernels ...] [--out FILE]
    python -m benchmarks.gpu.steps --shape tiny --weights bf16 --steps 4      without a GPU

Prints JSON lines: decode steps at several batch sizes and contexts (two under way, as the loop
keeps them), and prefill chunks behind a cached prefix. Token ids and KV are random: rows of one and
the same token would share their experts, and a chip runs faster over zeros.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.shapes import SHAPES, write_shape
from benchmarks.gpu.spans import added_us, idle_share, kernel_spans
from engine.config import EngineConfig
from engine.execution.batch import ForwardBatch
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_loading import load_model
from engine.execution.model_runner import build_model_runner, override_kernels
from engine.execution.steps import Step, StepResult
from engine.sampling.params import RowSampling, SampleBatch
from kernels.latent_planes import latent_planes
from kvtiers.device_pool import DevicePool

DECODE = ((1, 8192), (1, 65536), (8, 32768), (16, 8192), (16, 65536))
# (new, cached), and the steps in which a cold prompt is computed
PREFILL = (
    (32, 65536),
    (96, 65536),
    (800, 65536),
    (800, 8192),
    (2048, 0),
    (2048, 30720),
    (2048, 63488),
    (4096, 61440),
    (8192, 57344),
)
PROFILED_DECODE = ((1, 65536), (8, 32768), (16, 65536))
# (new, cached, decode rows beside it)
PROFILED_PREFILL = ((800, 65536, 0), (800, 32768, 7), (4096, 0, 0), (4096, 61440, 0))
COLD_TOKENS = 65536
COLD_STEPS = (2048, 4096, 8192)
PAGE = 64
LAYER_BEGINS = "mla_absorb_kernel"


# Where there is no GPU (`--shape tiny`): the same lines over short contexts.
TINY_DECODE = ((1, 128), (4, 64))
TINY_PREFILL = ((40, 128), (64, 0))
TINY_COLD = (256, (64, 128))


class Steps:
    """Builds steps over rows whose pages lie one behind the other."""

    def __init__(self, runner: Any, max_slots: int, sampling: dict[str, Any]) -> None:
        assert isinstance(runner, DeviceModelRunner), "needs a GPU"
        self._runner = runner
        self._launcher = runner.step_launcher()
        self._rows = [RowSampling(**sampling) for _ in range(max_slots)]
        self._random = np.random.default_rng(0)

    def map_rows(self, num_rows: int, num_pages: int) -> np.ndarray[Any, Any]:
        """Page deltas of the first `num_pages` pages of each row."""
        stride = min(self._runner.num_pages // num_rows, num_pages)
        slot, index = np.divmod(np.arange(num_rows * num_pages), num_pages)
        page = slot * stride + index % stride
        return np.stack((slot, index, page), axis=1).astype(np.int32)

    def launch(
        self, lens: list[tuple[int, int]], deltas: np.ndarray[Any, Any], drafts: int = 0
    ) -> Callable[[], StepResult]:
        """A step of rows (cached, new), every row sampled. With drafts 1 + drafts rows have a slot,
        one token behind the other."""
        indptr = np.cumsum([0, *(new for _, new in lens)])
        positions = np.concatenate([np.arange(past, past + new) for past, new in lens])
        row_slots = np.arange(len(lens)) // (1 + drafts)
        slots = np.repeat(row_slots, [new for _, new in lens])
        page = slots * (self._runner.num_pages // (slots[-1] + 1)) + positions // PAGE
        mapping = page % self._runner.num_pages * PAGE + positions % PAGE
        num_rows, num_tokens = len(lens), len(positions)

        def ints(values: Any) -> torch.Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32)

        return self._launcher.launch(
            Step(
                forward=ForwardBatch(
                    step_id=0,
                    input_ids=ints(
                        self._random.integers(1000, self._runner.vocab_size, num_tokens)
                    ),
                    positions=ints(positions),
                    slot_mapping=ints(mapping),
                    row_indptr=ints(indptr),
                    row_slots=ints(row_slots),
                    seq_lens=ints([past + new for past, new in lens]),
                    sample_rows=ints(np.arange(num_rows)),
                    page_table=torch.empty(0),
                    page_copies=torch.empty(0, 3),
                ),
                page_deltas=deltas,
                sampling=SampleBatch(
                    rows=self._rows[:num_rows],
                    slots=row_slots,
                    draft_places=np.arange(len(lens)) % (1 + drafts),
                    positions=np.zeros(num_rows, dtype=np.int64),
                ),
            )
        )


def fill_pool(pool: torch.Tensor, latent_dim: int, rope_dim: int) -> None:
    """Random latents in all of it, about as large as normed ones are.

    Args:
        pool: bf16 or fp32 [pages, layers, page, C + R], or the bytes of fp8 planes.
    """
    if pool.dtype != torch.uint8:
        pool.normal_()
        return
    for layer in pool.unbind(1):
        planes = latent_planes(layer, latent_dim, rope_dim)
        # e4m3 without its NaN, of both signs: positive ones would give all rows the same experts.
        codes = planes.values.view(torch.uint8)
        codes.random_(0, 2 * 0x7F)
        codes.add_(codes >= 0x7F)
        planes.scales.fill_(2.0**-6)
        planes.rope.normal_()


def measure_decode(
    steps: Steps, num_rows: int, context: int, num_steps: int, drafts: int
) -> dict[str, Any]:
    """Milliseconds a decode step, two under way."""
    no_deltas = np.empty((0, 3), dtype=np.int32)

    def rows_at(length: int) -> list[tuple[int, int]]:
        return [(length + place, 1) for place in range(1 + drafts)] * num_rows

    steps.launch(rows_at(context), steps.map_rows(num_rows, -(-context // PAGE) + 4), drafts)()
    under_way: deque[Callable[[], StepResult]] = deque()
    start = time.perf_counter()
    launch_s = 0.0
    results = []
    for number in range(num_steps):
        before = time.perf_counter()
        under_way.append(steps.launch(rows_at(context + 1 + number % 64), no_deltas, drafts))
        launch_s += time.perf_counter() - before
        if len(under_way) == 2:
            results.append(under_way.popleft()())
    results += [finish() for finish in under_way]
    step_ms = (time.perf_counter() - start) / num_steps * 1e3
    return {
        "case": "decode",
        "rows": num_rows,
        "context": context,
        "drafts": drafts,
        "step_ms": round(step_ms, 4),
        "forward_ms": round(float(np.median([r.forward_ms for r in results])), 4),
        "sample_ms": round(float(np.median([r.sample_ms for r in results])), 4),
        "host_launch_ms": round(launch_s / num_steps * 1e3, 4),
        "tok_s_per_row": round(1e3 / step_ms, 1),
    }


def measure_prefill(steps: Steps, new: int, past: int) -> dict[str, Any]:
    """Milliseconds of one chunk behind a cached prefix; median of five, after one."""
    deltas = steps.map_rows(1, -(-(past + new) // PAGE))
    steps.launch([(past, new)], deltas)()
    times = [steps.launch([(past, new)], deltas)().forward_ms for _ in range(5)]
    return {"case": "prefill", "new": new, "past": past, "ms": round(float(np.median(times)), 3)}


def profile_decode(steps: Steps, num_rows: int, context: int) -> dict[str, Any]:
    """Where the time of a decode step goes: kernels by name, and the share without any.

    `kernels` says launches and two medians in us: how long one was there, most of which it may
    have waited for the kernel in front; and how much longer the step got by it.
    """
    no_deltas = np.empty((0, 3), dtype=np.int32)
    steps.launch([(context, 1)] * num_rows, steps.map_rows(num_rows, -(-context // PAGE) + 4))()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        under_way: deque[Callable[[], StepResult]] = deque()
        for _ in range(6):
            under_way.append(steps.launch([(context + 1, 1)] * num_rows, no_deltas))
            if len(under_way) == 2:
                under_way.popleft()()
        under_way.popleft()()
    spans = kernel_spans(profiler)
    spans = spans[len(spans) // 6 : -len(spans) // 6]  # the steps in the middle
    by_name: dict[str, list[tuple[float, float]]] = {}
    in_layer: Counter[str] = Counter()  # a kernel's second launch in a layer is another product
    for (start, end, name), added in zip(spans, added_us(spans), strict=True):
        if name == LAYER_BEGINS:
            in_layer.clear()
        in_layer[name] += 1
        key = name[:60] if in_layer[name] == 1 else f"{name[:60]} #{in_layer[name]}"
        by_name.setdefault(key, []).append((end - start, added))
    most = sorted(by_name.items(), key=lambda item: -sum(added for _, added in item[1]))[:18]
    return {
        "case": "profile",
        "rows": num_rows,
        "context": context,
        "idle_share": idle_share(spans),
        "kernels": {name: [len(t), *np.median(t, axis=0).round(2).tolist()] for name, t in most},
    }


def profile_prefill(steps: Steps, new: int, past: int, decode_rows: int) -> dict[str, Any]:
    """Where the time of a chunk goes that has `decode_rows` rows at its context beside it.

    `kernels` says launches and milliseconds in all, of one step.
    """
    lens = [(past, new)] + [(past, 1)] * decode_rows  # as the loop orders rows
    deltas = steps.map_rows(len(lens), -(-(past + new) // PAGE))
    steps.launch(lens, deltas)()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps.launch(lens, deltas[:0])()
    spans = kernel_spans(profiler)
    by_name: dict[str, list[float]] = {}
    for start, end, name in spans:
        by_name.setdefault(name[:60], []).append(end - start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "case": "profile_prefill",
        "new": new,
        "past": past,
        "decode_rows": decode_rows,
        "ms": round((max(end for _, end, _ in spans) - spans[0][0]) / 1e3, 3),
        "idle_share": idle_share(spans),
        "kernels": {name: [len(t), round(sum(t) / 1e3, 3)] for name, t in most},
    }


def measure_cold(steps: Steps, num_tokens: int, step_tokens: int) -> dict[str, Any]:
    """Milliseconds of a whole prompt, two steps under way; median of three, after one."""
    deltas = steps.map_rows(1, -(-num_tokens // PAGE))
    times: list[float] = []
    for _ in range(4):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        under_way: deque[Callable[[], StepResult]] = deque()
        for past in range(0, num_tokens, step_tokens):
            lens = [(past, min(step_tokens, num_tokens - past))]
            under_way.append(steps.launch(lens, deltas if past == 0 else deltas[:0]))
            if len(under_way) == 2:
                under_way.popleft()()
        for finish in under_way:
            finish()
        times.append((time.perf_counter() - start) * 1e3)
    ms = round(float(np.median(times[1:])), 1)
    return {"case": "cold", "tokens": num_tokens, "step_tokens": step_tokens, "ms": ms}


def tiny_runner(config: EngineConfig) -> DeviceModelRunner:
    """A device's runner whose device is the CPU."""
    loaded = load_model(replace(config, device="cpu", dtype="float32"))
    override_kernels(config.kernels)
    runner = DeviceModelRunner(
        loaded.model,
        DevicePool(loaded.model.kv_layout(PAGE, "float32"), 65, torch.device("cpu")),
        max_slots=config.max_slots,
        max_rows=config.rows_per_step,
        max_tokens=config.token_budget,
        max_context_len=1024,
        model_fingerprint="tiny",
        eager=True,
        prefill_graphs=config.prefill_graphs,
        drafted_tokens=config.drafted_tokens,
        longest_chain=config.longest_chain,
    )
    runner.warm_up()
    return runner


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="v2-lite", choices=sorted(SHAPES))
    parser.add_argument("--weights", default="nvfp4")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "bf16", "fp8"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--prefill-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="as engine.prefill_graphs",
    )
    parser.add_argument("--kernels", default="", help="as engine.kernels")
    parser.add_argument("--max-slots", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("decode", "prefill", "cold", "profile"))
    parser.add_argument("--profile", action="store_true", help="Name the kernels of a step.")
    parser.add_argument("--temperature", type=float, default=0.0, help="draw instead of argmax")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each row")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def cases_of(args: argparse.Namespace, steps: Steps) -> list[Callable[[], dict[str, Any]]]:
    """The measurements asked for."""
    is_tiny = args.shape == "tiny"
    cold_tokens, cold_steps = TINY_COLD if is_tiny else (COLD_TOKENS, COLD_STEPS)
    cases: list[Callable[[], dict[str, Any]]] = []
    if args.only in (None, "decode"):
        cases += [
            partial(measure_decode, steps, rows, context, args.steps, args.drafts)
            for rows, context in (TINY_DECODE if is_tiny else DECODE)
            if rows * (1 + args.drafts) <= args.max_slots
        ]
    if args.only in (None, "prefill"):
        chunks = TINY_PREFILL if is_tiny else PREFILL
        cases += [partial(measure_prefill, steps, new, past) for new, past in chunks]
    if args.only in (None, "cold"):
        cases += [partial(measure_cold, steps, cold_tokens, size) for size in cold_steps]
    if args.profile and not is_tiny:
        cases += [partial(profile_decode, steps, *case) for case in PROFILED_DECODE]
        cases += [partial(profile_prefill, steps, *case) for case in PROFILED_PREFILL]
    return cases


def main() -> None:
    """Measure everything; one JSON line each."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        config = EngineConfig(
            model=str(write_shape(Path(folder), args.shape, args.weights)),
            load_format="dummy",
            device="cuda",
            max_slots=args.max_slots,
            token_budget=max(COLD_STEPS) + args.max_slots,
            max_context_len=131072,
            eager=args.eager,
            prefill_graphs=args.prefill_graphs,
            kv_dtype=args.kv_dtype,
            kernels=args.kernels,
        )
        if args.shape == "tiny":
            runner: Any = tiny_runner(replace(config, max_context_len=1024, token_budget=512))
        else:
            runner = build_model_runner(config)
        sampling = {"temperature": args.temperature, "top_p": args.top_p}
        layout = runner.layout
        fill_pool(runner.kv_pool, layout.latent_dim, layout.rope_dim)
        steps = Steps(runner, args.max_slots, sampling)
        lines: list[dict[str, Any]] = [
            {
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "torch": torch.__version__,
                "shape": args.shape,
                "weights": args.weights,
                "kv_dtype": args.kv_dtype,
                "eager": args.eager,
                "prefill_graphs": args.prefill_graphs,
                "kernels": args.kernels,
                **sampling,
                "kv_pages": runner.num_pages,
                "ready_s": round(time.perf_counter() - started, 1),
            }
        ]
        print(json.dumps(lines[0]), flush=True)
        with torch.inference_mode():
            for case in cases_of(args, steps):
                lines.append(case())
                print(json.dumps(lines[-1]), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
