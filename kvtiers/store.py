# SPDX-License-Identifier: Apache-2.0
"""L3: the protocol that every store of pages fulfils, and the values it answers with.

Does not know: how a store keeps objects, who asks, the pools pages come from. An object is what
`kvtiers.objects` seals. The rules, held by one contract suite:

* Calls block and are made by worker threads, several at once; none is made on a serving loop but
  `surely_lacks` and `status`.
* A store's failure is never raised: the answer is False or 0, and `status` says why. Only a
  caller's mistake is raised (StoreCallError).
* A store is a cache. A put may be lost, an object may be evicted at any time; a read is right or
  is no read.
* An object never changes: a put of a key that is there keeps what is there and answers True.
* Heads are never dropped before tails, where the store decides what goes: a page without all the
  pages before it is worth nothing. So a put says which page each page follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtiers.errors import StoreCallError


class StoreState(StrEnum):
    """What a caller may expect of a store now."""

    UP = "up"
    DEGRADED = "degraded"  # not all of it works (disk full), the last call failed, or it is tried
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """One store as it is now; counters only ever rise while the process lives."""

    kind: str
    state: StoreState
    reason: str = ""
    """Why it is not up; empty while it is."""
    used_bytes: int = 0
    capacity_bytes: int = 0
    num_objects: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)


class Store(Protocol):
    """Pages under their keys, outside this process's memory."""

    @property
    def kind(self) -> str:
        """What it is, for metrics: file | mooncake | none."""
        ...

    def probe(self, keys: Sequence[str]) -> int:
        """The length of the leading run of keys believed present: a hint, only `get` is proof."""
        ...

    def surely_lacks(self, key: str) -> bool:
        """Whether a probe of this key would find nothing, from memory and at once, whatever the
        store is doing; False: it may be there, or the store has to look."""
        ...

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        """Keep sealed objects; True where the store took it (or has it), False where it did not.

        The blobs are read until the call returns and belong to the caller after it.

        Args:
            parents: for each key the key of the page before it in its prefix, "" for a prefix's
                first page. None: each key follows the one before it in this call, and the first
                is a prefix's first page.

        Raises:
            StoreCallError: the lists differ in length.
        """
        ...

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        """Read objects; True only where the object was there, whole, and its sums were right.

        Args:
            into: writable, contiguous, one for each key, exactly as long as the object. Where
                the answer is False its bytes are anything.

        Raises:
            StoreCallError: the lists differ in length, or a buffer cannot be written.
        """
        ...

    def remove(self, keys: Sequence[str]) -> int:
        """Forget objects; how many were there."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Make what was put as lasting as the store can; False: it failed or takes longer."""
        ...

    def status(self) -> StoreStatus:
        """How it is; returns at once, whatever the store is doing."""
        ...

    def close(self) -> None:
        """Let go of everything; later calls answer False or 0. Safe to call twice."""
        ...


COUNTERS = ("hits", "misses", "bad_reads", "puts", "refused_puts", "failures")


def new_counters(*more: str) -> dict[str, int]:
    """What every store counts, at zero: pages read, not found, found but not right, kept, not
    kept, and calls that failed (a miss is none)."""
    return dict.fromkeys((*COUNTERS, *more), 0)


def check_batch(keys: Sequence[str], buffers: Sequence[memoryview], *, writable: bool) -> None:
    """Raises StoreCallError where keys and buffers do not fit each other."""
    if len(keys) != len(buffers):
        raise StoreCallError("buffers", f"{len(buffers)} for {len(keys)} keys", "one for each key")
    for index, buffer in enumerate(buffers):
        if not buffer.contiguous:
            raise StoreCallError(f"buffers[{index}]", "not contiguous", "contiguous bytes")
        if writable and buffer.readonly:
            raise StoreCallError(f"buffers[{index}]", "read-only", "a writable buffer")


def resolve_parents(keys: Sequence[str], parents: Sequence[str] | None) -> list[str]:
    """The page each key follows, spelled out; raises StoreCallError for another length."""
    if parents is None:
        return ["", *keys[:-1]] if keys else []
    if len(parents) != len(keys):
        raise StoreCallError("parents", f"{len(parents)} for {len(keys)} keys", "one for each key")
    return list(parents)
