# SPDX-License-Identifier: Apache-2.0
"""Breaker and deadlines around a store: a bad store costs its callers nothing but misses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtiers.breaker import BreakerLimits, BreakerState, BreakerStore
from kvtiers.deadline_store import CHUNK_BYTES, Deadlines, DeadlineStore
from kvtiers.errors import StoreCallError
from kvtiers.store import StoreState, resolve_parents
from tests.fakes.memory_store import MemoryStore
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES, blank, chain, page, pages, read

KEYS = chain("a", 4)
SOON = BreakerLimits(failures=2, first_pause_s=0.02, max_pause_s=0.05)
LATER = BreakerLimits(failures=2, first_pause_s=600.0)
SHORT = Deadlines(probe_s=0.1, call_s=0.1, bytes_per_s=1e12, close_s=0.1)
LONG = Deadlines(probe_s=60.0, call_s=60.0)  # of calls that are to be answered


class Gate:
    """Holds calls of a store back while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self.num_waiting = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        with self._lock:
            self.num_waiting += 1
        assert self._open.wait(20)
        with self._lock:
            self.num_waiting -= 1


class FollowedStore(MemoryStore):
    """Remembers which page each page was said to follow."""

    def __init__(self, layout_fingerprint: str) -> None:
        super().__init__(layout_fingerprint)
        self.follows: dict[str, str] = {}

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        self.follows |= dict(zip(keys, resolve_parents(keys, parents), strict=True))
        return super().put(keys, blobs, parents)


@pytest.fixture
def inner() -> MemoryStore:
    store = MemoryStore(LAYOUT)
    store.put(KEYS, pages(KEYS))
    return store


@pytest.fixture
def gate(inner: MemoryStore) -> Iterator[Gate]:
    gate = Gate()
    inner.before_call = gate
    yield gate
    gate.open()


def _wait(until: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if until():
            return
        pause.wait(0.01)
    pytest.fail("it did not happen in a minute")


def _num_overrun(store: DeadlineStore) -> int:
    return store.status().counters["failures"]


def _is_closed(store: BreakerStore) -> bool:
    return store.state is BreakerState.CLOSED


def _fail(store: MemoryStore) -> Callable[[], None]:
    def count() -> None:
        store.counters["failures"] += 1

    return count


def test_failures_in_a_row_cut_the_store_off_and_a_trial_brings_it_back(inner: MemoryStore) -> None:
    store = BreakerStore(inner, LAYOUT, SOON)
    inner.before_call = _fail(inner)
    read(store, KEYS)
    assert _is_closed(store)
    read(store, KEYS)
    assert not _is_closed(store)
    status = store.status()
    assert status.state is not StoreState.UP
    assert status.reason == "2 calls in a row failed"
    assert read(store, KEYS) == [False] * 4
    assert store.probe(KEYS) == 0
    assert store.put(KEYS, pages(KEYS)) == [False] * 4
    assert store.remove(KEYS) == 0
    assert not store.flush(1)
    _wait(lambda: store.status().counters["trials"] >= 2)
    assert not _is_closed(store), "a failed trial does not close it"
    inner.before_call = lambda: None
    _wait(lambda: _is_closed(store))
    assert read(store, KEYS) == [True] * 4
    counters = store.status().counters
    assert (counters["trips"], counters["cut_off_calls"]) == (1, 5)
    assert set(inner.objects) == set(KEYS), "a trial leaves nothing behind"
    store.close()


def test_one_that_opens_while_a_trial_closes_it_says_why(inner: MemoryStore) -> None:
    failing: list[threading.Thread] = []

    class Contended(BreakerStore):
        """At the moment it is closed, another thread finds the store down."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if value is BreakerState.CLOSED and hasattr(self, "_counters"):
                inner.state, inner.reason = StoreState.DOWN, "it burns"
                failing.append(threading.Thread(target=read, args=(self, KEYS), daemon=True))
                failing[-1].start()
                failing[-1].join(0.5)  # it may have to wait until the trial is over

    inner.state, inner.reason = StoreState.DOWN, "no such device"
    store = Contended(inner, LAYOUT, SOON)
    inner.state, inner.reason = StoreState.UP, ""
    _wait(lambda: len(failing) == 1)
    failing[0].join(20)
    assert not _is_closed(store)
    assert store.status().reason == "it burns"
    store.close()


def test_a_success_between_failures_keeps_it_closed(inner: MemoryStore) -> None:
    store = BreakerStore(inner, LAYOUT, LATER)
    for _ in range(5):
        inner.before_call = _fail(inner)
        read(store, KEYS)
        inner.before_call = lambda: None
        read(store, KEYS)
    assert _is_closed(store)


def test_misses_and_refused_puts_are_no_failures() -> None:
    store = BreakerStore(MemoryStore(LAYOUT, capacity_bytes=10), LAYOUT, LATER)
    for _ in range(5):
        assert read(store, KEYS) == [False] * 4
        assert store.put(KEYS, pages(KEYS)) == [False] * 4
    assert _is_closed(store)


def test_a_full_store_passes_its_trial_and_one_that_loses_puts_does_not(inner: MemoryStore) -> None:
    full = MemoryStore(LAYOUT, capacity_bytes=10)
    full.state = StoreState.DOWN
    store = BreakerStore(full, LAYOUT, SOON)
    full.state = StoreState.UP
    _wait(lambda: _is_closed(store))
    store.close()
    losing = MemoryStore(LAYOUT)
    losing.state = StoreState.DOWN
    losing.before_call = losing.objects.clear
    store = BreakerStore(losing, LAYOUT, SOON)
    losing.state = StoreState.UP
    _wait(lambda: store.status().counters["trials"] >= 3)
    assert not _is_closed(store)
    store.close()


def test_a_store_that_is_down_from_the_start_is_cut_off_with_its_reason() -> None:
    inner = MemoryStore(LAYOUT)
    inner.state, inner.reason = StoreState.DOWN, "no such device"
    store = BreakerStore(inner, LAYOUT, SOON)
    assert store.status().state is not StoreState.UP
    assert store.status().reason == "no such device"
    inner.state = StoreState.UP
    _wait(lambda: _is_closed(store))
    assert store.put(KEYS, pages(KEYS)) == [True] * 4
    store.close()


def test_a_hung_store_is_cut_off_and_used_again_when_it_wakes(
    inner: MemoryStore, gate: Gate
) -> None:
    guarded = DeadlineStore(inner, SHORT)
    store = BreakerStore(guarded, LAYOUT, SOON)
    gate.shut()
    assert read(store, KEYS) == [False] * 4
    _wait(lambda: not _is_closed(store))
    assert "no answer" in store.status().reason or "hang" in store.status().reason
    _wait(lambda: store.status().counters["trials"] >= 4)
    assert gate.num_waiting <= 2, "trials do not pile up in a hung store"
    guarded._deadlines = LONG
    gate.open()
    _wait(lambda: _is_closed(store))
    assert read(store, KEYS) == [True] * 4
    store.close()


@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, CHUNK_BYTES // 2])
def test_a_read_that_comes_late_writes_into_nobodys_page(
    inner: MemoryStore, gate: Gate, num_bytes: int
) -> None:
    store = DeadlineStore(inner, LONG)
    keys = chain("late", 4)
    store.put(keys, pages(keys, num_bytes))
    store = DeadlineStore(inner, SHORT)
    gate.shut()
    into = blank(4, num_bytes)
    assert store.get(keys, into) == [False] * 4
    assert _num_overrun(store) == 1, "what is behind a chunk that hangs is not tried"
    _wait(lambda: gate.num_waiting == 1)  # its thread may begin later than its deadline
    gate.open()
    _wait(lambda: store.status().state is StoreState.UP)
    assert into == blank(4, num_bytes)
    assert read(DeadlineStore(inner, LONG), keys, num_bytes) == [True] * 4


@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, CHUNK_BYTES // 2])
def test_a_put_that_comes_late_stores_what_it_was_given(
    inner: MemoryStore, gate: Gate, num_bytes: int
) -> None:
    store = DeadlineStore(inner, SHORT)
    keys = chain("late", 4)
    slots = pages(keys, num_bytes)
    gate.shut()
    assert store.put(keys, slots) == [False] * 4
    assert _num_overrun(store) == 1, "what is behind a chunk that hangs is not tried"
    _wait(lambda: gate.num_waiting == 1)
    for slot in slots:  # the slots belong to other pages by now
        slot[:] = page("another", num_bytes)
    gate.open()
    _wait(lambda: store.status().state is StoreState.UP)
    stored = [key for key in keys if key in inner.objects]
    assert stored and all(inner.objects[key] == page(key, num_bytes) for key in stored)


def test_puts_larger_than_a_chunk_are_kept_whole_and_follow_each_other() -> None:
    num_bytes = CHUNK_BYTES // 3
    inner = FollowedStore(LAYOUT)
    store = DeadlineStore(inner, LONG)
    branch = [*KEYS[:2], *chain("b", 2)]
    assert store.put(KEYS, pages(KEYS, num_bytes)) == [True] * 4
    assert store.put(branch, pages(branch, num_bytes), ["", *branch[:3]]) == [True] * 4
    assert read(store, [*KEYS, *branch], num_bytes) == [True] * 8
    before = {KEYS[at]: KEYS[at - 1] if at else "" for at in range(4)}
    before |= {branch[at]: branch[at - 1] if at else "" for at in range(4)}
    assert inner.follows == before
    with pytest.raises(StoreCallError, match="parents = '1 for 4 keys'"):
        store.put(KEYS, pages(KEYS), [""])


def test_no_more_than_two_calls_hang_at_once(inner: MemoryStore, gate: Gate) -> None:
    store = DeadlineStore(inner, SHORT)
    gate.shut()
    for _ in range(6):
        assert store.probe(KEYS) == 0
    _wait(lambda: gate.num_waiting >= 2)
    assert gate.num_waiting == 2
    status = store.status()
    assert (status.state, status.reason) == (StoreState.DOWN, "2 calls hang")
    assert status.counters["failures"] == 6
    store.close()


def test_a_store_that_is_cut_off_surely_lacks_everything(inner: MemoryStore) -> None:
    inner.put(KEYS, pages(KEYS))
    store = BreakerStore(inner, LAYOUT, LATER)
    assert not store.surely_lacks(KEYS[0])
    inner.state = StoreState.DOWN
    assert store.probe(KEYS) == 0
    assert store.state is BreakerState.OPEN
    assert store.surely_lacks(KEYS[0])
    store.close()


def test_a_call_of_any_kind_may_hang(inner: MemoryStore, gate: Gate) -> None:
    calls: list[Callable[[DeadlineStore], object]] = [
        lambda store: store.put(KEYS, pages(KEYS)) == [False] * 4,
        lambda store: store.remove(KEYS) == 0,
        lambda store: store.flush(0.05) is False,
        lambda store: store.probe(KEYS) == 0,
    ]
    for call in calls:
        store = DeadlineStore(inner, SHORT)
        gate.shut()
        assert call(store)
        assert store.status().counters["failures"] == 1
        gate.open()
        _wait(lambda: gate.num_waiting == 0)


def test_reads_larger_than_a_chunk_come_back_whole() -> None:
    num_bytes = CHUNK_BYTES // 3
    inner = MemoryStore(LAYOUT)
    inner.put(KEYS, pages(KEYS, num_bytes))
    store = DeadlineStore(inner, LONG)
    assert read(store, [*KEYS, "ns/none"], num_bytes) == [True] * 4 + [False]


def test_a_caller_of_a_cut_off_store_makes_no_call(inner: MemoryStore, gate: Gate) -> None:
    store = BreakerStore(DeadlineStore(inner, SHORT), LAYOUT, LATER)
    gate.shut()
    read(store, KEYS)
    _wait(lambda: gate.num_waiting == 1)
    for _ in range(20):
        assert read(store, KEYS) == [False] * 4
    assert gate.num_waiting == 1
