# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker around a store: one that fails is left alone, then tried, then used again.

Does not know: which store it is, why it fails. Closed: calls go through. Open: they are answered
False or 0 at once. After a pause that doubles from one failed trial to the next, a thread of the
breaker's own puts an object and reads it back (half-open); only if that works is it closed. No
caller ever pays for a trial.

A call failed if the store's count of failures rose while it ran, or the store is down after it;
a miss, or a put refused for lack of room, is no failure.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from kvtiers.objects import HEADER_BYTES, seal
from kvtiers.store import Store, StoreState, StoreStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")
TRIAL_BODY_BYTES = 4096


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When to open, and how long to wait before a trial."""

    failures: int = 2
    """Failed calls in a row that open it."""
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0


class BreakerStore:
    """The same store, cut off while it fails."""

    def __init__(
        self, store: Store, layout_fingerprint: str, limits: BreakerLimits | None = None
    ) -> None:
        self._store = store
        self._layout = layout_fingerprint
        self._limits = limits or BreakerLimits()
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._reason = ""
        self._failures_in_row = 0
        self._closing = threading.Event()
        self._counters = {"trips": 0, "trials": 0, "cut_off_calls": 0}
        status = store.status()
        if status.state is StoreState.DOWN:
            self._open(status.reason)

    @property
    def kind(self) -> str:
        return self._store.kind

    @property
    def state(self) -> BreakerState:
        return self._state

    def probe(self, keys: Sequence[str]) -> int:
        return self._guard(lambda: self._store.probe(keys), 0)

    def surely_lacks(self, key: str) -> bool:
        return self._state is not BreakerState.CLOSED or self._store.surely_lacks(key)

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        return self._guard(lambda: self._store.put(keys, blobs, parents), [False] * len(keys))

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        return self._guard(lambda: self._store.get(keys, into), [False] * len(keys))

    def remove(self, keys: Sequence[str]) -> int:
        return self._guard(lambda: self._store.remove(keys), 0)

    def flush(self, timeout_s: float) -> bool:
        return self._guard(lambda: self._store.flush(timeout_s), False)

    def status(self) -> StoreStatus:
        status = self._store.status()
        status = replace(status, counters={**status.counters, **self._counters})
        with self._lock:
            own_state, reason = self._state, self._reason
        if own_state is BreakerState.CLOSED:
            return status
        is_tried = own_state is BreakerState.HALF_OPEN
        state = StoreState.DEGRADED if is_tried else StoreState.DOWN
        return replace(status, state=state, reason=reason)

    def close(self) -> None:
        self._closing.set()
        self._store.close()

    def _guard(self, call: Callable[[], T], otherwise: T) -> T:
        if self._state is not BreakerState.CLOSED:
            self._counters["cut_off_calls"] += 1
            return otherwise
        before = self._failures()
        answer = call()
        status = self._store.status()
        if status.state is StoreState.DOWN or status.counters["failures"] > before:
            self._note_failure(status)
        else:
            self._failures_in_row = 0
        return answer

    def _note_failure(self, status: StoreStatus) -> None:
        with self._lock:
            self._failures_in_row += 1
            is_down = status.state is StoreState.DOWN
            if self._state is not BreakerState.CLOSED or self._closing.is_set():
                return
            if not is_down and self._failures_in_row < self._limits.failures:
                return
        self._open(status.reason or f"{self._failures_in_row} calls in a row failed")

    def _open(self, reason: str) -> None:
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._state = BreakerState.OPEN
            self._reason = reason
            self._counters["trips"] += 1
        logger.warning("%s store is cut off: %s", self.kind, reason)
        threading.Thread(target=self._try_again, name=f"{self.kind}-trial", daemon=True).start()

    def _try_again(self) -> None:
        pause_s = self._limits.first_pause_s
        # Jitter: engines that lost one shared store must not all come back in the same moment.
        while not self._closing.wait(pause_s * random.uniform(0.75, 1.25)):
            self._state = BreakerState.HALF_OPEN
            self._counters["trials"] += 1
            if self._is_well():
                with self._lock:  # once closed, a call may open it again, with a reason of its own
                    self._failures_in_row = 0
                    self._state, self._reason = BreakerState.CLOSED, ""
                logger.info("%s store is used again", self.kind)
                return
            reason = self._store.status().reason
            with self._lock:
                self._state, self._reason = BreakerState.OPEN, reason or self._reason
            pause_s = min(2 * pause_s, self._limits.max_pause_s)

    def _is_well(self) -> bool:
        """Put an object nobody knows, read it back, remove it."""
        key = f"moorage-trial/{secrets.token_hex(16)}"
        blob = memoryview(bytearray(HEADER_BYTES) + secrets.token_bytes(TRIAL_BODY_BYTES))
        seal(blob, key, self._layout)
        back = memoryview(bytearray(len(blob)))
        before = self._failures()
        is_kept = self._store.put([key], [blob])[0]
        is_read = self._store.get([key], [back])[0]
        self._store.remove([key])
        status = self._store.status()
        has_failed = status.state is StoreState.DOWN or status.counters["failures"] > before
        # A store without room refuses the put, and is well; one that loses it is not.
        return not has_failed and is_read == is_kept

    def _failures(self) -> int:
        return self._store.status().counters["failures"]
