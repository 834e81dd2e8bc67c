# SPDX-License-Identifier: Apache-2.0
"""Timing on a GPU: replays of one CUDA graph that holds a list of calls. Does not know: kernels."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_calls_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Return the median time of one call, us: all calls captured in one graph, replayed.

    The calls should work on different copies of their inputs, larger in all than the L2 cache.
    """
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    samples: list[float] = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000.0 / len(calls))
    return statistics.median(samples)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected|; NaN stays NaN."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def ceilings() -> dict[str, float]:
    """Measure what the device gives: HBM read (TB/s) and bf16 matmul (TFLOP/s)."""
    source = torch.randn(2 * 2**30, device="cuda", dtype=torch.float32)  # 8 GiB
    read_us = time_calls_us([source.sum] * 2, repeats=5)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy_us = time_calls_us([copy] * 2, repeats=5)
    bytes_read = source.numel() * 4
    del source, target, copy
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul_us = time_calls_us([lambda: a @ b] * 4, repeats=5)
    return {
        "read_tb_s": bytes_read / read_us / 1e6,
        "copy_tb_s": 2 * bytes_read / copy_us / 1e6,
        "bf16_tflop_s": 2 * 8192**3 / matmul_us / 1e6,
    }
