# SPDX-License-Identifier: Apache-2.0
"""What the control plane costs: one JSON line a case. No model, no device, one core.

    python -m benchmarks.scheduler              every case (about a minute, 3 GB)
    python -m benchmarks.scheduler decode       cases whose name begins so (tiers: with L2, L3)

Does not know what a step computes: results are made up, tokens are random.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import _scheduler as cpp

PAGE_SIZE = 64
LONG = 130_000
VOCAB = 100_000
PLAN_ARRAYS = (
    "row_request_ids",
    "row_slots",
    "row_starts",
    "row_lens",
    "row_samples",
    "input_ids",
    "slot_mapping",
    "page_deltas",
    "page_copies",
)


def prompt(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


def spec(request_id: int, tokens: NDArray[np.int32], max_new: int) -> cpp.RequestSpec:
    return cpp.RequestSpec(request_id=request_id, token_ids=tokens, max_new_tokens=max_new)


def results(plan: cpp.Plan) -> cpp.StepDone:
    rows = len(plan.row_slots)
    return cpp.StepDone(
        step_id=plan.step_id,
        num_accepted=plan.row_samples.astype(np.int32),
        token_ids=np.full((rows, 1), 5, np.int32),
        finished=np.zeros(rows, np.uint8),
        failed=np.zeros(rows, np.uint8),
    )


def acks(plan: cpp.Plan) -> list[cpp.TransferAck]:
    """Every transfer of a plan is over at once."""
    return [cpp.TransferAck(ticket=ticket, ok=True) for ticket in plan.moves[:, 0].tolist()]


def answers(plan: cpp.Plan) -> list[cpp.ProbeDone]:
    return [cpp.ProbeDone(probe_id=probe_id, num_pages=0) for probe_id in plan.probe_ids.tolist()]


def settle(scheduler: cpp.Scheduler, now_ms: int) -> None:
    """Until no transfer is under way."""
    while scheduler.stats()["transfers_in_flight"] > 0:
        scheduler.advance(acks(scheduler.next_plan(now_ms)))


def run_until_idle(scheduler: cpp.Scheduler, now_ms: int = 0) -> None:
    while (plan := scheduler.next_plan(now_ms)).step_id >= 0:
        scheduler.advance([results(plan)])


def summary(name: str, samples_us: list[float], **facts: object) -> dict[str, object]:
    ordered = sorted(samples_us)
    return {
        "case": name,
        **facts,
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[int(len(ordered) * 0.99)], 2),
    }


def decode_step(
    rows: int, context: int, num_steps: int = 400, *, has_tiers: bool = False
) -> Iterator[dict[str, object]]:
    """A step of nothing but decode rows: plan, make the results, advance (and ack transfers)."""
    max_new = num_steps + 64  # the first rows decode while the last are still prefilled
    pages = rows * ((context + max_new) // PAGE_SIZE + 2)
    scheduler = cpp.Scheduler(
        cpp.SchedulerConfig(
            page_size=PAGE_SIZE,
            num_pages=pages,
            max_slots=rows,
            max_context_len=context + max_new,
            token_budget=1 << 22,
            num_l2_pages=pages if has_tiers else 0,
            use_l3=has_tiers,
        )
    )
    for row in range(rows):
        scheduler.submit([spec(row, prompt(context, row), max_new)])
    while (plan := scheduler.next_plan(0)).row_lens.max() > 1 or len(plan.row_slots) < rows:
        scheduler.advance([results(plan), *acks(plan)])
    scheduler.advance([results(plan), *acks(plan)])
    one, token = np.ones(rows, np.int32), np.full((rows, 1), 5, np.int32)
    zero = np.zeros(rows, np.uint8)
    step_us, read_us = [], []
    gc.disable()
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        plan = scheduler.next_plan(0)
        planned = time.perf_counter_ns()
        for name in PLAN_ARRAYS:
            getattr(plan, name)
        done_moves = acks(plan)
        read = time.perf_counter_ns()
        done = cpp.StepDone(
            step_id=plan.step_id, num_accepted=one, token_ids=token, finished=zero, failed=zero
        )
        scheduler.advance([done, *done_moves])
        end = time.perf_counter_ns()
        step_us.append((planned - start + end - read) / 1e3)
        read_us.append((read - planned) / 1e3)
    gc.enable()
    yield summary(
        "decode_step_tiers" if has_tiers else "decode_step",
        step_us,
        rows=rows,
        context=context,
        read_arrays_us=round(statistics.median(read_us), 2),
    )


def submit_prompt(
    length: int, repeats: int = 25, *, has_tiers: bool = False
) -> Iterator[dict[str, object]]:
    """From the spec to a plan with the request in it, on a scheduler that lives on: cold, and with
    all of it cached. With tiers the cold prompt is named first, to ask the store for it."""
    cold_us: list[float] = []
    cached_us: list[float] = []
    publish_us: list[float] = []
    scheduler = cpp.Scheduler(
        cpp.SchedulerConfig(
            page_size=PAGE_SIZE,
            num_pages=2 * (length // PAGE_SIZE + 2),
            max_slots=2,
            max_context_len=length + 8,
            token_budget=length,
            num_l2_pages=4 * (length // PAGE_SIZE + 2) if has_tiers else 0,
            use_l3=has_tiers,
            probe_l3=has_tiers,
        )
    )
    for repeat in range(repeats):
        tokens = prompt(length, repeat)
        for samples, request_id in ((cold_us, 2 * repeat), (cached_us, 2 * repeat + 1)):
            start = time.perf_counter_ns()
            scheduler.submit([spec(request_id, tokens, 1)])
            plan = scheduler.next_plan(repeat)
            samples.append((time.perf_counter_ns() - start) / 1e3)
            done = results(plan)
            start = time.perf_counter_ns()
            scheduler.advance([done])
            if samples is cold_us:
                publish_us.append((time.perf_counter_ns() - start) / 1e3)
            scheduler.advance([*acks(plan), *answers(plan)])
            settle(scheduler, repeat)
        scheduler.drop_prefix(tokens)
        scheduler.drain_kv_events()
    for name, samples in (
        ("submit_cold", cold_us),
        ("submit_cached", cached_us),
        ("publish", publish_us),
    ):
        line = summary(name + "_tiers" * has_tiers, samples, tokens=length)
        yield {**line, "ns_per_token": round(statistics.median(samples) * 1e3 / length, 2)}


def move_prompt(length: int, repeats: int = 15) -> Iterator[dict[str, object]]:
    """One call of move on a long prefix: down to the store, and up again from there."""
    pages = length // PAGE_SIZE + 2
    scheduler = cpp.Scheduler(
        cpp.SchedulerConfig(
            page_size=PAGE_SIZE,
            num_pages=pages,
            max_slots=1,
            max_context_len=length + 8,
            token_budget=length,
            num_l2_pages=pages,
            use_l3=True,
        )
    )
    tokens = prompt(length, 0)
    scheduler.submit([spec(0, tokens, 1)])
    plan = scheduler.next_plan(0)
    scheduler.advance([results(plan), *acks(plan)])
    settle(scheduler, 0)
    samples: dict[str, list[float]] = {"l3": [], "l1": []}
    for repeat in range(1, repeats + 1):
        for tier, samples_us in samples.items():
            start = time.perf_counter_ns()
            scheduler.move(tokens, tier)
            samples_us.append((time.perf_counter_ns() - start) / 1e3)
            while scheduler.stats()["move_orders"] > 0:
                scheduler.advance(acks(scheduler.next_plan(1000 * repeat)))
            settle(scheduler, 1000 * repeat)
    for tier, samples_us in samples.items():
        yield summary(f"move_to_{tier}", samples_us, tokens=length)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def eviction_storm(num_pages: int = 1_000_000) -> Iterator[dict[str, object]]:
    """A pool of a million cached pages; each new request must evict as many as it needs."""
    page_size, per_request = 16, 256
    length = page_size * per_request
    gc.collect()
    before = resident_bytes()
    scheduler = cpp.Scheduler(
        cpp.SchedulerConfig(
            page_size=page_size,
            num_pages=num_pages,
            max_slots=1,
            max_context_len=length + 2,
            token_budget=length,
        )
    )
    for request_id in range(num_pages // per_request):
        scheduler.submit([spec(request_id, prompt(length, request_id), 1)])
        run_until_idle(scheduler, request_id)
        scheduler.drain_kv_events()
    cached = scheduler.stats()["cached_pages"]
    yield {
        "case": "memory",
        "cached_tokens": cached * page_size,
        "bytes_per_token": round((resident_bytes() - before) / (cached * page_size), 2),
    }
    plan_us = []
    for request_id in range(10_000_000, 10_000_300):
        tokens = prompt(length, request_id)
        scheduler.submit([spec(request_id, tokens, 1)])
        start = time.perf_counter_ns()
        plan = scheduler.next_plan(request_id)
        plan_us.append((time.perf_counter_ns() - start) / 1e3)
        scheduler.advance([results(plan)])
        scheduler.drain_kv_events()
    evicted = scheduler.stats()["evicted_pages"]
    yield summary(
        "eviction_storm", plan_us, cached_pages=cached, evicted_per_plan=evicted // len(plan_us)
    )


def cases() -> Iterator[tuple[str, Callable[[], Iterator[dict[str, object]]]]]:
    for rows in (1, 16, 64, 256):
        for context in (8_000, LONG):
            yield (
                f"decode_{rows}x{context}",
                lambda rows=rows, context=context: decode_step(rows, context),
            )
    for length in (LONG // 8, LONG // 4, LONG // 2, LONG, 2 * LONG):
        yield f"submit_{length // 1000}k", lambda length=length: submit_prompt(length)
    for context in (8_000, LONG):
        yield (
            f"tiers_decode_64x{context}",
            lambda context=context: decode_step(64, context, has_tiers=True),
        )
    yield "tiers_submit", lambda: submit_prompt(LONG, has_tiers=True)
    yield "tiers_move", lambda: move_prompt(LONG)
    yield "eviction", eviction_storm


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [(name, case) for name, case in cases() if name.startswith(wanted)]
    for name, case in chosen:
        if len(chosen) > 1:  # each case in a process of its own: memory is measured too
            subprocess.run([sys.executable, "-m", "benchmarks.scheduler", name], check=True)
            continue
        for line in case():
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
