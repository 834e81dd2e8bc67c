# SPDX-License-Identifier: Apache-2.0
"""L1 as the transfers see it: whole pages out to host memory and back in, one call a batch.

Does not know: slots, tickets, what a page means. A page of the pool is one contiguous blob, so a
batch is one copy a page: memcpy on the host, one asynchronous copy on a stream of its own on a
device. Both calls return when the bytes are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Bodies = Sequence[NDArray[np.uint8]]  # each [page_bytes], contiguous


class DeviceMemory(Protocol):
    """Pages of L1. One thread."""

    kind: str  # cpu | cuda

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """Copy pages out; returns when all bytes are there."""
        ...

    def write(self, pages: Sequence[int], bodies: Bodies) -> None:
        """Copy pages in; returns when all bytes are there, for every stream to see."""
        ...


def device_memory(kv_pool: torch.Tensor, page_bytes: int) -> DeviceMemory:
    """What moves pages of this pool, [num_pages, ...] contiguous, on the device it lies on."""
    pages = kv_pool.view(kv_pool.shape[0], -1).view(torch.uint8)
    assert pages.shape[1] == page_bytes
    return HostMemory(pages) if kv_pool.device.type == "cpu" else CudaMemory(pages)


class HostMemory:
    """L1 in the memory of this process."""

    kind = "cpu"

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages.numpy()

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """One memcpy a page, without the interpreter's lock."""
        for page, body in zip(pages, into, strict=True):
            np.copyto(body, self._pages[page])

    def write(self, pages: Sequence[int], bodies: Bodies) -> None:
        """One memcpy a page, without the interpreter's lock."""
        for page, body in zip(pages, bodies, strict=True):
            np.copyto(self._pages[page], body)


class CudaMemory:
    """L1 on a GPU. Copies run beside the compute stream, at full speed where L2 is pinned.

    Pages are 1 to 4 MB, so one copy a page reaches the link's rate without a kernel.
    """

    kind = "cuda"

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages
        self._stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        """Asynchronous copies, then one wait."""
        with torch.cuda.stream(self._stream):
            for page, body in zip(pages, into, strict=True):
                torch.from_numpy(body).copy_(self._pages[page], non_blocking=True)
            self._done.record(self._stream)
        self._done.synchronize()

    def write(self, pages: Sequence[int], bodies: Bodies) -> None:
        """Asynchronous copies, then one wait."""
        with torch.cuda.stream(self._stream):
            for page, body in zip(pages, bodies, strict=True):
                self._pages[page].copy_(torch.from_numpy(body), non_blocking=True)
            self._done.record(self._stream)
        self._done.synchronize()
