# SPDX-License-Identifier: Apache-2.0
"""Moves pages between the tiers on threads beside the loop; each ticket is acked exactly once.

    copies     L1 <-> L2: load-backs first, write-backs when none waits
    reads      L3 -> L2, and probes of the store
    writes     L2 -> L3, behind everything: where the store is slow, ends of prefixes give way

A move may start as soon as it is submitted: the control plane frees no page that a step in flight
still reads or writes, and names no page as a source before a finished step has filled it. A page
whose bytes are in doubt is not moved: its ack says so, and whoever wanted it computes it.

A load-back's pages are looked at one by one, each just before its copy is queued, and the next
batch is queued before the one before it has arrived: a link has its next copy in time. A load by
layers looks at some at a time, before the copies of their first layers.

Does not know: why a page moves, requests, steps. Thread rule: `submit`, `load_layers`, `take_acks`,
`probe` and `close` belong to one thread; `wake` is called on any.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtiers.device_memory import DeviceMemory, Incoming, Wait
from kvtiers.host_pool import HostPool
from kvtiers.layered_load import LayeredLoad
from kvtiers.store import Store
from kvtiers.transfer_line import StoreLine
from kvtiers.transfer_queues import Move, MoveKind, MoveQueue, OldestFirst
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
LOOK_PAGES = 128  # of a load by layers at a time, where only headers are read
NO_BOUND = sys.maxsize  # the control plane waits for each of these


@dataclass(frozen=True, slots=True)
class Ack:
    """A ticket is over; ok: the page is where it was to go, whole."""

    ticket: int
    ok: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    """Moves of one kind that were begun. `wait`: for those that may not have arrived."""

    moves: list[Move]
    oks: list[bool]
    wait: Wait | None
    start_s: float


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
        self._acked = threading.Condition()
        self.rates = Rates()
        self._batch = BATCH[device.kind]
        self._copies = MoveQueue(
            {
                MoveKind.LOAD_BACK: OldestFirst(NO_BOUND),
                MoveKind.WRITE_BACK: OldestFirst(MOST_WRITE_BACKS),
            }
        )
        self._reads = MoveQueue({MoveKind.FETCH: OldestFirst(NO_BOUND)})
        # Each waiting store holds a slot of L2: half of them at most.
        self._stores = StoreLine(max(1, pool.num_slots // 2), _page_before)
        self._writes = MoveQueue({MoveKind.STORE: self._stores})
        self._queues = {
            MoveKind.LOAD_BACK: self._copies,
            MoveKind.WRITE_BACK: self._copies,
            MoveKind.FETCH: self._reads,
            MoveKind.STORE: self._writes,
        }
        queues = {"copies": self._copies, "reads": self._reads, "writes": self._writes}
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"kv-{name}", daemon=True)
            for name, queue in queues.items()
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
                self._give_way(kind, self._queues[kind].put(some))

    def load_layers(self, moves: Sequence[Move], load: LayeredLoad) -> None:
        """Queue load-backs before all others, for a step that reads each layer as it comes."""
        if not self._copies.call(lambda: self._load_layers(moves, load)):
            load.end()
            self._ack(moves, [False] * len(moves))

    def take_acks(self) -> list[Ack]:
        """Tickets that are over and were not taken yet."""
        acks: list[Ack] = []
        while self._acks:
            acks.append(self._acks.popleft())
        return acks

    def probe(self, page_hashes: Sequence[bytes], answer: Callable[[int], None]) -> None:
        """Ask the store (there must be one) how many leading pages it believes it has; `answer` is
        called on a thread, or at once where it surely has none."""
        store = self._store
        assert store is not None

        def ask() -> None:
            num_found = 0
            try:
                num_found = store.probe([self._pool.key(page_hash) for page_hash in page_hashes])
            except Exception:  # a store must not raise; that it did is a miss
                logger.exception("the store's probe failed")
            answer(num_found)
            self._wake()

        if not page_hashes or store.surely_lacks(self._pool.key(page_hashes[0])):
            answer(0)  # most prompts: what they add, nobody has computed before
            self._wake()
        else:
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

    def wait_acked(self, timeout_s: float) -> bool:
        """Wait until there is an ack to take; False: not in time."""
        with self._acked:
            return self._acked.wait_for(lambda: len(self._acks) > 0, max(0.0, timeout_s))

    def wait_copied(self, timeout_s: float) -> bool:
        """Wait until every move between L1 and L2 is acked, whatever a store does; False: as
        above."""
        return self._copies.wait_empty(time.monotonic() + timeout_s)

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
        under_way: _Batch | None = None  # its copies are queued, and may have arrived
        while (work := queue.take(self._batch, waits=under_way is None)) is not None:
            before, under_way = under_way, None
            is_load = not callable(work) and len(work) > 0 and work[0].kind is MoveKind.LOAD_BACK
            if before is not None and not is_load:
                self._finish(queue, before)
                before = None
            if callable(work):
                work()
                queue.done(1)
            elif work:
                under_way = self._begin(work)
            if before is not None:
                self._finish(queue, before)
            if under_way is not None and under_way.wait is None:
                self._finish(queue, under_way)
                under_way = None
        if under_way is not None:
            self._finish(queue, under_way)

    def _begin(self, moves: list[Move]) -> _Batch:
        """Carry moves out; of a load-back, perhaps only queue the copies."""
        kind, start_s = moves[0].kind, time.perf_counter()
        oks, wait = [False] * len(moves), None
        try:
            if kind is MoveKind.LOAD_BACK:
                oks, wait = self._load_back(moves)
            elif kind is MoveKind.WRITE_BACK:
                oks = self._write_back(moves)
            else:
                oks = self._fetch(moves) if kind is MoveKind.FETCH else self._put(moves)
        except Exception:  # the pages are lost, not the thread: nobody else would ack them
            logger.exception("%d moves failed: %s", len(moves), kind.name.lower())
        return _Batch(moves, oks, wait, start_s)

    def _finish(self, queue: MoveQueue, batch: _Batch) -> None:
        """Wait for what was queued, and ack it."""
        kind, oks = batch.moves[0].kind, batch.oks
        if batch.wait is not None:
            try:
                batch.wait()
            except Exception:  # what a device did wrong shows when it is waited for
                logger.exception("%d moves failed: %s", len(oks), kind.name.lower())
                oks = [False] * len(oks)
        now_s = time.perf_counter()
        # It may have been queued behind another, which is counted already.
        seconds = now_s - max(batch.start_s, queue.last_end_s)
        queue.last_end_s = now_s
        self.rates.note(kind, oks, sum(oks) * self._pool.shape.page_bytes, seconds)
        if kind is MoveKind.STORE and not all(oks):
            self._lose(batch.moves, oks)  # first: once acked, a page may be offered again
        self._ack(batch.moves, oks)
        queue.done(len(oks))

    def _lose(self, stores: Sequence[Move], oks: Sequence[bool]) -> None:
        """What waits behind pages that the store did not take is worth nothing there."""
        lost = [move.page_hash for move, ok in zip(stores, oks, strict=True) if not ok]
        behind = self._writes.give_way(lambda: self._stores.lose(lost))
        self._give_way(MoveKind.STORE, behind)

    def _give_way(self, kind: MoveKind, moves: Sequence[Move]) -> None:
        self.rates.note_dropped(kind, len(moves))
        self._ack(moves, [False] * len(moves))

    def _ack(self, moves: Sequence[Move], oks: Sequence[bool]) -> None:
        if moves:
            with self._acked:
                self._acks.extend(Ack(m.ticket, ok) for m, ok in zip(moves, oks, strict=True))
                self._acked.notify_all()
            self._wake()

    def _load_back(self, moves: Sequence[Move]) -> tuple[list[bool], Wait | None]:
        oks: list[bool] = []
        good = (move for some in self._good_moves(moves, oks, 1) for move in some)
        wait = self._device.write((move.target, self._pool.body(move.source)) for move in good)
        if not all(oks):
            logger.warning("%d pages of L2 are damaged; computed anew", oks.count(False))
        return oks, wait

    def _load_layers(self, moves: Sequence[Move], load: LayeredLoad) -> None:
        start_s, oks = time.perf_counter(), list[bool]()
        try:
            most = 1 if self._checks_bodies else LOOK_PAGES
            good = self._good_moves(moves, oks, most)
            parts = (([m.target for m in some], [m.source for m in some]) for some in good if some)
            self._device.write_layers(Incoming(self._pool.bodies, parts), load)
        except Exception:
            logger.exception("%d moves failed: load_back, by layers", len(moves))
            oks = [False] * len(moves)
        finally:
            load.end()  # whoever waits goes on; what it read counts only with these acks
        seconds = time.perf_counter() - start_s
        self.rates.note(MoveKind.LOAD_BACK, oks, sum(oks) * self._pool.shape.page_bytes, seconds)
        self.rates.note_layered(sum(oks))
        self._ack(moves, oks)

    def _good_moves(
        self, moves: Sequence[Move], oks: list[bool], most: int
    ) -> Iterator[list[Move]]:
        """Those whose source is sound, looked at so many at a time, when they are drawn; `oks` gets
        what was found."""
        for at in range(0, len(moves), most):
            some = moves[at : at + most]
            if self._checks_bodies:
                found = [self._pool.is_sound(move.source, move.page_hash) for move in some]
            else:
                found = self._pool.which_hold(
                    [move.source for move in some], [move.page_hash for move in some]
                )
            oks.extend(found)
            yield [move for move, ok in zip(some, found, strict=True) if ok]

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


def _page_before(move: Move) -> bytes:
    return move.name.parent_hash if move.name is not None else b""
