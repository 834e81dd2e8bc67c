# SPDX-License-Identifier: Apache-2.0
"""The library's client, made safe to call: a shared ring of memory, deadlines, no call on a dead
handle.

Does not know: what is stored. This process holds only a proxy ("dummy client"): the objects live
in a process of their own, so its death costs pages and not this process. Measured facts about
0.3.13 that shape this file:

* A method called before set-up or after close ends the process (SIGSEGV): every call goes through
  `_call`, which has no handle to call then.
* A call to an owner that hangs blocks for 30 s, whatever is configured: calls run on threads with
  a deadline of their own, and at most two may be stuck.
* A set-up holds the interpreter lock, 30 s where the owner hangs: another process tries it first.
* Only memory the library allocated and registered can be read or written.

Another build may lack a method, or raise: that is a call that was not done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvtiers.deadlines import CallNotDoneError, CallRefusedError, DeadlineThreads
from kvtiers.mooncake_library import check_answers, load_library
from kvtiers.objects import HEADER_BYTES, stamp

SETUP_S = 15.0
CLOSE_S = 3.0
NO_SPACE = -200
EVICTION_S = 0.03  # the library evicts in the background, in some 10 ms
LOCAL_BUFFER_BYTES = 1 << 20
PART_READ = "get_into_ranges"  # not in every build of the library


class MooncakeClient:
    """A connection to the owner at `address`, with a ring of `num_slots` slots for objects.

    Every method raises CallNotDoneError where the library does not answer in time.

    Raises OSError where the connection cannot be made: the reason is in the message.
    """

    def __init__(self, address: str, slot_bytes: int, num_slots: int) -> None:
        self._threads = DeadlineThreads("mooncake")
        self._calling = threading.Condition()
        self._num_calls = 0
        library = load_library()
        self._reads_parts = hasattr(library, PART_READ)
        check_answers(address)
        handle = library()
        try:
            set_up = partial(_set_up, handle, address, slot_bytes * num_slots)
            base = self._threads.run(set_up, SETUP_S)
        except (CallNotDoneError, TypeError, RuntimeError) as error:
            raise OSError(f"{address}: set-up: {error}") from None
        self._ring = SlotRing(base, slot_bytes, num_slots)
        self._handle: Any = handle

    @property
    def num_stuck(self) -> int:
        """Calls that overran and have not returned."""
        return self._threads.num_stuck

    def put(
        self,
        keys: list[str],
        blobs: Sequence[memoryview],
        follows: Sequence[bytes],
        timeout_s: float,
    ) -> list[int]:
        """Store objects, stamped with the hash of the key each follows: a code for each of the
        first keys, as many as slots were free; 0: kept."""
        slots = self._ring.take(len(keys), timeout_s)
        keys = keys[: len(slots)]
        sizes = [self._ring.fill(slot, blob) for slot, blob in zip(slots, blobs, strict=False)]
        now_ms = time.time_ns() // 1_000_000
        for slot, size, parent in zip(slots, sizes, follows, strict=False):
            stamp(self._ring.view(slot, size), parent, now_ms)
        codes = self._move("batch_put_from", keys, slots, sizes, timeout_s)
        full = [at for at, code in enumerate(codes) if code == NO_SPACE]
        if full:
            time.sleep(EVICTION_S)
            again = self._move(
                "batch_put_from",
                [keys[at] for at in full],
                [slots[at] for at in full],
                [sizes[at] for at in full],
                timeout_s,
                give=slots,
            )
            for at, code in zip(full, again, strict=False):
                codes[at] = code
        self._ring.give(slots)
        return codes

    def get(self, keys: list[str], into: Sequence[memoryview], timeout_s: float) -> list[int]:
        """Read objects, stamped: the length of each of the first keys, as many as slots were free,
        or a code below 0. Where the length is the buffer's, the bytes are in the buffer."""
        slots = self._ring.take(len(keys), timeout_s)
        keys = keys[: len(slots)]
        sizes = [len(buffer) for buffer, _ in zip(into, slots, strict=False)]
        lengths = self._move("batch_get_into", keys, slots, sizes, timeout_s)
        for slot, buffer, length in zip(slots, into, lengths, strict=False):
            if length == len(buffer):
                self._ring.copy_out(slot, buffer)
        self._ring.give(slots)
        return lengths

    def heads(
        self, keys: list[str], into: memoryview, timeout_s: float, *, whole: bool
    ) -> list[int]:
        """Read the first 256 bytes of the first of these, one after the other; lengths, or codes
        below 0: NO_SPACE for one that is read as a whole or not at all.

        Args:
            whole: read one object as a whole: one that only the disk has, or with a library that
                reads no parts.
        """
        if not (whole or self._reads_parts):
            return [NO_SPACE] * len(keys)
        (slot,) = self._ring.take(1, timeout_s)
        num = 1 if whole else max(1, self._ring.slot_bytes // HEADER_BYTES)
        keys = keys[:num]
        if whole:
            lengths = self._move("batch_get_into", keys, [slot], [self._ring.slot_bytes], timeout_s)
            lengths = [min(length, HEADER_BYTES) for length in lengths]
        else:
            places = [[at * HEADER_BYTES] for at in range(len(keys))]
            ranges = ([[0]] * len(keys), [[HEADER_BYTES]] * len(keys))
            arguments = ([self._ring.address(slot)], [keys], [places], *([part] for part in ranges))
            give_back = partial(self._ring.give, [slot])
            try:
                answer = self._call(PART_READ, timeout_s, give_back, *arguments)
            except CallRefusedError:
                give_back()
                raise
            lengths = [codes[0] for codes in answer[0]] if answer else []
        num_bytes = HEADER_BYTES * len(lengths)
        into[:num_bytes] = self._ring.view(slot, num_bytes)
        self._ring.give([slot])
        return lengths

    def exist(self, keys: list[str], timeout_s: float) -> list[int]:
        """1: present, 0: not, below 0: unknown."""
        codes: list[int] = self._call("batch_is_exist", timeout_s, None, keys)
        return codes

    def remove(self, keys: list[str], timeout_s: float) -> list[int]:
        """0: removed, whatever lease it had; below 0: not."""
        codes: list[int] = self._call("batch_remove", timeout_s, None, keys, True)
        return codes

    def close(self) -> None:
        """Let go of the connection; calls in flight are waited for, a stuck one is left alone."""
        with self._calling:
            handle, self._handle = self._handle, None
            is_idle = self._calling.wait_for(lambda: not self._num_calls, CLOSE_S)
        if handle is not None:
            _closed_handles.append(handle)
            if is_idle:
                with contextlib.suppress(CallNotDoneError):
                    self._threads.run(handle.close, CLOSE_S)
        self._threads.close()

    def _move(
        self,
        method: str,
        keys: list[str],
        slots: list[int],
        sizes: list[int],
        timeout_s: float,
        give: list[int] | None = None,
    ) -> list[int]:
        """Call with slots; where that raises, `give` (or the slots) go back: late, if it hangs."""
        pointers = [self._ring.address(slot) for slot in slots]
        give_back = partial(self._ring.give, give or slots)
        try:
            codes: list[int] = self._call(method, timeout_s, give_back, keys, pointers, sizes)
            return codes
        except CallRefusedError:
            give_back()
            raise

    def _call(
        self,
        method: str,
        timeout_s: float,
        when_late: Callable[[], None] | None,
        *arguments: object,
    ) -> Any:
        return self._threads.run(
            partial(self._call_handle, method, arguments), timeout_s, when_late
        )

    def _call_handle(self, method: str, arguments: tuple[object, ...]) -> Any:
        with self._calling:
            handle = self._handle
            if handle is None:
                return []
            self._num_calls += 1
        try:
            return getattr(handle, method)(*arguments)
        except Exception as error:  # another build of the library, or a fault of it
            raise CallRefusedError(f"{method}: {error!r}") from error
        finally:
            with self._calling:
                self._num_calls -= 1
                self._calling.notify_all()


class SlotRing:
    """Shared memory cut into slots; it lives as long as the library's connection."""

    def __init__(self, base: int, slot_bytes: int, num_slots: int) -> None:
        self._base = base
        self.slot_bytes = slot_bytes
        memory = (ctypes.c_ubyte * (slot_bytes * num_slots)).from_address(base)
        self._rows = np.frombuffer(memoryview(memory).cast("B"), np.uint8).reshape(
            num_slots, slot_bytes
        )
        self._rows.fill(0)  # first touched here, and not by the first calls
        self._free = list(range(num_slots))
        self._returned = threading.Condition()

    def address(self, slot: int) -> int:
        return self._base + slot * self.slot_bytes

    def take(self, count: int, timeout_s: float) -> list[int]:
        """Up to `count` slots, at least one. Raises CallRefusedError where none comes free."""
        with self._returned:
            if not self._returned.wait_for(lambda: bool(self._free), timeout_s):
                raise CallRefusedError("all shared memory is held by calls that hang")
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give(self, slots: Sequence[int]) -> None:
        with self._returned:
            self._free += slots
            self._returned.notify_all()

    def fill(self, slot: int, blob: memoryview) -> int:
        """Copy an object in (without the interpreter lock, unlike memoryviews); its length."""
        np.copyto(self._rows[slot, : len(blob)], np.frombuffer(blob, np.uint8))
        return len(blob)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """The first bytes of a slot."""
        return self._rows[slot, :num_bytes].data

    def copy_out(self, slot: int, buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, np.uint8), self._rows[slot, : len(buffer)])


# Kept until the process ends: a destructor must not run under a call that may still come back.
_closed_handles: list[object] = []


def _set_up(handle: Any, address: str, ring_bytes: int) -> int:
    """Returns where the ring lies. Raises OSError with the step that failed."""
    code = handle.setup_dummy(ring_bytes, LOCAL_BUFFER_BYTES, address)
    if code != 0:
        raise OSError(f"{address}: set-up answered {code}")
    base = int(handle.alloc_from_mem_pool(ring_bytes))
    if base == 0 or handle.register_buffer(base, ring_bytes) != 0:
        raise OSError(f"{address}: no shared memory of {ring_bytes} bytes")
    return base
