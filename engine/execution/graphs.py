# SPDX-License-Identifier: Apache-2.0
"""Captured CUDA graphs by key, in one memory pool; without a stream, plain calls.

Does not know: what is captured. A captured function takes its inputs from buffers that stay where
they are and writes its results to such buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

# Kernels are compiled and tuned, and scratch is allocated, in runs before the capture.
RUNS_BEFORE_CAPTURE = 2


class GraphSet:
    """`stream` None: nothing is captured."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def add(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run the function, and capture it. Called on the stream."""
        for _ in range(RUNS_BEFORE_CAPTURE):
            function()
        if self._stream is None:
            return
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Replay the graph, or call the function where there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            function()
        else:
            graph.replay()
