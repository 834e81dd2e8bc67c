# SPDX-License-Identifier: Apache-2.0
"""The store protocol in a dictionary: the reference the contract suite is checked against."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtiers.objects import is_sealed_for, verify
from kvtiers.store import StoreState, StoreStatus, check_batch, new_counters, resolve_parents


class MemoryStore:
    """Keeps up to `capacity_bytes`, then refuses. `before_call` runs first in every call."""

    kind = "memory"

    def __init__(self, layout_fingerprint: str, capacity_bytes: int = 1 << 40) -> None:
        self._layout = layout_fingerprint
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.counters = new_counters()
        self.state = StoreState.UP
        self.reason = ""
        self.before_call: Callable[[], None] = lambda: None

    def probe(self, keys: Sequence[str]) -> int:
        self.before_call()
        missing = (at for at, key in enumerate(keys) if key not in self.objects)
        return 0 if self._is_down() else next(missing, len(keys))

    def surely_lacks(self, key: str) -> bool:
        return False

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        check_batch(keys, blobs, writable=False)
        resolve_parents(keys, parents)
        self.before_call()
        with self._lock:
            return [self._keep(key, blob) for key, blob in zip(keys, blobs, strict=True)]

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        check_batch(keys, into, writable=True)
        self.before_call()
        return [self._read(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def remove(self, keys: Sequence[str]) -> int:
        self.before_call()
        with self._lock:
            held = [] if self._is_down() else [key for key in set(keys) if key in self.objects]
            for key in held:
                del self.objects[key]
            return len(held)

    def flush(self, timeout_s: float) -> bool:
        self.before_call()
        return not self._is_down()

    def status(self) -> StoreStatus:
        return StoreStatus(
            kind=self.kind,
            state=self.state,
            reason=self.reason,
            used_bytes=sum(map(len, self.objects.values())),
            capacity_bytes=self._capacity_bytes,
            num_objects=len(self.objects),
            counters=dict(self.counters),
        )

    def close(self) -> None:
        self.state, self.reason = StoreState.DOWN, "closed"

    def _keep(self, key: str, blob: memoryview) -> bool:
        used = sum(map(len, self.objects.values()))
        fits = key in self.objects or used + len(blob) <= self._capacity_bytes
        is_kept = not self._is_down() and fits and is_sealed_for(blob, key, self._layout)
        if is_kept:
            self.objects.setdefault(key, bytes(blob))
        self.counters["puts" if is_kept else "refused_puts"] += 1
        return is_kept

    def _read(self, key: str, buffer: memoryview) -> bool:
        held = self.objects.get(key)
        if held is None or self._is_down() or len(held) != len(buffer):
            self.counters["misses"] += 1
            return False
        buffer[:] = held
        is_right = verify(buffer, key, self._layout)
        if not is_right:
            self.objects.pop(key, None)
        self.counters["hits" if is_right else "bad_reads"] += 1
        return is_right

    def _is_down(self) -> bool:
        return self.state is StoreState.DOWN
