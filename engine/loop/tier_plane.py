# SPDX-License-Identifier: Apache-2.0
"""Between the scheduler, which decides where pages go, and the transfers, which move them.

Plans' moves become transfers, their acks events for the scheduler; what survived a restart is
handed to it. Does not know: how bytes move, peers, steps' tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from _scheduler import Ended, KvEvent, Plan, ProbeDone, Scheduler, TransferAck
from engine.loop.page_names import ROOT_HASH, PageNames
from engine.loop.requests import Request
from engine.loop.step_loads import StepLoad, StepLoads
from engine.loop.store_checks import StoreCheck, StoreChecks
from kvtiers.host_pool import HostPool, PageName
from kvtiers.keys import PAGE_HASH_BYTES
from kvtiers.transfer import Move, MoveKind, TransferEngine
from kvtiers.verify import Checked, verify_l2, verify_l3

logger = logging.getLogger(__name__)

# Survivors are summed up before they are taken in, as far as this many bytes; the rest, when used.
MOST_BYTES_SUMMED_AT_START = 4 << 30
MOST_L3_NAMES = 1 << 18


class Mover(Protocol):
    """Makes plans and takes acks, as the control plane does."""

    def next_plan(self, now_ms: int) -> Plan: ...
    def take_acks(self) -> Sequence[Ended]: ...


class Verification:
    """A check of L2 and L3 on a thread of its own; `found` is whole once `is_done`."""

    def __init__(
        self,
        transfers: TransferEngine,
        l2: Sequence[tuple[int, bytes]],
        l3: Sequence[bytes],
        wake: Callable[[], None],
    ) -> None:
        self.found = {"l2": Checked(0, 0), "l3": Checked(0, 0)}
        self.is_done = False

        def work() -> None:
            try:
                self.found["l2"] = verify_l2(transfers.pool, l2)
                if transfers.store is not None:
                    self.found["l3"] = verify_l3(transfers.pool, transfers.store, l3)
            except Exception:
                logger.exception("the check of the tiers broke off")
            self.is_done = True
            wake()

        threading.Thread(target=work, name="kv-verify", daemon=True).start()


class _Flush:
    """What the store was given until now is made to last, by a time (monotonic)."""

    def __init__(self, transfers: TransferEngine, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._is_over = threading.Event()
        transfers.flush(self._left_s(), lambda _: self._is_over.set())

    def wait(self) -> None:
        self._is_over.wait(self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())


class TierPlane:
    """Owned by the loop's thread. Every ticket it was given is acked once, or dies with it."""

    def __init__(
        self,
        scheduler: Scheduler,
        transfers: TransferEngine,
        names: PageNames,
        live_requests: Callable[[], Iterable[Request]],
        wake: Callable[[], None],
        *,
        num_layers: int = 1,
    ) -> None:
        self._scheduler = scheduler
        self._transfers = transfers
        self._names = names
        self._live_requests = live_requests
        self._wake = wake
        self._in_flight: dict[int, Move] = {}
        self._step_loads = StepLoads(num_layers, lambda *load: self._transfers.load_layers(*load))
        self._checks = StoreChecks(transfers, names)
        self._num_acks = 0
        self._probes: deque[ProbeDone] = deque()  # answers; append and popleft are atomic
        self._num_probes = 0  # asked, and not told to the scheduler
        # Where pages lie in L2 and which of them L3 has, as acks and the scheduler's events say.
        self._page_of: dict[bytes, int] = {}
        self._name_in: dict[int, bytes] = {}
        self._in_l3: OrderedDict[bytes, None] = OrderedDict()

    @property
    def transfers(self) -> TransferEngine:
        return self._transfers

    @property
    def names(self) -> PageNames:
        return self._names

    @property
    def num_acks(self) -> int:
        """Tickets acked and checks done since the start: what changed, somebody may wait for."""
        return self._num_acks

    @property
    def num_in_flight(self) -> int:
        """Tickets not acked."""
        return len(self._in_flight)

    def take(self, plan: Plan) -> None:
        """Start what a plan wants moved, and ask the store what it wants to know."""
        if len(plan.probe_ids):
            self._ask(plan)
        rows = plan.moves.tolist()
        if not rows:
            return
        moves, others = [], iter(self._live_requests())
        for row, page_hash in zip(rows, plan.move_hashes, strict=True):
            ticket, kind, _, source, _, target = row
            name = page_hash.tobytes()
            move = Move(
                ticket=ticket,
                kind=MoveKind(kind),
                source=source,
                target=target,
                page_hash=name,
                name=self._find_name(name, others) if kind != MoveKind.LOAD_BACK else None,
            )
            moves.append(move)
            self._in_flight[ticket] = move
            if move.kind in (MoveKind.WRITE_BACK, MoveKind.FETCH):
                self._give_up_slot(target)
        self._transfers.submit(self._step_loads.take(plan, moves))

    def loads_of(self, plan: Plan) -> list[StepLoad | None]:
        """What each row of a plan that was taken reads as it comes."""
        return self._step_loads.of_rows(plan)

    def take_bad_loads(self) -> list[StepLoad]:
        """Loads that came to a bad end since the last call."""
        return self._step_loads.take_bad()

    def take_acks(self) -> list[TransferAck | ProbeDone]:
        """What is over, for the scheduler to be told."""
        acks = self._transfers.take_acks()
        self._num_acks += len(acks)
        for ack in acks:
            move = self._in_flight.pop(ack.ticket)
            self._step_loads.note_ack(ack.ticket, ack.ok)
            if move.kind in (MoveKind.WRITE_BACK, MoveKind.FETCH) and ack.ok:
                self._page_of[move.page_hash] = move.target
                self._name_in[move.target] = move.page_hash
            if move.kind in (MoveKind.STORE, MoveKind.FETCH):
                self._note_l3(move.page_hash, ack.ok)
            if move.kind is MoveKind.STORE and ack.ok:
                self._checks.note_stored(move.page_hash)
            elif move.kind is MoveKind.STORE and move.name is not None:
                self._checks.doubt(move.name.parent_hash)
        for check in self._checks.take():
            self._num_acks += 1
            self._note_gone(check.gone)
        events: list[TransferAck | ProbeDone] = [
            TransferAck(ticket=ack.ticket, ok=ack.ok) for ack in acks
        ]
        while self._probes:
            events.append(self._probes.popleft())
            self._num_probes -= 1
        return events

    def check_l3(self, page_hash: bytes) -> StoreCheck:
        """Ask the store whether it has a page and all before it. What is gone by then is known to
        be gone when the check is done: `take_acks` says so."""
        return self._checks.ask(page_hash)

    def measured_costs(self) -> tuple[float, float]:
        """Microseconds that a page takes from L2 to L1, and from L3 to L2; 0: not known yet."""
        page_bytes = self._transfers.pool.shape.page_bytes
        rates = self._transfers.rates
        speeds = (rates.bytes_per_s(MoveKind.LOAD_BACK), rates.bytes_per_s(MoveKind.FETCH))
        l2_us, l3_us = (1e6 * page_bytes / speed if speed else 0.0 for speed in speeds)
        return l2_us, l3_us

    def _ask(self, plan: Plan) -> None:
        indptr, size = plan.probe_indptr.tolist(), PAGE_HASH_BYTES
        for place, probe_id in enumerate(plan.probe_ids.tolist()):
            raw = plan.probe_hashes[indptr[place] : indptr[place + 1]].tobytes()
            hashes = [raw[at : at + size] for at in range(0, len(raw), size)]

            def answer(num_pages: int, probe_id: int = probe_id) -> None:
                self._probes.append(ProbeDone(probe_id=probe_id, num_pages=num_pages))

            self._num_probes += 1
            self._transfers.probe(hashes, answer)

    def note_events(self, events: Sequence[KvEvent]) -> None:
        """What the scheduler let go of is no longer left for a restart, nor in the store."""
        forgotten = []
        for event in events:
            if event.kind != "removed":
                continue
            if event.tier == "l2":
                page = self._page_of.pop(event.page_hash, None)
                if page is not None:
                    del self._name_in[page]
                    self._transfers.pool.begin(page)
            elif event.tier == "l3" and event.page_hash in self._in_l3:
                del self._in_l3[event.page_hash]
                forgotten.append(event.page_hash)
        if forgotten:
            self._transfers.remove(forgotten)

    def note_adopted(self, pages: Iterable[tuple[int, bytes]]) -> None:
        """Pages (slot, name) of an older process that the scheduler took in."""
        for page, page_hash in pages:
            self._page_of[page_hash] = page
            self._name_in[page] = page_hash

    def verify(self, most: int) -> Verification:
        """Read up to `most` pages of each lower tier back, the newest first."""
        l2 = list(self._name_in.items())[::-1][:most]
        l3 = list(self._in_l3)[::-1][:most]
        return Verification(self._transfers, l2, l3, self._wake)

    def finish(self, control: Mover, timeout_s: float, *, may_plan: bool = True) -> None:
        """At the end: start what the scheduler still wants moved and wait for all of it.

        Nothing runs any more, so a plan holds moves alone. Without plans, what moves is waited for.
        One that hangs keeps nobody else: what the others bring goes on, and when nothing has come
        for half of the time that is left, the store makes safe what it has.
        """
        deadline_s = time.monotonic() + timeout_s
        flush: _Flush | None = None  # of all that was acked so far
        while True:
            if may_plan:
                control.next_plan(time.monotonic_ns() // 1_000_000)
            if not self._in_flight:
                break
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                logger.warning("%d pages on their way down are lost", len(self._in_flight))
                break
            if self._transfers.wait_acked(left_s if flush is not None else left_s / 2):
                control.take_acks()
                flush = None
            elif flush is None:
                flush = _Flush(self._transfers, deadline_s)
        if flush is None:
            flush = _Flush(self._transfers, deadline_s)
        flush.wait()
        self._transfers.close()

    def _give_up_slot(self, page: int) -> None:
        """The scheduler gives a slot to another page; the event that says so may come later."""
        before = self._name_in.pop(page, None)
        if before is not None:
            del self._page_of[before]

    def _note_l3(self, page_hash: bytes, is_there: bool) -> None:
        # A page that could not be read may be there all the same: it is not to be removed.
        self._in_l3.pop(page_hash, None)
        if is_there:
            self._in_l3[page_hash] = None
            while len(self._in_l3) > MOST_L3_NAMES:
                self._in_l3.popitem(last=False)

    def _note_gone(self, page_hashes: Sequence[bytes]) -> None:
        for page_hash in page_hashes:  # first: what is not there is not to be removed
            self._in_l3.pop(page_hash, None)
        if page_hashes and (num_lost := self._scheduler.lose_l3(b"".join(page_hashes))):
            logger.info("the store let go of %d pages that it was thought to have", num_lost)

    def _find_name(self, page_hash: bytes, others: Iterator[Request]) -> PageName | None:
        """What a page is. `others` may have it in tokens not named yet: each is looked at once a
        plan, however many of its pages nobody knows any more."""
        while (found := self._names.find(page_hash)) is None:
            request = next(others, None)
            if request is None:
                break
            self._names.extend(request)
        return found


def adopt_survivors(
    scheduler: Scheduler, pool: HostPool, *, has_l3: bool
) -> list[tuple[int, bytes]]:
    """Hand what an older process left whole in L2 to the scheduler; the slots it took, with names.

    A page counts only if its bytes and its name are right and, without L3, all pages before it are
    there too: L3 may have them, which is found out when somebody asks. What does not count is
    wiped.
    """
    found: dict[bytes, tuple[int, PageName]] = {}
    unwanted: list[int] = []
    bytes_left = MOST_BYTES_SUMMED_AT_START
    for page, name in pool.survivors():
        bytes_left -= pool.shape.page_bytes
        if name.page_hash in found or (bytes_left > 0 and not pool.is_sound(page, name.page_hash)):
            unwanted.append(page)
            continue
        if bytes_left <= 0:
            pool.doubt(page)
        found[name.page_hash] = (page, name)
    inner = {name.parent_hash for _, name in found.values()}
    taken: dict[int, bytes] = {}
    for page_hash in found:
        if page_hash not in inner:
            taken.update(_adopt_chain(scheduler, found, page_hash, has_l3=has_l3))
    unwanted += [page for page, _ in found.values() if page not in taken]
    for page in unwanted:
        pool.begin(page)
    if found or unwanted:
        logger.info("L2: %d pages that were left are taken in, %d not", len(taken), len(unwanted))
    return list(taken.items())


def _adopt_chain(
    scheduler: Scheduler,
    found: dict[bytes, tuple[int, PageName]],
    page_hash: bytes,
    *,
    has_l3: bool,
) -> list[tuple[int, bytes]]:
    """Take in the run of pages that ends with this one; slots and names."""
    chain: list[tuple[int, PageName]] = []
    while page_hash in found and len(chain) <= len(found):
        chain.append(found[page_hash])
        page_hash = chain[-1][1].parent_hash
    if page_hash != ROOT_HASH and (not has_l3 or page_hash in found):
        return []
    chain.reverse()
    first = chain[0][1]
    token_ids = np.frombuffer(b"".join(name.token_ids for _, name in chain), "<i4")
    try:
        scheduler.adopt(
            "l2",
            token_ids.astype(np.int32),
            b"".join(name.page_hash for _, name in chain),
            np.array([page for page, _ in chain], np.int32),
            first.salt,
            before=b"" if page_hash == ROOT_HASH else page_hash,
            start=first.start,
        )
    except ValueError as error:
        logger.warning("a prefix of %d pages in L2 is not taken in: %s", len(chain), error)
        return []
    return [(page, name.page_hash) for page, name in chain]
