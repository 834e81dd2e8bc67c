# SPDX-License-Identifier: Apache-2.0
"""Every ticket is acked once, and truly; what is urgent comes first; nobody is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtiers.device_memory import Body, Incoming, Wait
from kvtiers.host_pool import HostPool, PageName, PoolShape
from kvtiers.keys import ObjectKeys
from kvtiers.layered_load import LayeredLoad
from kvtiers.store import Store
from kvtiers.transfer import Ack, Move, MoveKind, TransferEngine
from kvtiers.verify import Checked, verify_l2, verify_l3
from tests.fakes.memory_store import MemoryStore
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES

NUM_SLOTS = 8
Bodies = Sequence[NDArray[np.uint8]]


class FakeLayout:
    """The pages of tests.fakes.stored_pages."""

    num_layers = 1
    dtype = "float32"
    page_size = 4
    page_bytes = PAGE_BYTES
    token_bytes = PAGE_BYTES // 4

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        return (num_pages, PAGE_BYTES)

    def fingerprint(self) -> str:
        return LAYOUT


LAYOUT_SIZE = FakeLayout.page_size


class FakeDevice:
    """Pages in an array; each batch waits for `gate`, and fails while `is_broken`."""

    kind = "cpu"

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.pages = rng.integers(0, 256, (12, PAGE_BYTES), dtype=np.uint8)
        self.gate = threading.Event()
        self.gate.set()
        self.is_in = threading.Event()  # a copy has come to the gate
        self.is_broken = False
        self.done: list[str] = []
        self.before_page: Callable[[int], None] = lambda page: None  # that is written
        self.wait: Callable[[list[int]], Wait | None] = lambda pages: None  # for these

    def read(self, pages: Sequence[int], into: Bodies) -> None:
        self._enter(f"read {list(pages)}")
        for page, body in zip(pages, into, strict=True):
            body[:] = self.pages[page]

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        self.gate.wait(60)
        drawn = []
        for page, body in pages:
            self.before_page(page)
            self.pages[page] = body
            drawn.append(page)
        self._enter(f"write {drawn}")
        return self.wait(drawn)

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        wait = self.write(pages)
        if wait is not None:
            wait()
        load.arrived(load.num_layers, None)

    def _enter(self, what: str) -> None:
        self.is_in.set()
        self.gate.wait(60)
        self.done.append(what)
        if self.is_broken:
            raise RuntimeError("the device is broken")


class Bench:
    """A transfer engine and what it is asked."""

    def __init__(self, store: Store | None) -> None:
        self.device = FakeDevice()
        self.store = store
        self.wakes = 0
        self.when_woken: Callable[[], None] = lambda: None
        shape = PoolShape(num_slots=NUM_SLOTS, page_bytes=PAGE_BYTES, page_size=LAYOUT_SIZE)
        self.pool = HostPool(shape, FakeLayout(), ObjectKeys("model", FakeLayout()))
        self.engine = TransferEngine(self.device, self.pool, store, self.wake)
        self._tickets = iter(range(1, 1000))

    def wake(self) -> None:
        self.wakes += 1
        self.when_woken()

    def move(self, kind: MoveKind, source: int, target: int, number: int) -> Move:
        name = PageName(
            page_hash=name_of(number),
            parent_hash=name_of(number - 1) if number else bytes(16),
            token_ids=np.full(LAYOUT_SIZE, number, "<i4").tobytes(),
            salt="",
            start=number * LAYOUT_SIZE,
        )
        return Move(
            ticket=next(self._tickets),
            kind=kind,
            source=source,
            target=target,
            page_hash=name_of(number),
            name=name,
        )

    def run(self, *moves: Move) -> dict[int, bool]:
        """Submit moves and wait for their acks."""
        self.engine.submit(moves)
        return self.acks(len(moves))

    def acks(self, most: int, timeout_s: float = 60.0) -> dict[int, bool]:
        deadline_s = time.monotonic() + timeout_s
        found: list[Ack] = []
        while len(found) < most and time.monotonic() < deadline_s:
            found += self.engine.take_acks()
            time.sleep(0.002)
        tickets = [ack.ticket for ack in found]
        assert len(set(tickets)) == len(tickets), "a ticket was acked twice"
        return {ack.ticket: ack.ok for ack in found}


def name_of(number: int) -> bytes:
    return bytes([number + 1]) * 16


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(store: Store | None = None) -> Bench:
        made.append(Bench(store))
        return made[-1]

    yield build
    for bench in made:
        bench.device.gate.set()
        bench.engine.close()


Make = Callable[..., Bench]


def test_a_page_goes_down_to_the_store_and_comes_back_byte_for_byte(make: Make) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    page = bench.device.pages[3].copy()
    assert bench.run(bench.move(MoveKind.WRITE_BACK, 3, 5, 0)) == {1: True}
    assert bench.run(bench.move(MoveKind.STORE, 5, -1, 0)) == {2: True}
    assert bench.run(bench.move(MoveKind.FETCH, -1, 2, 0)) == {3: True}
    assert bench.run(bench.move(MoveKind.LOAD_BACK, 2, 9, 0)) == {4: True}
    assert np.array_equal(bench.device.pages[9], page)
    assert bench.engine.wait_idle(20)
    assert bench.wakes >= 4 and bench.engine.num_waiting == 0
    counters = bench.engine.counters()
    for kind in ("write_back", "store", "fetch", "load_back"):
        assert counters[f"{kind}_pages"] == 1 and counters[f"{kind}_lost"] == 0
        assert counters[f"{kind}_bytes"] == PAGE_BYTES


def test_load_backs_pass_write_backs_that_wait(make: Make) -> None:
    bench = make()
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))
    bench.device.gate.clear()
    bench.device.done.clear()
    moves = [bench.move(MoveKind.WRITE_BACK, page, page, page) for page in (1, 2, 3, 4, 5, 6)]
    bench.engine.submit(moves)
    bench.engine.submit([bench.move(MoveKind.LOAD_BACK, 0, 10, 0)])
    bench.device.gate.set()
    assert set(bench.acks(7).values()) == {True}
    order = [what.split()[0] for what in bench.device.done]
    assert order.index("write") <= 1 and order[-1] == "read"


def test_a_broken_copy_is_lost_and_the_next_one_is_not(make: Make) -> None:
    bench = make()
    bench.device.is_broken = True
    assert bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0)) == {1: False}
    bench.device.is_broken = False
    assert bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0)) == {2: True}
    assert bench.engine.counters()["write_back_lost"] == 1


@pytest.mark.parametrize("kind", [MoveKind.LOAD_BACK, MoveKind.STORE])
def test_a_page_that_memory_damaged_goes_nowhere(make: Make, kind: MoveKind) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    bench.run(*(bench.move(MoveKind.WRITE_BACK, page, page, page) for page in (0, 1)))
    bench.pool.slot(0)[700] ^= 1
    before = bench.device.pages.copy()
    target = -1 if kind is MoveKind.STORE else 11
    bad, good = bench.move(kind, 0, target, 0), bench.move(kind, 1, target if target < 0 else 10, 1)
    acks = bench.run(bad, good)
    assert acks == {bad.ticket: False, good.ticket: True}
    assert np.array_equal(bench.device.pages[11], before[11])
    assert len(store.objects) == (1 if kind is MoveKind.STORE else 0)


def test_each_page_is_looked_at_when_its_turn_comes(make: Make) -> None:
    """Not all of them before the first copy, while the link would idle: what is damaged while the
    page before it is copied is still found, and what lies around it arrives."""
    bench = make()
    bench.run(*(bench.move(MoveKind.WRITE_BACK, page, page, page) for page in range(3)))

    def damage(page: int) -> None:
        if page == 9:
            bench.pool.slot(1)[700] ^= 1

    bench.device.before_page = damage
    loads = [bench.move(MoveKind.LOAD_BACK, page, 9 + page, page) for page in range(3)]
    assert list(bench.run(*loads).values()) == [True, False, True]
    assert np.array_equal(bench.device.pages[9], bench.device.pages[0])
    assert np.array_equal(bench.device.pages[11], bench.device.pages[2])


def test_a_batch_is_queued_before_the_one_before_it_has_arrived(make: Make) -> None:
    """And acked only when it has; what comes behind the last one does not wait for another."""
    bench = make()
    bench.run(*(bench.move(MoveKind.WRITE_BACK, page, page, page) for page in range(NUM_SLOTS)))
    done = bench.device.done
    done.clear()

    def wait_for(pages: list[int]) -> Wait:
        def wait() -> None:
            done.append(f"there {pages}, acked before {len(bench.engine._acks)}")

        return wait

    bench.device.wait = wait_for
    bench.device.gate.clear()
    loads = [bench.move(MoveKind.LOAD_BACK, page, 4 + page, page) for page in range(NUM_SLOTS)]
    bench.engine.submit(loads)
    bench.device.gate.set()
    assert bench.engine.wait_idle(20)
    acks = bench.engine.take_acks()
    assert [(ack.ticket, ack.ok) for ack in acks] == [(load.ticket, True) for load in loads]
    first, second = [4, 5, 6, 7], [8, 9, 10, 11]
    assert done == [
        f"write {first}",
        f"write {second}",
        f"there {first}, acked before 0",
        f"there {second}, acked before 4",
    ]
    counters = bench.engine.counters()
    assert counters["load_back_pages"] == NUM_SLOTS and counters["load_back_lost"] == 0


def test_a_write_back_begins_when_the_loads_before_it_have_arrived(make: Make) -> None:
    """Whoever waits for those loads does not wait for it too."""
    bench = make()
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))
    done = bench.device.done
    done.clear()
    bench.device.wait = lambda pages: lambda: done.append("there")
    bench.device.gate.clear()
    bench.engine.submit([bench.move(MoveKind.LOAD_BACK, 0, 10, 0)])
    bench.engine.submit([bench.move(MoveKind.WRITE_BACK, 3, 3, 3)])
    bench.device.gate.set()
    assert set(bench.acks(2).values()) == {True}
    assert done == ["write [10]", "there", "read [3]"]


def test_loads_that_fail_on_their_way_are_lost_and_the_next_are_not(make: Make) -> None:
    bench = make()
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))

    def fail() -> None:
        raise RuntimeError("an illegal address was encountered")

    bench.device.wait = lambda pages: fail
    lost = bench.move(MoveKind.LOAD_BACK, 0, 9, 0)
    assert bench.run(lost) == {lost.ticket: False}
    bench.device.wait = lambda pages: None
    found = bench.move(MoveKind.LOAD_BACK, 0, 9, 0)
    assert bench.run(found) == {found.ticket: True}


def test_a_slow_store_lets_ends_of_prefixes_go_and_nothing_waits_for_it(make: Make) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    for page in range(NUM_SLOTS):
        bench.run(bench.move(MoveKind.WRITE_BACK, page, page, page))
    gate, is_in = threading.Event(), threading.Event()

    def wait() -> None:
        is_in.set()
        gate.wait(60)

    store.before_call = wait
    bench.engine.submit([bench.move(MoveKind.STORE, 0, -1, 0)])
    assert is_in.wait(60)
    moves = [bench.move(MoveKind.STORE, page, -1, page) for page in range(1, NUM_SLOTS)]
    bench.engine.submit(moves)
    # Half of L2 may wait; the rest gave way at once: the end of the prefix, not its head.
    dropped = bench.acks(3)
    assert dropped == {move.ticket: False for move in moves[4:]}
    # Loads and write-backs go on beside it.
    assert set(bench.run(bench.move(MoveKind.LOAD_BACK, 3, 9, 3)).values()) == {True}
    gate.set()
    assert set(bench.acks(5).values()) == {True}
    assert list(store.objects) == [bench.pool.key(name_of(page)) for page in range(5)]


def test_copies_can_be_waited_for_while_a_store_hangs(make: Make) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))
    gate = threading.Event()
    store.before_call = lambda: gate.wait(20) and None
    bench.device.gate.clear()
    bench.engine.submit([bench.move(MoveKind.STORE, 0, -1, 0)])
    load = bench.move(MoveKind.LOAD_BACK, 0, 9, 0)
    bench.engine.submit([load])
    assert not bench.engine.wait_copied(0.0)
    bench.device.gate.set()
    assert bench.engine.wait_copied(20)
    assert bench.acks(1) == {load.ticket: True} and not bench.engine.wait_idle(0.0)
    gate.set()
    assert bench.engine.wait_idle(20)


@pytest.mark.parametrize("fault", ["refuses", "damaged"])
def test_what_waits_behind_a_page_that_was_not_stored_gives_way(make: Make, fault: str) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    for page in range(NUM_SLOTS):
        bench.run(bench.move(MoveKind.WRITE_BACK, page, page, page))
    gate, is_in = threading.Event(), threading.Event()

    def wait() -> None:
        is_in.set()
        gate.wait(60)

    store.before_call = wait
    if fault == "refuses":
        store._capacity_bytes = 0
    else:
        bench.pool.slot(1)[700] ^= 1
    bench.engine.submit([bench.move(MoveKind.STORE, page, -1, page) for page in (0, 1)])
    assert is_in.wait(60)
    behind = [bench.move(MoveKind.STORE, page, -1, page) for page in (2, 3)]
    other = bench.move(MoveKind.STORE, 6, -1, 6)  # page 5 is not known to be missing
    bench.engine.submit([*behind, other])
    gate.set()
    acks = bench.acks(5)
    assert [acks[move.ticket] for move in behind] == [False, False]
    assert acks[other.ticket] is (fault == "damaged")
    # Offered again, and taken this time: what follows is stored as well.
    store._capacity_bytes = 1 << 30
    bench.run(bench.move(MoveKind.WRITE_BACK, 1, 1, 1))
    again = [bench.move(MoveKind.STORE, page, -1, page) for page in (3, 2, 1, 0)]
    assert set(bench.run(*again).values()) == {True}
    assert {bench.pool.key(name_of(page)) for page in range(4)} <= set(store.objects)


@pytest.mark.parametrize("fault", ["raises", "refuses", "forgets", "flips", "cuts"])
def test_whatever_a_store_does_the_ack_is_true_of_it(make: Make, fault: str) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    bench.run(*(bench.move(MoveKind.WRITE_BACK, page, page, page) for page in (0, 1)))
    if fault == "raises":

        def fail() -> None:
            raise OSError("no such disk")

        store.before_call = fail
    if fault == "refuses":
        store._capacity_bytes = 0
    is_kept = fault not in ("raises", "refuses")
    puts = bench.run(*(bench.move(MoveKind.STORE, page, -1, page) for page in (0, 1)))
    assert set(puts.values()) == {is_kept}
    first = next(iter(store.objects), "")
    if fault == "forgets":
        del store.objects[first]
    if fault == "flips":
        damaged = bytearray(store.objects[first])
        damaged[500] ^= 8
        store.objects[first] = bytes(damaged)
    if fault == "cuts":
        store.objects[first] = store.objects[first][:-1]
    gets = bench.run(*(bench.move(MoveKind.FETCH, -1, 4 + page, page) for page in (0, 1)))
    assert list(gets.values()) == [False, is_kept]
    assert not bench.pool.is_sound(4, name_of(0))
    assert bench.pool.is_sound(5, name_of(1)) is is_kept


def test_a_probe_answers_even_where_the_store_fails(make: Make) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))
    bench.run(bench.move(MoveKind.STORE, 0, -1, 0))
    answers: list[int] = []
    bench.engine.probe([name_of(0), name_of(1)], answers.append)

    def fail() -> None:
        raise OSError("no such disk")

    assert bench.engine.wait_idle(20)
    store.before_call = fail
    bench.engine.probe([name_of(0)], answers.append)
    assert bench.engine.wait_idle(20)
    assert answers == [1, 0]


class FrankStore(MemoryStore):
    """Knows without looking what it lacks."""

    def surely_lacks(self, key: str) -> bool:
        return key not in self.objects


def test_where_the_store_surely_has_nothing_nobody_waits_for_what_it_is_doing(make: Make) -> None:
    store = FrankStore(LAYOUT)
    bench = make(store)
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))
    bench.run(bench.move(MoveKind.STORE, 0, -1, 0))
    assert bench.engine.wait_idle(20)  # an ack may be taken before its wake
    may_go_on = threading.Event()

    def hang() -> None:
        assert may_go_on.wait(20)

    store.before_call = hang
    answers: list[int] = []
    bench.engine.probe([name_of(0), name_of(1)], answers.append)
    assert answers == []  # it has to be asked, and does not answer
    num_wakes = bench.wakes
    bench.engine.probe([name_of(1), name_of(0)], answers.append)
    assert answers == [0]
    assert bench.wakes == num_wakes + 1
    may_go_on.set()
    assert bench.engine.wait_idle(20)
    assert answers == [0, 1]


def test_closing_acks_what_still_waits_as_lost(make: Make) -> None:
    bench = make()
    bench.device.gate.clear()
    moves = [bench.move(MoveKind.WRITE_BACK, page, page, page) for page in range(7)]
    bench.engine.submit(moves)
    assert bench.device.is_in.wait(60)
    bench.when_woken = bench.device.gate.set  # by the acks of what still waited
    bench.engine.close()
    acks = bench.acks(7)
    assert acks == {move.ticket: at < 4 for at, move in enumerate(moves)}
    late = bench.move(MoveKind.WRITE_BACK, 0, 0, 0)
    assert bench.run(late) == {late.ticket: False}


def test_a_check_reads_every_byte_and_marks_what_is_bad(make: Make) -> None:
    store = MemoryStore(LAYOUT)
    bench = make(store)
    for page in range(3):
        bench.run(bench.move(MoveKind.WRITE_BACK, page, page, page))
        bench.run(bench.move(MoveKind.STORE, page, -1, page))
    slots = [(page, name_of(page)) for page in range(3)]
    assert verify_l2(bench.pool, slots) == Checked(3, 0)
    assert verify_l3(bench.pool, store, [name for _, name in slots]) == Checked(3, 0)
    bench.pool.slot(1)[900] ^= 1
    key = bench.pool.key(name_of(2))
    store.objects[key] = store.objects[key][:-1] + b"?"
    assert verify_l2(bench.pool, [*slots, (5, name_of(5))]) == Checked(3, 1)
    assert verify_l3(bench.pool, store, [name for _, name in slots]) == Checked(3, 1)
