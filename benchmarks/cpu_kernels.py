# SPDX-License-Identifier: Apache-2.0
"""CPU kernels against their floors: one JSON line per step shape, with what it cannot do without.

Random weights in the shape of SmolLM2-135M (4-bit layers, 8-bit embedding), shuffled pages. The
floor is the larger of bytes / read bandwidth and FLOPs / tile rate of all threads: both options,
to be set to what the machine at hand was measured at. Run it alone on the machine:

    python -m benchmarks.cpu_kernels --threads 2 --gbps 16.9 --tflops 3.6
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import ops
from kernels.cases import random_blocks
from kernels.cpu import set_num_threads
from kernels.decoder_cases import random_stack
from kernels.packed_weight import PackedWeight, Weight
from kernels.selection import override

SHAPE = ops.LlamaShape(
    num_layers=30,
    hidden=576,
    ffn=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab=49152,
    rms_eps=1e-5,
)
PAGE_SIZE = 64
MAX_SLOTS = 16
PAGES_PER_SLOT = 34
KV_BYTES_PER_TOKEN = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows` sequences with `past` cached tokens each get `new` tokens."""

    name: str
    rows: int
    past: int
    new: int


STEPS = (
    StepShape("decode, short context", 1, 20, 1),
    StepShape("decode, 2,000 tokens", 1, 2000, 1),
    StepShape("decode, short context", 4, 20, 1),
    StepShape("decode, 2,000 tokens", 4, 2000, 1),
    StepShape("decode, short context", 16, 20, 1),
    StepShape("prefill, cold", 1, 0, 512),
    StepShape("prefill, cold", 1, 0, 2000),
    StepShape("prefill on a cached prefix", 1, 2000, 92),
)


def make_stack() -> ops.LlamaStack:
    """Return random weights in the formats of the default model's file."""
    stack = random_stack("q4_1", SHAPE)
    generator = torch.Generator().manual_seed(1)
    embedding = random_blocks(SHAPE.vocab, SHAPE.hidden, "q8_0", generator)
    return ops.LlamaStack(
        shape=SHAPE,
        embedding=embedding,
        layers=stack.layers,
        final_norm=stack.final_norm,
        lm_head=embedding,
        cos_sin=stack.cos_sin,
    )


def make_rows(step: StepShape, page_table: torch.Tensor) -> ops.PagedRows:
    """Return the index tensors of one step over the first slots of the table."""
    positions = torch.arange(step.past, step.past + step.new).repeat(step.rows)
    slots = torch.arange(step.rows).repeat_interleave(step.new)
    pages = page_table[slots, positions // PAGE_SIZE].long()
    return ops.PagedRows(
        positions=positions.int(),
        slot_mapping=(pages * PAGE_SIZE + positions % PAGE_SIZE).int(),
        row_indptr=(torch.arange(step.rows + 1) * step.new).int(),
        row_slots=torch.arange(step.rows).int(),
        seq_lens=torch.full((step.rows,), step.past + step.new).int(),
        page_table=page_table,
        page_size=PAGE_SIZE,
    )


def weight_bytes(weight: Weight) -> int:
    """Return the bytes of a weight as its kernel reads them."""
    if isinstance(weight, PackedWeight):
        return weight.blocks.numel()
    return weight.numel() * weight.element_size()


def needs_of(step: StepShape, stack: ops.LlamaStack) -> tuple[float, float]:
    """Return (bytes read once, FLOPs) that a step cannot do without."""
    layers = [
        weight
        for layer in stack.layers
        for weight in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)
    ]
    num_tokens = step.rows * step.new
    kv_read = step.rows * (step.past + step.new) * KV_BYTES_PER_TOKEN
    num_bytes = sum(map(weight_bytes, layers)) + weight_bytes(stack.lm_head) + kv_read
    weights = sum(weight.shape[0] * weight.shape[1] for weight in layers)
    keys = step.rows * sum(range(step.past + 1, step.past + step.new + 1))
    attention = 4 * SHAPE.num_heads * SHAPE.head_dim * keys * SHAPE.num_layers
    head = 2 * SHAPE.vocab * SHAPE.hidden * step.rows
    return num_bytes, 2 * weights * num_tokens + attention + head


def times_of(call: Callable[[], object], budget_s: float) -> list[float]:
    """Return the sorted seconds of as many calls as fit the budget (at least three)."""
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < budget_s:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return sorted(times)


def main() -> None:
    """Measure every step shape on one kernel and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gbps", type=float, default=16.9, help="read bandwidth, GB/s")
    parser.add_argument("--tflops", type=float, default=3.6, help="bf16 tile rate, TFLOP/s")
    parser.add_argument("--kernel", default="cpu_amx", help="registered llama_forward kernel")
    parser.add_argument("--seconds", type=float, default=2.0, help="budget per step shape")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_num_threads(args.threads)
    stack = make_stack()
    num_pages = MAX_SLOTS * PAGES_PER_SLOT
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2)).int()
    page_table = order.view(MAX_SLOTS, PAGES_PER_SLOT).contiguous()
    pool_shape = (num_pages, SHAPE.num_layers, 2, PAGE_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
    pool = torch.zeros(pool_shape, dtype=torch.bfloat16)
    for page in range(num_pages):
        pool[page] = torch.randn(pool_shape[1:])
    with override("llama_forward", args.kernel):
        for step in STEPS:
            rows = make_rows(step, page_table)
            ids = torch.randint(0, SHAPE.vocab, rows.positions.shape).int()
            sample = torch.arange(step.rows).int()

            def call(
                ids: torch.Tensor = ids,
                rows: ops.PagedRows = rows,
                sample: torch.Tensor = sample,
            ) -> torch.Tensor:
                return ops.llama_forward(stack, ids, rows, pool, sample)

            times = times_of(call, args.seconds)
            num_bytes, flops = needs_of(step, stack)
            floor = max(num_bytes / args.gbps / 1e9, flops / args.tflops / 1e12)
            median = times[len(times) // 2]
            record = {
                "kernel": args.kernel,
                "step": step.name,
                "rows": step.rows,
                "past": step.past,
                "new": step.new,
                "threads": args.threads,
                "median_ms": round(median * 1e3, 2),
                "best_ms": round(times[0] * 1e3, 2),
                "floor_ms": round(floor * 1e3, 2),
                "bound": "bytes" if num_bytes / args.gbps > flops / args.tflops / 1e3 else "flops",
                "tokens_per_s": round(step.rows * step.new / median, 1),
                "calls": len(times),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
