# SPDX-License-Identifier: Apache-2.0
"""One piece of shared memory: made here, or inherited as a descriptor from a process that keeps it.

The memory lives as long as any process holds the descriptor, so what a killed process left in it
is there for the next one. Does not know: what lies in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import weakref

from kvtiers.errors import TierConfigError

logger = logging.getLogger(__name__)

REGION_NAME = "moorage-l2"


def make_region_fd() -> int:
    """A descriptor of empty shared memory without a name in any file system; close it when done.

    It is closed on exec unless it is passed on by name (subprocess `pass_fds`).
    """
    return os.memfd_create(REGION_NAME, os.MFD_CLOEXEC)


class HostRegion:
    """`memory`: `num_bytes` writable bytes, zero where nobody has written yet.

    `was_empty`: nothing of another process is in it.

    Args:
        num_bytes: the size wanted; memory of another size is emptied first.
        fd: memory that another process keeps; it stays open. None: memory of this process alone.

    Raises:
        TierConfigError: the descriptor is no shared memory, or there is no room for it.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        self.is_shared = fd is not None
        own = make_region_fd() if fd is None else os.dup(fd)
        try:
            self.was_empty = os.fstat(own).st_size != num_bytes
            if self.was_empty:
                os.ftruncate(own, 0)  # what an older layout left must not show through
                os.ftruncate(own, num_bytes)
            self._map = mmap.mmap(own, num_bytes)
        except (OSError, ValueError) as error:
            raise TierConfigError(
                "l2 region", fd, f"{num_bytes} bytes of memory ({error})"
            ) from error
        finally:
            os.close(own)
        self.memory = memoryview(self._map)
        self._unpin: weakref.finalize[..., HostRegion] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def pin(self) -> bool:
        """Let a GPU copy from and to it at full speed; False where the driver refuses.

        Takes 76 ms a GiB (H200 host, 2026-11); all of the memory is then really there. It is
        unpinned at the latest when this object goes, before the memory is unmapped: the driver
        would refuse the next region that comes to lie at the same address.
        """
        import torch

        if self._unpin is None:
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = driver.cudaHostRegister(self.address, self.num_bytes, 0)
            if int(code) != 0:
                logger.warning("the L2 pool is not pinned: cudaHostRegister says %s", code)
                _forget_error()
                return False
            self._unpin = weakref.finalize(self, driver.cudaHostUnregister, self.address)
            self._unpin.atexit = False  # the driver may be gone before
        return True

    def unpin(self) -> None:
        """Before the memory is unmapped; no copy is under way."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def _forget_error() -> None:
    """A refused call leaves an error behind, which the next launch in this process would raise."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
