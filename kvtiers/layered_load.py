# SPDX-License-Identifier: Apache-2.0
"""Pages on their way to L1 that somebody reads as they come: the first layer of all of them, then
the next, and so on.

Does not know: which pages, who reads, whether they are any good (their acks say that).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Fence = Callable[[], None]  # the current stream goes on only behind what it stands for
Wait = Callable[[], None]  # returns when that is done

GROWTH = 1.4  # H200, 800 tokens on 64K: 2.0 ms of computing a layer, 1.4 ms of link


class LayeredLoad:
    """Tells the reader how far the pages have come. Two threads: one brings, one reads."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._changed = threading.Condition()
        self._parts: list[tuple[int, Fence | None]] = []  # (layers so far, what orders them)
        self._is_over = False

    def arrived(self, num_layers: int, fence: Fence | None) -> None:
        """The first so many layers are there; with a fence: they are for what a device is given
        behind it on the reader's stream."""
        with self._changed:
            self._parts.append((num_layers, fence))
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing comes any more, whole or not: nobody is to wait for it."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Until that layer is there, or will never be. Call it where the reader's stream is the
        current one."""
        with self._changed:
            while True:
                fence = next((fence for num, fence in self._parts if num > layer), None)
                is_there = bool(self._parts) and self._parts[-1][0] > layer
                if is_there or self._is_over:
                    break
                self._changed.wait()
        if fence is not None:
            fence()

    def wait_all(self) -> None:
        """Until every layer is there, or will never be."""
        self.wait(self.num_layers - 1)


def layer_groups(
    num_layers: int, layer_bytes: int, first_bytes: int, most_bytes: int
) -> list[slice]:
    """Runs of layers that are brought as one: of a page about `first_bytes`, then each `GROWTH`
    times the one before it, up to about `most_bytes`; of one layer at least.

    A reader that takes `GROWTH` times as long for a layer as the link does need not wait for the
    next run, but for what rounding to whole layers adds.
    """
    groups: list[slice] = []
    at, num_bytes = 0, float(min(first_bytes, most_bytes))
    while at < num_layers:
        end = min(at + max(1, round(num_bytes / layer_bytes)), num_layers)
        groups.append(slice(at, end))
        at, num_bytes = end, min(num_bytes * GROWTH, most_bytes)
    return groups


def wait_for_layer(loads: Sequence[LayeredLoad], layer: int) -> None:
    """Until that layer of all of them is there."""
    for load in loads:
        load.wait(layer)
