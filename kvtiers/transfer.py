# SPDX-License-Identifier: Apache-2.0
"""Moves pages between the tiers on threads beside the loop; each ticket is acked exactly once.

    copies     L1 <-> L2: load-backs first, write-backs when none waits
    reads      L3 -> L2, and probes of the store
    writes     L2 -> L3, behind everything: where the store is slow the oldest give way

A move may start as soon as it is submitted: the control plane frees no page that a step in flight
still reads or writes, and names no page as a source before a finished step has filled it. A page
whose bytes are in doubt is not moved: its ack says so, and whoever wanted it computes it.

Does not know: why a page moves, requests, steps. Thread rule: `submit`, `take_acks`, `probe` and
`close` belong to one thread; `wake` is called on any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtiers.device_memory import DeviceMemory
from kvtiers.host_pool import HostPool
from kvtiers.store import Store
from kvtiers.transfer_queues import Move, MoveKind, MoveQueue
from kvtiers.transfer_rates import Rates

__all__ = ["Ack", "Move", "MoveKind", "TransferEngine"]

logger = logging.getLogger(__name__)

# Pages of one turn of a thread. A load-back may come while a batch of write-backs is under way: it
# is copied at the link's rate and then summed up, at 8 GB/s.
_STORE_BATCH = {MoveKind.FETCH: 16, MoveKind.STORE: 16}
BATCH = {
    "cpu": {MoveKind.LOAD_BACK: 4, MoveKind.WRITE_BACK: 4, **_STORE_BATCH},
    "cuda": {MoveKind.LOAD_BACK: 64, MoveKind.WRITE_BACK: 8, **_STORE_BATCH},
}
MOST_WRITE_BACKS = 4096


@dataclass(frozen=True, slots=True)
class Ack:
    """A ticket is over; ok: the page is where it was to go, whole."""

    ticket: int
    ok: bool


class TransferEngine:
    """Carries moves out. `store` None: there is no L3, and no move may name it.

    Args:
        wake: called after acks or a probe's answer became ready; must not block.
        checks_bodies: a load-back sums the page's bytes up first (8 GB/s on one core, which a
            GPU's link outruns); else it checks the header alone.
    """

    def __init__(
        self,
        device: DeviceMemory,
        pool: HostPool,
        store: Store | None,
        wake: Callable[[], None],
        *,
        checks_bodies: bool = True,
    ) -> None:
        self._device = device
        self._pool = pool
        self._store = store
        self._wake = wake
        self._checks_bodies = checks_bodies
        self._acks: deque[Ack] = deque()  # append and popleft are atomic
        self.rates = Rates()
        self._batch = BATCH[device.kind]
        self._copies = MoveQueue(
            MoveKind.LOAD_BACK, MoveKind.WRITE_BACK, most_second=MOST_WRITE_BACKS
        )
        self._reads = MoveQueue(MoveKind.FETCH, None, most_second=0)
        # Each waiting store holds a slot of L2: half of them at most.
        self._writes = MoveQueue(None, MoveKind.STORE, most_second=max(1, pool.num_slots // 2))
        self._queues = {
            MoveKind.LOAD_BACK: self._copies,
            MoveKind.WRITE_BACK: self._copies,
            MoveKind.FETCH: self._reads,
            MoveKind.STORE: self._writes,
        }
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"kv-{name}", daemon=True)
            for name, queue in (
                ("copies", self._copies),
                ("reads", self._reads),
                ("writes", self._writes),
            )
            if queue is self._copies or store is not None
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pool(self) -> HostPool:
        return self._pool

    @property
    def store(self) -> Store | None:
        return self._store

    # The loop's side ----------------------------------------------------------------------

    def submit(self, moves: Sequence[Move]) -> None:
        """Queue moves; returns at once."""
        for kind in MoveKind:
            some = [move for move in moves if move.kind is kind]
            if some:
                dropped = self._queues[kind].put(some)
                self.rates.note_dropped(kind, len(dropped))
                self._ack(dropped, [False] * len(dropped))

    def take_acks(self) -> list[Ack]:
        """Tickets that are over and were not taken yet."""
        acks: list[Ack] = []
        while self._acks:
            acks.append(self._acks.popleft())
        return acks

    def probe(self, page_hashes: Sequence[bytes], answer: Callable[[int], None]) -> None:
        """Ask the store how many leading pages it believes it has; `answer` is called on a thread.

        Requires: there is a store.
        """
        store, keys = self._store, [self._pool.key(page_hash) for page_hash in page_hashes]
        assert store is not None

        def ask() -> None:
            num_found = 0
            try:
                num_found = store.probe(keys)
            except Exception:  # a store must not raise; that it did is a miss
                logger.exception("the store's probe failed")
            answer(num_found)
            self._wake()

        self._reads.call(ask)

    def remove(self, page_hashes: Sequence[bytes]) -> None:
        """Let the store forget pages, behind what it is doing. Requires: there is a store."""
        store, keys = self._store, [self._pool.key(page_hash) for page_hash in page_hashes]
        assert store is not None

        def forget() -> None:
            try:
                store.remove(keys)
            except Exception:
                logger.exception("the store's remove failed")

        self._writes.call(forget)

    def flush(self, timeout_s: float, answer: Callable[[bool], None]) -> None:
        """Let the store make what it was given last; `answer` is called on a thread."""
        store = self._store
        if store is None:
            answer(True)
            return

        def settle() -> None:
            is_flushed = False
            try:
                is_flushed = store.flush(timeout_s)
            except Exception:
                logger.exception("the store's flush failed")
            answer(is_flushed)
            self._wake()

        self._writes.call(settle)

    @property
    def num_waiting(self) -> int:
        """Moves that are not acked yet."""
        return len(self._copies) + len(self._reads) + len(self._writes)

    def counters(self) -> dict[str, float]:
        """Pages, bytes, seconds and losses by kind of move, since the start."""
        return {**self.rates.as_dict(), "transfers_waiting": float(self.num_waiting)}

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every submitted move is acked; False: not in time."""
        deadline_s = time.monotonic() + timeout_s
        queues = (self._copies, self._reads, self._writes)
        return all(queue.wait_empty(deadline_s) for queue in queues)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop what waits (each is acked as lost) and end the threads; one that hangs is left."""
        for queue in (self._copies, self._reads, self._writes):
            left = queue.close()
            self._ack(left, [False] * len(left))
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.pool.region.unpin()

    # The threads' side --------------------------------------------------------------------

    def _work(self, queue: MoveQueue) -> None:
        carry_out = {
            MoveKind.LOAD_BACK: self._load_back,
            MoveKind.WRITE_BACK: self._write_back,
            MoveKind.FETCH: self._fetch,
            MoveKind.STORE: self._put,
        }
        while (work := queue.take(self._batch)) is not None:
            if callable(work):
                work()
                queue.done(1)
                continue
            start_s = time.perf_counter()
            kind = work[0].kind
            try:
                oks = carry_out[kind](work)
            except Exception:  # the pages are lost, not the thread: nobody else would ack them
                logger.exception("%d moves failed: %s", len(work), kind.name.lower())
                oks = [False] * len(work)
            num_bytes = sum(oks) * self._pool.shape.page_bytes
            self.rates.note(kind, oks, num_bytes, time.perf_counter() - start_s)
            self._ack(work, oks)
            queue.done(len(work))

    def _ack(self, moves: Sequence[Move], oks: Sequence[bool]) -> None:
        if moves:
            self._acks.extend(Ack(m.ticket, ok) for m, ok in zip(moves, oks, strict=True))
            self._wake()

    def _load_back(self, moves: Sequence[Move]) -> list[bool]:
        pool = self._pool
        is_good = pool.is_sound if self._checks_bodies else pool.holds
        oks = [is_good(move.source, move.page_hash) for move in moves]
        good = [move for move, ok in zip(moves, oks, strict=True) if ok]
        self._device.write([m.target for m in good], [pool.body(m.source) for m in good])
        if len(good) < len(moves):
            logger.warning("%d pages of L2 are damaged; computed anew", len(moves) - len(good))
        return oks

    def _write_back(self, moves: Sequence[Move]) -> list[bool]:
        pool = self._pool
        for move in moves:
            pool.begin(move.target)
        self._device.read([m.source for m in moves], [pool.body(m.target) for m in moves])
        for move in moves:
            pool.finish(move.target, move.page_hash, move.name)
        return [True] * len(moves)

    def _fetch(self, moves: Sequence[Move]) -> list[bool]:
        assert self._store is not None
        pool = self._pool
        for move in moves:
            pool.begin(move.target)
        keys = [pool.key(move.page_hash) for move in moves]
        oks = self._store.get(keys, [pool.slot(move.target) for move in moves])
        for move, ok in zip(moves, oks, strict=True):
            if ok:
                pool.write_record(move.target, move.name)
        return oks

    def _put(self, moves: Sequence[Move]) -> list[bool]:
        assert self._store is not None
        pool = self._pool
        # What memory has damaged is not handed on under its old name.
        oks = [pool.is_sound(move.source, move.page_hash) for move in moves]
        good = [move for move, ok in zip(moves, oks, strict=True) if ok]
        if not good:
            return oks
        put = self._store.put(
            [pool.key(move.page_hash) for move in good],
            [pool.slot(move.source) for move in good],
            [self._parent_key(move) for move in good],
        )
        answers = iter(put)
        return [ok and next(answers) for ok in oks]

    def _parent_key(self, move: Move) -> str:
        name = move.name or self._pool.read_record(move.source)
        if name is None or not any(name.parent_hash):
            return ""
        return self._pool.key(name.parent_hash)
