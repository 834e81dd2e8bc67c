# SPDX-License-Identifier: Apache-2.0
"""Many copies in one call of the CUDA driver, which is made without the interpreter's lock.

`cuMemcpyBatchAsync` (CUDA driver API, "Memory Management"): since 12.8 with a place for the index
of what failed, since 13.0 without (`_v2`). Both are symbols of libcuda and are called through
ctypes: the CUDA runtime that torch brings need not know them.

Does not know: pages, layers, who orders what behind the copies.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Addresses = NDArray[np.uint64]

SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
INVALID_VALUE, NOT_SUPPORTED = 1, 801  # CUresult
PER_THREAD_STREAM = 2  # below it the driver's other handles of default streams
HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST: memory the driver knows, so pinned
MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
# Where it is 0, registered memory has another address on the device, and the call would fault.
CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class CopyRefusedError(RuntimeError):
    """The driver took none, or not all, of a batch. `is_unfit`: it does not do such batches."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} says CUresult {code}")
        self.is_unfit = code in (INVALID_VALUE, NOT_SUPPORTED)


class BatchCopy(Protocol):
    """Queues copies between pinned memory and a device."""

    name: str

    def is_pinned(self, address: int) -> bool:
        """Whether host memory there is pinned: no other can be copied in this way."""
        ...

    def __call__(self, targets: Addresses, sources: Addresses, num_bytes: int, stream: int) -> None:
        """Queue copies of `num_bytes` each, in no order among themselves.

        Args:
            targets, sources: uint64 [num_copies], addresses; none overlaps another's target. The
                bytes stay where they are until the stream has come past the copies.
            stream: a stream's handle, not the default stream's.

        Raises:
            CopyRefusedError: some of them may be under way all the same.
        """
        ...


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1; the locations say nothing of pinned or of device memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class DriverBatchCopy:
    """The driver's own call.

    Args:
        driver: libcuda, loaded.
        ordinal: the device as the driver counts, which is as torch counts.
        flags: CUmemcpyFlags; 1 asks for copies that go well beside computing. What others measured
            with it is slower for copies above 128 KiB.
    """

    def __init__(self, driver: Any, ordinal: int, flags: int = 0) -> None:
        self.name = "cuMemcpyBatchAsync_v2"
        if not hasattr(driver, self.name):
            self.name = "cuMemcpyBatchAsync"
        self._has_fail_index = not self.name.endswith("_v2")
        self._call = getattr(driver, self.name)  # AttributeError: a driver before 12.8
        fail_index = [ctypes.c_void_p] if self._has_fail_index else []
        self._call.restype = ctypes.c_int
        self._call.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
            *fail_index,
            ctypes.c_void_p,
        ]
        self._driver = driver
        self._ordinal = ordinal
        self._attributes = _Attributes(source_order=SOURCE_IN_STREAM_ORDER, flags=flags)
        self._thread = threading.local()

    def __call__(self, targets: Addresses, sources: Addresses, num_bytes: int, stream: int) -> None:
        """As `BatchCopy` says."""
        num = len(targets)
        assert len(sources) == num and stream > PER_THREAD_STREAM, "a stream of its own"
        if not num:
            return
        self._enter()
        into = np.ascontiguousarray(targets, np.uint64)
        out_of = np.ascontiguousarray(sources, np.uint64)
        sizes = np.full(num, num_bytes, np.uint64)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._call(
            into.ctypes.data,
            out_of.ctypes.data,
            sizes.ctypes.data,
            num,
            ctypes.addressof(self._attributes),
            ctypes.addressof(first),
            1,
            *([ctypes.addressof(failed)] if self._has_fail_index else []),
            stream,
        )
        if code:
            raise CopyRefusedError(self.name, code)

    def is_pinned(self, address: int) -> bool:
        """As `BatchCopy` says."""
        self._enter()
        kind = ctypes.c_uint()
        where = ctypes.c_uint64(address)
        code = self._driver.cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, where)
        return code == 0 and kind.value == HOST_MEMORY

    def _enter(self) -> None:
        """Make the context that torch uses this thread's, unless it is: torch sees to that only
        when it calls the runtime."""
        if getattr(self._thread, "is_entered", False):
            return
        context, device = ctypes.c_void_p(), ctypes.c_int()
        driver = self._driver
        self._check("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(context)))
        if not context.value:
            self._check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), self._ordinal))
            code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            self._check("cuDevicePrimaryCtxRetain", code)  # held as long as the process lives
            self._check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
        self._thread.is_entered = True

    @staticmethod
    def _check(name: str, code: int) -> None:
        if code:
            raise CopyRefusedError(name, code)


def driver_batch_copy(ordinal: int, flags: int = 0) -> DriverBatchCopy | None:
    """What this machine's driver offers for memory that the process has pinned itself; None where
    it does not, and the log says why. CUDA is initialized already."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        copy = DriverBatchCopy(driver, ordinal, flags)
        device, can_use = ctypes.c_int(), ctypes.c_int()
        copy._check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        code = driver.cuDeviceGetAttribute(ctypes.byref(can_use), CAN_USE_HOST_POINTER, device)
        copy._check("cuDeviceGetAttribute", code)
    except (OSError, AttributeError, CopyRefusedError) as error:
        logger.warning("pages are copied one by one: no batches (%s)", error)
        return None
    if not can_use.value:
        logger.warning("pages are copied one by one: pinned memory has another address on the GPU")
        return None
    return copy
