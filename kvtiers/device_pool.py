# SPDX-License-Identifier: Apache-2.0
"""L1: the tensor all KV pages of the device lie in, and how many fit.

Does not know: which page is whose (the control plane does), requests.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from kvtiers.config import DevicePoolConfig
from kvtiers.errors import PoolTooSmallError
from kvtiers.layout import KvLayout

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.uint8}


class DevicePool:
    """`kv`: a tensor of `layout.pool_shape(num_pages)`, zeroed, contiguous."""

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        num_bytes = num_pages * layout.page_bytes
        raw = _host_bytes(num_bytes) if device.type == "cpu" else _device_bytes(num_bytes, device)
        self.kv = raw.view(_TORCH_DTYPES[layout.dtype]).view(layout.pool_shape(num_pages))

    def page_bytes(self, page: int) -> torch.Tensor:
        """The bytes of one page, uint8 [page_bytes]; view."""
        return self.kv[page].view(-1).view(torch.uint8)


def _host_bytes(num_bytes: int) -> torch.Tensor:
    """Zeroed memory that is mapped, not written: a page costs memory when it is first used.

    torch.zeros would write all of it (seconds for gigabytes).
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer faults when a prompt is first written, fewer TLB misses when it is read.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _device_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def count_pages(
    config: DevicePoolConfig,
    layout: KvLayout,
    *,
    free_bytes: int,
    max_context_len: int,
    kept_bytes: int = 0,
) -> int:
    """How many pages the pool gets.

    Args:
        free_bytes: memory free on the device now; used where the configuration gives no size.
        max_context_len: the pool must hold one request of this many tokens.
        kept_bytes: of the free memory, what large steps need beside the share that stays free.

    Raises:
        PoolTooSmallError: it does not.
    """
    if config.pool_tokens:
        num_pages = config.pool_tokens // layout.page_size
        origin = f"pool_tokens = {config.pool_tokens}"
    else:
        pool_bytes = int(max(0, free_bytes - kept_bytes) * config.free_share)
        num_pages = min(pool_bytes, config.max_auto_bytes) // layout.page_bytes
        origin = f"{free_bytes >> 20} MiB of free memory"
        if kept_bytes:
            origin += f" less {kept_bytes >> 20} MiB for large steps"
    expect_one_request(num_pages, layout.page_size, max_context_len, origin)
    return num_pages


def expect_one_request(num_pages: int, page_size: int, max_context_len: int, origin: str) -> None:
    """Refuse a pool that does not hold one request of the longest context.

    Args:
        origin: what the number of pages follows from.

    Raises:
        PoolTooSmallError: it does not.
    """
    needed = -(-max_context_len // page_size)
    if num_pages < needed:
        raise PoolTooSmallError(
            f"{origin} gives {num_pages} KV pages of {page_size} tokens; one request of "
            f"{max_context_len} tokens needs {needed} (hint: lower max_context_len)"
        )
