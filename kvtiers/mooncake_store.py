# SPDX-License-Identifier: Apache-2.0
"""L3 in Mooncake: memory (and disk, if configured) of other processes, shared between machines.

Does not know: who runs those processes (the supervisor does), what pages mean. Pages pass through
a ring of shared memory, so a call that hangs never holds a caller's page. What the library answers
is believed only as far as the object's own sums go: it returns 0 for a put of a key it has, keeps
the older value, and says "present" of objects whose owner died.

Head before tail: room is made before a put (kvtiers.mooncake_pages), so that Mooncake need not
evict. A put stops where a page was refused: pages that follow it would be worth nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvtiers.mooncake_client import NO_SPACE, MooncakeClient
from kvtiers.mooncake_connection import MooncakeConnection
from kvtiers.mooncake_endpoints import read_usage
from kvtiers.mooncake_heads import NOT_READ, OTHER_LENGTH, REMOVED, GuardedCalls
from kvtiers.mooncake_pages import MooncakePages
from kvtiers.objects import is_sealed_for, key_hash, unstamp, verify
from kvtiers.page_order import NO_PARENT
from kvtiers.store import (
    StoreState,
    StoreStatus,
    check_batch,
    new_counters,
    resolve_parents,
)

NOT_FOUND = -704
FLUSH_POLL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeLimits:
    """How large the ring is, and how long calls may take."""

    ring_bytes: int = 64 << 20
    """Shared memory that pages pass through; small, as the owner holds it for each process."""
    batch: int = 32
    """Objects in one call of the library."""
    call_s: float = 2.0
    bytes_per_s: float = 100e6

    def of(self, num_bytes: int) -> float:
        return self.call_s + num_bytes / self.bytes_per_s


class MooncakeStore:
    """Connects at the first call that finds the owner listening; down, with the reason, till then.

    Args:
        endpoints: the file that says where Mooncake listens; read again at every new connection.
        object_bytes: the length of the largest object.
    """

    kind = "mooncake"

    def __init__(
        self,
        endpoints: Path,
        layout_fingerprint: str,
        object_bytes: int,
        limits: MooncakeLimits | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout_fingerprint
        self._object_bytes = object_bytes
        self._limits = limits or MooncakeLimits()
        self._counting = threading.Lock()
        self._counters = new_counters()
        self._pages = MooncakePages(now_s)
        self._connection = MooncakeConnection(
            endpoints,
            object_bytes,
            self._limits.ring_bytes,
            now_s=now_s,
            when_made=self._pages.connect,
            when_left=self._pages.forget_all,
        )
        self._connection.get()

    def probe(self, keys: Sequence[str]) -> int:
        client = self._connection.get()
        unique = list(dict.fromkeys(keys))
        if client is None or not unique:
            return 0
        num_put = self._pages.num_put
        answers = self._connection.ask(lambda: client.exist(unique, self._limits.call_s))
        present = {key for key, answer in zip(unique, answers, strict=False) if answer == 1}
        self._pages.note_missing(
            (key for key, answer in zip(unique, answers, strict=False) if answer == 0), num_put
        )
        return next((at for at, key in enumerate(keys) if key not in present), len(keys))

    def surely_lacks(self, key: str) -> bool:
        return False  # other engines put pages, too

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        check_batch(keys, blobs, writable=False)
        follows = dict(zip(keys, resolve_parents(keys, parents), strict=True))
        views = {key: blob.cast("B") for key, blob in zip(keys, blobs, strict=True)}
        client = self._connection.get()
        kept: set[str] = set()
        refused = {key for key in views if not self._is_storable(key, views[key])}
        if client is not None:
            with self._pages.writing:
                refused |= self._find_no_room(client, follows, views, refused)
                for chunk in _batches(list(views), self._limits.batch):
                    chunk = _without_followers(chunk, follows, refused)
                    stored = self._put_chunk(client, chunk, views, follows)
                    refused.update(key for key in chunk if key not in stored)
                    kept |= stored - self._drop_followers(client, stored, follows, refused)
                    self._pages.note_refused(key for key in chunk if key not in kept)
        answers = [key in kept for key in keys]
        self._count(puts=sum(answers), refused_puts=len(answers) - sum(answers))
        return answers

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        check_batch(keys, into, writable=True)
        hits = [False] * len(keys)
        client = self._connection.get()
        if client is not None:
            self._pages.touch(keys)
            views = [buffer.cast("B") for buffer in into]
            fits = [at for at, view in enumerate(views) if len(view) <= self._object_bytes]
            for chunk in _batches(fits, self._limits.batch):
                self._get_chunk(client, chunk, keys, views, hits)
        self._count(hits=sum(hits), misses=len(hits) - sum(hits))
        return hits

    def remove(self, keys: Sequence[str]) -> int:
        client = self._connection.get()
        unique = list(dict.fromkeys(keys))
        if client is None or not unique:
            return 0
        return self._remove(client, unique)

    def flush(self, timeout_s: float) -> bool:
        """Puts are in Mooncake's memory when they return; a disk tier copies them in a second."""
        if self._connection.get() is None:
            return False
        endpoints = self._connection.endpoints
        until_s = time.monotonic() + timeout_s
        while endpoints.has_disk:
            try:
                usage = read_usage(endpoints.metrics)
                if usage.num_on_disk >= usage.num_objects:
                    return True
            except OSError as error:  # urllib names the one of a connection as a reason
                if not isinstance(getattr(error, "reason", error), TimeoutError):
                    return False  # else it is only busy
            if time.monotonic() + FLUSH_POLL_S > until_s:
                return False
            time.sleep(FLUSH_POLL_S)
        return True

    def status(self) -> StoreStatus:
        """Objects and bytes: what the master counted last, and what was put since and is not
        known to be gone; where the master cannot be asked, the second alone. The capacity is what
        pages may take before some are evicted."""
        connection, pages = self._connection, self._pages
        client = connection.client
        state = StoreState.DEGRADED if connection.reason else StoreState.UP
        if client is None or client.num_stuck:
            state = StoreState.DOWN
        return StoreStatus(
            kind=self.kind,
            state=state,
            reason=connection.reason,
            used_bytes=pages.used_bytes,
            capacity_bytes=pages.limit_bytes,
            num_objects=pages.num_objects,
            counters={
                **self._counters,
                "failures": connection.num_failures,
                "connects": connection.num_made,
                "evicted": pages.num_evicted,
                "orphaned": pages.num_orphaned,
            },
        )

    def close(self) -> None:
        self._connection.close()

    # Moving pages

    def _is_storable(self, key: str, blob: memoryview) -> bool:
        return len(blob) <= self._object_bytes and is_sealed_for(blob, key, self._layout)

    def _drop_followers(
        self, client: MooncakeClient, stored: set[str], follows: dict[str, str], refused: set[str]
    ) -> set[str]:
        """Of a chunk, what was stored behind a page that was not: worth nothing, it goes again."""
        in_order = [key for key in follows if key in stored]
        lost = stored.difference(_without_followers(in_order, follows, refused))
        if lost:
            self._remove(client, list(lost))
        return lost

    def _find_no_room(
        self,
        client: MooncakeClient,
        follows: dict[str, str],
        views: dict[str, memoryview],
        refused: set[str],
    ) -> set[str]:
        """Which of these have no room, when what may go has gone."""
        keys = [key for key in views if key not in refused]
        parents = [_hash_or_none(follows[key]) for key in keys]
        sizes = [len(views[key]) for key in keys]
        calls = GuardedCalls(self._connection.ask, client, self._limits.call_s)
        return set(keys) - self._pages.make_room(calls, keys, parents, sizes)

    def _put_chunk(
        self,
        client: MooncakeClient,
        keys: list[str],
        views: dict[str, memoryview],
        follows: dict[str, str],
    ) -> set[str]:
        kept: set[str] = set()
        while keys:
            blobs = [views[key] for key in keys]
            parents = [_hash_or_none(follows[key]) for key in keys]
            timeout_s = self._limits.of(sum(map(len, blobs)))
            codes = self._connection.ask(partial(client.put, keys, blobs, parents, timeout_s))
            if not codes:
                break
            if NO_SPACE in codes:
                self._pages.note_full()
            stored = [key for key, code in zip(keys, codes, strict=False) if code == 0]
            kept.update(stored)
            self._pages.add(
                stored,
                [_hash_or_none(follows[key]) for key in stored],
                [len(views[key]) for key in stored],
            )
            keys = keys[len(codes) :]
        return kept

    def _get_chunk(
        self,
        client: MooncakeClient,
        positions: list[int],
        keys: Sequence[str],
        views: Sequence[memoryview],
        hits: list[bool],
    ) -> None:
        """Read these positions, each key once: a key twice in one call reads wrong bytes."""
        first = {keys[at]: at for at in reversed(positions)}
        waiting = list(first)
        num_put = self._pages.num_put
        while waiting:
            buffers = [views[first[key]] for key in waiting]
            timeout_s = self._limits.of(sum(map(len, buffers)))
            lengths = self._read(client, waiting, buffers, timeout_s)
            if not lengths:
                break
            for key, buffer, length in zip(waiting, buffers, lengths, strict=False):
                if length == NOT_READ and len(lengths) > 1:
                    length = next(iter(self._read(client, [key], [buffer], timeout_s)), NOT_FOUND)
                hits[first[key]] = self._is_right(client, key, buffer, length, num_put)
            waiting = waiting[len(lengths) :]
        for at in positions:
            if at != first[keys[at]] and len(views[at]) == len(views[first[keys[at]]]):
                hits[at] = hits[first[keys[at]]]
                if hits[at]:
                    np.copyto(np.frombuffer(views[at], np.uint8), views[first[keys[at]]])

    def _read(
        self, client: MooncakeClient, keys: list[str], into: Sequence[memoryview], timeout_s: float
    ) -> list[int]:
        # An object longer than its buffer is a miss; a put that answers so has lost its memory.
        return self._connection.ask(
            partial(client.get, keys, into, timeout_s), OTHER_LENGTH, NOT_READ
        )

    def _is_right(
        self, client: MooncakeClient, key: str, buffer: memoryview, length: int, num_put: int
    ) -> bool:
        if length == len(buffer) and verify(buffer, key, self._layout):
            unstamp(buffer)
            return True
        if length == NOT_FOUND:
            self._pages.note_missing([key], num_put)
        elif length in (len(buffer), NOT_READ):
            self._count(bad_reads=1)
            # It would stay what it is for ever: a put of a key that is there changes nothing.
            self._remove(client, [key])
        return False

    def _remove(self, client: MooncakeClient, keys: list[str]) -> int:
        """How many were there, and are not now. What stays still counts for what is there."""
        codes = self._connection.ask(lambda: client.remove(keys, self._limits.call_s))
        gone = [key for key, code in zip(keys, codes, strict=False) if code in REMOVED]
        self._pages.note_removed(gone, is_all=len(gone) == len(keys))
        return codes.count(0)

    def _count(self, **changes: int) -> None:
        with self._counting:
            for name, change in changes.items():
                self._counters[name] += change


def _hash_or_none(key: str) -> bytes:
    return key_hash(key) if key else NO_PARENT


def _without_followers(keys: list[str], follows: dict[str, str], refused: set[str]) -> list[str]:
    """Those that are not refused, nor follow one that is; `refused` learns of the latter."""
    for key in keys:
        if follows[key] in refused:
            refused.add(key)
    return [key for key in keys if key not in refused]


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
