# SPDX-License-Identifier: Apache-2.0
"""A store whose calls may hang (a dying disk, a network file system), made to answer in time.

Does not know: which store it is. Pages go through memory of its own, both ways: a call that returns
late must neither write into a page that has another owner by then, nor store what that one wrote
there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtiers.deadlines import CallNotDoneError, DeadlineThreads
from kvtiers.store import Store, StoreState, StoreStatus, check_batch, resolve_parents

# Pages of one call: a buffer that stays in the processor's cache between its two copies. 32 MiB a
# call read files at 3.8 GB/s instead of 6.0, 2 MiB too, for its many changes of thread.
CHUNK_BYTES = 8 << 20
IDLE_BUFFERS = 2

T = TypeVar("T")
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a call may take: `call_s`, and for what it moves the time at `bytes_per_s`."""

    open_s: float = 5.0
    probe_s: float = 0.5
    call_s: float = 1.5
    bytes_per_s: float = 50e6
    close_s: float = 3.0

    def of(self, num_bytes: int) -> float:
        return self.call_s + num_bytes / self.bytes_per_s


class DeadlineStore:
    """The same store; a call that overruns is a miss, a failure counted, and is left behind."""

    def __init__(self, store: Store, deadlines: Deadlines) -> None:
        self._store = store
        self._deadlines = deadlines
        self._threads = DeadlineThreads(f"{store.kind}-store")
        self._lock = threading.Lock()
        self._idle: list[Bytes] = []
        self._num_overrun = 0
        self._reason = ""

    @property
    def kind(self) -> str:
        return self._store.kind

    def open(self) -> None:
        """Make the first call, which opens a store that opens late."""
        self._run(lambda: self._store.probe([]), self._deadlines.open_s, 0)

    def probe(self, keys: Sequence[str]) -> int:
        return self._run(lambda: self._store.probe(keys), self._deadlines.probe_s, 0)

    def surely_lacks(self, key: str) -> bool:
        return self._store.surely_lacks(key)

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        check_batch(keys, blobs, writable=False)
        follows = resolve_parents(keys, parents)
        kept: list[bool] = []
        for start, end in _chunks([blob.nbytes for blob in blobs]):
            answers = self._put_chunk(keys[start:end], blobs[start:end], follows[start:end])
            if not answers:  # what is behind it would wait for the same deadline
                break
            kept += answers
        return kept + [False] * (len(keys) - len(kept))

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        check_batch(keys, into, writable=True)
        hits: list[bool] = []
        for start, end in _chunks([buffer.nbytes for buffer in into]):
            answers = self._get_chunk(keys[start:end], into[start:end])
            if not answers:
                break
            hits += answers
        return hits + [False] * (len(keys) - len(hits))

    def remove(self, keys: Sequence[str]) -> int:
        return self._run(lambda: self._store.remove(keys), self._deadlines.call_s, 0)

    def flush(self, timeout_s: float) -> bool:
        wait_s = timeout_s + self._deadlines.call_s
        return self._run(lambda: self._store.flush(timeout_s), wait_s, False)

    def status(self) -> StoreStatus:
        status = self._store.status()
        counters = dict(status.counters)
        counters["failures"] += self._num_overrun
        if not self._threads.num_stuck:
            return replace(status, counters=counters)
        return replace(status, state=StoreState.DOWN, reason=self._reason, counters=counters)

    def close(self) -> None:
        self._run(self._store.close, self._deadlines.close_s, None)
        self._threads.close()

    def _run(
        self,
        call: Callable[[], T],
        timeout_s: float,
        otherwise: T,
        when_late: Callable[[], None] | None = None,
    ) -> T:
        try:
            return self._threads.run(call, timeout_s, when_late)
        except CallNotDoneError as error:
            with self._lock:
                self._num_overrun += 1
                self._reason = str(error)
            return otherwise

    def _put_chunk(
        self, keys: Sequence[str], blobs: Sequence[memoryview], follows: Sequence[str]
    ) -> list[bool]:
        """Nothing where the store did not answer in time."""
        own, parts = self._take([blob.nbytes for blob in blobs])
        for part, blob in zip(parts, blobs, strict=True):
            np.copyto(part, np.frombuffer(blob, np.uint8))
        kept = self._move(own, parts, lambda views: self._store.put(keys, views, follows))
        if kept:
            self._give(own)
        return kept

    def _get_chunk(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        """Nothing where the store did not answer in time."""
        own, parts = self._take([buffer.nbytes for buffer in into])
        hits = self._move(own, parts, lambda views: self._store.get(keys, views))
        if hits:
            for part, target, is_hit in zip(parts, into, hits, strict=True):
                if is_hit:  # numpy copies without the interpreter lock, memoryviews do not
                    np.copyto(np.frombuffer(target, np.uint8), part)
            self._give(own)
        return hits

    def _move(
        self,
        own: Bytes,
        parts: Sequence[Bytes],
        call: Callable[[list[memoryview]], list[bool]],
    ) -> list[bool]:
        """What the store answers; nothing where it is late: `own` is idle again when it is done."""
        none: list[bool] = []
        return self._run(
            lambda: call([part.data for part in parts]),
            self._deadlines.of(sum(map(len, parts))),
            none,
            when_late=lambda: self._give(own),
        )

    def _take(self, sizes: Sequence[int]) -> tuple[Bytes, list[Bytes]]:
        """A buffer, and its parts of these sizes."""
        num_bytes = sum(sizes)
        own: Bytes | None = None
        with self._lock:
            for at, buffer in enumerate(self._idle):
                if len(buffer) >= num_bytes:
                    own = self._idle.pop(at)
                    break
        if own is None:
            own = np.empty(max(num_bytes, CHUNK_BYTES), np.uint8)
        return own, np.split(own[:num_bytes], np.cumsum(sizes)[:-1])

    def _give(self, buffer: Bytes) -> None:
        with self._lock:
            if len(self._idle) < IDLE_BUFFERS:
                self._idle.append(buffer)


def _chunks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of at least one item and, from two items on, of at most CHUNK_BYTES."""
    start, num_bytes = 0, 0
    for at, size in enumerate(sizes):
        if at > start and num_bytes + size > CHUNK_BYTES:
            yield start, at
            start, num_bytes = at, 0
        num_bytes += size
    if start < len(sizes):
        yield start, len(sizes)
