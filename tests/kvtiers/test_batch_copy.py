# SPDX-License-Identifier: Apache-2.0
"""The driver's batches: what it is handed, byte for byte of its C interface, and what is made of
its answers. The driver is one of ctypes' callbacks here, called through the C convention."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtiers.batch_copy import CopyRefusedError, DriverBatchCopy, driver_batch_copy

# cuda.h of CUDA 13.0; 12.8 had `size_t *failIdx` before the stream. CUdeviceptr, size_t: 8 bytes.
NEW, OLD = "cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"
P, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
NEW_CALL = ctypes.CFUNCTYPE(INT, P, P, P, SIZE, P, P, SIZE, P)
OLD_CALL = ctypes.CFUNCTYPE(INT, P, P, P, SIZE, P, P, SIZE, P, P)
STREAM, PRIMARY, ORDINAL = 0x7F0012345678, 0x55500010, 3


def words(address: int, num: int) -> list[int]:
    return list((ctypes.c_uint64 * num).from_address(address))


class FakeDriver:
    """As much of libcuda as is called."""

    def __init__(self, name: str, code: int = 0, context: int = 0) -> None:
        self.code = code
        self.log: list[str] = []
        self.copies: list[tuple[int, int, int]] = []
        self.contexts: dict[int, int] = {}  # by thread
        self.first_context = context

        def take(
            dsts: int, srcs: int, sizes: int, count: int, attrs: int, idxs: int, num: int
        ) -> int:
            """What both forms have in common."""
            assert self.contexts.get(threading.get_ident(), context), "no context is current"
            # {srcAccessOrder, {type, id}, {type, id}, flags}, each an int
            assert list((ctypes.c_uint32 * 6).from_address(attrs)) == [1, 0, 0, 0, 0, 0]
            assert (num, words(idxs, 1)) == (1, [0])
            copies = zip(*(words(at, count) for at in (dsts, srcs, sizes)), strict=True)
            self.copies += list(copies)
            return self.code

        def new(*args: int) -> int:
            *rest, stream = args
            assert stream == STREAM
            return take(*rest)

        def old(*args: int) -> int:
            *rest, failed, stream = args
            assert stream == STREAM
            ctypes.c_size_t.from_address(failed).value = 1  # it may write there
            return take(*rest)

        if name:
            setattr(self, name, NEW_CALL(new) if name == NEW else OLD_CALL(old))

    def _say(self, name: str) -> int:
        self.log.append(name)
        return 0

    def cuCtxGetCurrent(self, into: Any) -> int:
        now = self.contexts.get(threading.get_ident(), self.first_context)
        into._obj.value = now or None
        return self._say("get")

    def cuDeviceGet(self, into: Any, ordinal: int) -> int:
        into._obj.value = ordinal + 40
        return self._say(f"device {ordinal}")

    def cuDevicePrimaryCtxRetain(self, into: Any, device: Any) -> int:
        assert device.value == ORDINAL + 40
        into._obj.value = PRIMARY
        return self._say("retain")

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts[threading.get_ident()] = context.value
        return self._say(f"set {context.value:#x}")


def addresses(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize("name", [NEW, OLD])
def test_a_batch_is_handed_over_as_the_c_interface_says(name: str) -> None:
    driver = FakeDriver(name)
    copy = DriverBatchCopy(driver, ORDINAL)
    assert copy.name == name
    # Every other one of six: what is handed over lies without gaps.
    high = (1 << 63) + 5
    copy(addresses(high, 0, 20, 0, 30, 0)[::2], addresses(1, 2, 3), 73_728, STREAM)
    assert driver.copies == [(high, 1, 73_728), (20, 2, 73_728), (30, 3, 73_728)]
    copy(addresses(), addresses(), 8, STREAM)
    assert len(driver.copies) == 3, "a batch of nothing is no call"


def test_each_thread_enters_the_context_of_the_device_once() -> None:
    driver = FakeDriver(NEW)
    copy = DriverBatchCopy(driver, ORDINAL)

    def twice() -> None:
        for _ in range(2):
            copy(addresses(1), addresses(2), 8, STREAM)

    twice()
    enters = ["get", f"device {ORDINAL}", "retain", f"set {PRIMARY:#x}"]
    assert driver.log == enters
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join(60)
    assert driver.log == enters * 2 and len(driver.copies) == 4


def test_a_context_that_is_there_is_left() -> None:
    driver = FakeDriver(NEW, context=99)
    DriverBatchCopy(driver, ORDINAL)(addresses(1), addresses(2), 8, STREAM)
    assert driver.log == ["get"]


@pytest.mark.parametrize(("code", "is_unfit"), [(1, True), (801, True), (2, False), (700, False)])
def test_a_refusal_says_whether_the_driver_has_such_batches(code: int, is_unfit: bool) -> None:
    copy = DriverBatchCopy(FakeDriver(NEW, code), ORDINAL)
    with pytest.raises(CopyRefusedError, match=f"{NEW} says CUresult {code}") as caught:
        copy(addresses(1), addresses(2), 8, STREAM)
    assert caught.value.is_unfit is is_unfit


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_default_stream_is_not_handed_over(stream: int) -> None:
    driver = FakeDriver(NEW)
    with pytest.raises(AssertionError, match="stream"):
        DriverBatchCopy(driver, ORDINAL)(addresses(1), addresses(2), 8, stream)
    assert not driver.copies


class Loaded(FakeDriver):
    """Says what memory it knows, and whether the device sees it where the process does."""

    sees = 1
    memory: Callable[[int], tuple[int, int]] = staticmethod(lambda address: (0, 1))

    def cuDeviceGetAttribute(self, into: Any, what: int, device: Any) -> int:
        assert (what, device.value) == (91, ORDINAL + 40)
        into._obj.value = self.sees
        return 0

    def cuPointerGetAttribute(self, into: Any, what: int, where: Any) -> int:
        assert what == 2
        code, into._obj.value = self.memory(where.value)
        return code


def load(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> DriverBatchCopy | None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    return driver_batch_copy(ORDINAL)


def test_memory_that_the_driver_does_not_know_is_not_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Loaded(NEW)
    copy = load(monkeypatch, driver)
    assert copy is not None and copy.is_pinned(1 << 47)
    for answer in ((1, 0), (0, 2), (0, 0)):  # none of its own; of the device; nothing said
        driver.memory = lambda address, answer=answer: answer  # type: ignore[misc]
        assert not copy.is_pinned(1 << 47)


def test_there_are_no_batches_where_the_driver_has_none_or_sees_memory_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(monkeypatch, Loaded("")) is None
    assert "one by one" in caplog.text and NEW[:-3] in caplog.text
    caplog.clear()
    elsewhere = Loaded(NEW)
    elsewhere.sees = 0
    assert load(monkeypatch, elsewhere) is None
    assert "another address" in caplog.text
    caplog.clear()

    def missing(name: str) -> Any:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert driver_batch_copy(ORDINAL) is None
    assert "libcuda.so.1" in caplog.text
