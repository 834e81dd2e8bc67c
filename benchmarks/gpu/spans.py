# SPDX-License-Identifier: Apache-2.0
"""When kernels ran, by a profiler. A kernel that was launched early (programmatic dependent launch)
is there while the one in front still runs. Does not know: what was profiled.
"""

from __future__ import annotations

import torch

Span = tuple[float, float, str]  # start and end in us, name


def kernel_spans(profiler: torch.profiler.profile) -> list[Span]:
    """What ran on the device, by start."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or []
        if event.time_range.end > event.time_range.start
    )


def added_us(spans: list[Span]) -> list[float]:
    """How much of each span, in order of start, lies behind the end of all spans before it: what
    was busy, each moment counted once."""
    added, reached = [], float("-inf")
    for start, end, _ in spans:
        added.append(max(0.0, end - max(start, reached)))
        reached = max(reached, end)
    return added


def idle_share(spans: list[Span]) -> float:
    """The share of the spans' time in which nothing ran."""
    whole_us = max(end for _, end, _ in spans) - spans[0][0]
    return round(1 - sum(added_us(spans)) / whole_us, 4)
