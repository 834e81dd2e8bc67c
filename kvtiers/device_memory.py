# SPDX-License-Identifier: Apache-2.0
"""L1 as the transfers see it: whole pages out to host memory and back in, one call a batch.

Does not know: slots, tickets, what a page means. A page of the pool is one contiguous blob, so a
batch is one copy a page: memcpy on the host, one asynchronous copy on a stream of its own on a
device; or there one kernel a batch. What is read is there when the call returns; what is written
may still be on its way, so that a link has its next batch before it is done with this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.ops.page_copy import move_pages
from kvtiers.batch_copy import BatchCopy, driver_batch_copy
from kvtiers.lanes import CudaLane, Lane, finished
from kvtiers.layer_copies import LayerCopies
from kvtiers.layered_load import LayeredLoad, Wait
from kvtiers.page_pieces import Body, Incoming

__all__ = ["Bodies", "Body", "DeviceMemory", "Incoming", "Wait", "device_memory"]

Bodies = Sequence[Body]


class DeviceMemory(Protocol):
    """Pages of L1. One thread."""

    kind: str  # cpu | cuda

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """Copy pages out; returns when all bytes are there."""
        ...

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        """Copy pages in, each as soon as it is drawn from `pages`, so that looking at one page
        costs the link nothing while the one before it is copied.

        Returns what waits until all bytes are there, for every stream to see; None: they are.
        Where it raises, and where `pages` does, nothing of the call is under way.
        """
        ...

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        """Copy pages in, the first layers of all of them before the next; `load` is told how far
        they are. Returns when all bytes are there. A page is its layers one after the other, all
        of a length.

        Where it raises, and where `pages` does, nothing of the call is under way.
        """
        ...


def device_memory(
    kv_pool: torch.Tensor, page_bytes: int, *, slots: NDArray[np.uint8] | None = None
) -> DeviceMemory:
    """What moves pages of this pool, [num_pages, ...] contiguous, on the device it lies on.

    Args:
        slots: the bodies of a pinned L2: on a GPU a kernel moves them, instead of copies.
    """
    pages = kv_pool.view(kv_pool.shape[0], -1).view(torch.uint8)
    assert pages.shape[1] == page_bytes
    if kv_pool.device.type == "cpu":
        return HostMemory(pages)
    lane = CudaLane(kv_pool.device)
    if slots is not None:
        return GatheredMemory(pages, slots, lane)
    return CopiedMemory(pages, lane, driver_batch_copy(kv_pool.device.index))


class HostMemory:
    """L1 in the memory of this process."""

    kind = "cpu"

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages.numpy()

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """One memcpy a page, without the interpreter's lock."""
        for page, body in zip(pages, into, strict=True):
            np.copyto(body, self._pages[page])

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        """One memcpy a page, without the interpreter's lock."""
        for page, body in pages:
            np.copyto(self._pages[page], body)
        return None

    def write_layers(self, pages: Iterable[tuple[int, Body]], load: LayeredLoad) -> None:
        """One memcpy a page and layer."""
        layer_bytes = self._pages.shape[1] // load.num_layers
        drawn: Iterable[tuple[int, Body]] = pages
        for layer in range(load.num_layers):
            piece = slice(layer * layer_bytes, (layer + 1) * layer_bytes)
            copied = []
            for page, body in drawn:
                np.copyto(self._pages[page, piece], body[piece])
                copied.append((page, body))
            drawn = copied
            load.arrived(layer + 1, None)


class CopiedMemory:
    """L1 on a GPU. Copies run beside the compute stream, at full speed where L2 is pinned.

    Pages are 1 to 4 MB, so one copy a page reaches the link's rate without a kernel.

    Args:
        batch: for loads by layers, whose copies are smaller; None: torch copies them.
    """

    kind = "cuda"

    def __init__(self, pages: torch.Tensor, lane: Lane, batch: BatchCopy | None = None) -> None:
        self._pages = pages
        self._lane = lane
        self.by_layers = LayerCopies(pages, lane, batch)

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """Asynchronous copies, then one wait."""
        with finished(self._lane):
            for page, body in zip(pages, into, strict=True):
                torch.from_numpy(body).copy_(self._pages[page], non_blocking=True)

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        """Asynchronous copies, each queued before the next page is drawn."""
        try:
            with self._lane.entered():
                for page, body in pages:
                    self._pages[page].copy_(torch.from_numpy(body), non_blocking=True)
        except BaseException:  # whoever hears of it gives these pages to somebody else
            self._lane.finish()
            raise
        return self._lane.mark()

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        """Asynchronous copies of some layers each, one call for those of many pages."""
        self.by_layers.write(pages, load)


class GatheredMemory:
    """L1 on a GPU, moved by one kernel a batch, which reads and writes L2 at its own address.

    For pages so small that a copy each is mostly overhead. Not the default: see docs/kv-tiers.md.

    Args:
        slots: uint8 [num_slots, page_bytes], the bodies of L2, pinned; all bodies lie in it.
    """

    kind = "cuda"

    def __init__(self, pages: torch.Tensor, slots: NDArray[np.uint8], lane: Lane) -> None:
        self._pages = pages
        self._slots = torch.from_numpy(slots)
        self._start, self._width = slots.ctypes.data, slots.strides[0]
        self._lane = lane

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """One launch, then one wait."""
        self._move(pages, into, is_out=True)

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        """One launch for all of them, then one wait."""
        drawn = list(pages)
        self._move([page for page, _ in drawn], [body for _, body in drawn], is_out=False)
        return None

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        """All layers at once."""
        self.write(pages)
        load.arrived(load.num_layers, None)

    def _move(self, pages: Sequence[int], bodies: Bodies, *, is_out: bool) -> None:
        if not pages:
            return
        rows = [(body.ctypes.data - self._start) // self._width for body in bodies]
        with finished(self._lane):
            where = torch.tensor([list(pages), rows], dtype=torch.int32).to(self._pages.device)
            move_pages(self._pages, where[0], self._slots, slots=where[1], is_out=is_out)
