# SPDX-License-Identifier: Apache-2.0
"""Of a prefix the tail goes before the head, in Mooncake too: real processes, filled beyond their
memory. What is there is asked of the library, key by key."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from appliance.children import MooncakeSettings
from kvtiers.mooncake_endpoints import MooncakeUsage, list_keys, read_usage
from kvtiers.mooncake_store import MooncakeStore
from kvtiers.objects import object_bytes
from kvtiers.store import StoreState
from tests.fakes.mooncake_processes import LIMITS, MooncakeMachine, require_mooncake
from tests.fakes.stored_pages import LAYOUT, chain, pages, read

MIB = 1 << 20
SIZE = 200_000
SETTINGS = MooncakeSettings(segment_bytes=32 * MIB)  # 134 pages at 0.8 of it


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMachine]:
    require_mooncake()
    machine = MooncakeMachine(tmp_path_factory.mktemp("mooncake"), SETTINGS)
    yield machine
    machine.close()


@pytest.fixture
def machine(processes: MooncakeMachine) -> Iterator[MooncakeMachine]:
    """Empty, and with no page evicted by its master so far."""
    before = usage_of(processes).num_evicted
    yield processes
    usage = usage_of(processes)
    assert usage.num_evicted == before, "its master evicted pages"
    assert usage.memory_bytes <= 0.8 * usage.memory_capacity
    emptied = processes.shared()
    emptied.remove(sorted(list_keys(metrics_of(processes))))


def metrics_of(machine: MooncakeMachine) -> str:
    address: str = json.loads(machine.endpoints.read_text())["metrics"]
    return address


def usage_of(machine: MooncakeMachine) -> MooncakeUsage:
    return read_usage(metrics_of(machine))


def grow(store: MooncakeStore, session: list[str], keys: Sequence[str]) -> None:
    """Put the next pages of a prefix; `session` learns of those that were taken."""
    parents = [session[-1] if session else "", *keys[:-1]]
    kept = store.put(keys, pages(keys, SIZE), parents)
    assert kept == sorted(kept, reverse=True), "a page behind one that was refused"
    session += [key for key, is_kept in zip(keys, kept, strict=True) if is_kept]


def heads_of(machine: MooncakeMachine, sessions: Sequence[Sequence[str]]) -> list[int]:
    """How many pages of each there are, and all of them at its head; asked of Mooncake itself."""
    present = list_keys(metrics_of(machine))
    heads = []
    for keys in sessions:
        are_there = [key in present for key in keys]
        heads.append(sum(are_there))
        assert all(are_there[: heads[-1]]), "".join("x" if there else "." for there in are_there)
    return heads


def check_every_key(store: MooncakeStore, sessions: Sequence[Sequence[str]]) -> None:
    """The same by a question for each key, and each page read."""
    for keys in sessions:
        are_there = [store.probe([key]) == 1 for key in keys]
        assert are_there == sorted(are_there, reverse=True)
        assert read(store, keys, SIZE) == are_there


def test_of_the_session_at_the_border_the_head_is_kept(machine: MooncakeMachine) -> None:
    store = machine.open(SIZE)
    sessions: list[list[str]] = [[] for _ in range(12)]
    for number, session in enumerate(sessions):
        keys = chain(f"s{number}", 30)
        for start in range(0, 30, 10):
            grow(store, session, keys[start : start + 10])
            heads_of(machine, sessions)
    heads = heads_of(machine, sessions)
    assert [len(session) for session in sessions] == [30] * 12, "none was refused"
    assert heads == sorted(heads), "those used last are kept"
    assert heads[-3:] == [30] * 3
    assert 120 <= sum(heads) <= 134
    check_every_key(store, sessions)
    status = store.status()
    assert (status.state, status.counters["failures"]) == (StoreState.UP, 0)
    assert status.counters["evicted"] == 360 - sum(heads)
    assert status.counters["orphaned"] == 0
    assert status.used_bytes <= status.capacity_bytes == int(0.8 * 32 * MIB)
    assert status.num_objects == sum(heads)


def test_sessions_that_grow_in_turn_and_are_read_keep_their_heads(machine: MooncakeMachine) -> None:
    store = machine.open(SIZE)
    rng = random.Random(3)
    system = chain("system", 3)
    assert store.put(system, pages(system, SIZE)) == [True] * 3
    sessions = [list(system) for _ in range(16)]
    hot = sessions[0]
    grow(store, hot, chain("hot", 6))
    for turn in range(90):
        assert all(read(store, hot, SIZE)), "what is read all the time stays"
        session = rng.choice(sessions[1:])
        present = heads_of(machine, [session])[0]
        del session[present:]
        if rng.random() < 0.3:
            assert all(read(store, session, SIZE))
        grow(store, session, [f"ns/{turn}/{at}" for at in range(rng.randint(1, 6))])
        assert heads_of(machine, [system]) == [3], "the head that all share"
        heads_of(machine, sessions)
    check_every_key(store, sessions)
    assert store.status().counters["evicted"] > 80


def test_an_engine_that_comes_back_finds_the_order_in_the_pages(machine: MooncakeMachine) -> None:
    """All that the one before it knew is gone, its objects are not."""
    sessions: list[list[str]] = []
    for life in range(2):
        store = machine.open(SIZE)
        for number in range(6):
            sessions.append([])
            grow(store, sessions[-1], chain(f"s{life}/{number}", 14))
        for session in sessions[-8:-6]:  # of the life before
            present = heads_of(machine, [session])[0]
            if present == 14:
                grow(store, session, [f"{session[0]}/more/{at}" for at in range(5)])
        heads = heads_of(machine, sessions)
        assert heads[-6:] == [14] * 6
        store.close()
    assert sum(heads_of(machine, sessions)) <= 134
    again = machine.open(SIZE)
    check_every_key(again, sessions)
    assert again.status().num_objects == sum(heads_of(machine, sessions)), "nothing leaks"


def test_two_engines_keep_the_order_of_each_others_pages(machine: MooncakeMachine) -> None:
    """Sessions move between them: what one put, the other goes on with, or lets go."""
    engines = [machine.open(SIZE), machine.open(SIZE)]
    rng = random.Random(8)
    sessions: list[list[str]] = [[] for _ in range(10)]
    for turn in range(80):
        engine = rng.choice(engines)
        session = rng.choice(sessions)
        del session[heads_of(machine, [session])[0] :]
        grow(engine, session, [f"ns/{turn}/{at}" for at in range(rng.randint(1, 8))])
        heads_of(machine, sessions)
    for engine in engines:
        check_every_key(engine, sessions)
        assert engine.status().counters["evicted"] > 10


def test_what_follows_a_page_that_somebody_dropped_goes_too(machine: MooncakeMachine) -> None:
    store, other = machine.open(SIZE), machine.open(SIZE)
    sessions: list[list[str]] = [[] for _ in range(6)]
    for number, session in enumerate(sessions):
        grow(store, session, chain(f"s{number}", 20))
    assert other.remove(sessions[4][3:5]) == 2
    more: list[str] = []
    grow(store, more, chain("more", 30))
    heads = heads_of(machine, [*sessions, more])
    assert heads[4:] == [3, 20, 30]
    assert store.status().counters["orphaned"] == 15
    check_every_key(store, [*sessions, more])


@pytest.mark.parametrize("metrics", ["", "127.0.0.1:1"])
def test_an_engine_that_cannot_ask_the_master_orders_its_own_pages(
    machine: MooncakeMachine, tmp_path: Path, metrics: str
) -> None:
    told = json.loads(machine.endpoints.read_text())
    endpoints = tmp_path / "mooncake.json"
    endpoints.write_text(json.dumps(told | {"metrics": metrics}))
    store = MooncakeStore(endpoints, LAYOUT, object_bytes(SIZE), LIMITS)
    try:
        machine.wait(lambda: store.probe(["ns/none"]) == 0 and not store.status().reason)
        sessions: list[list[str]] = [[] for _ in range(8)]
        for number, session in enumerate(sessions):
            for start in range(0, 30, 10):
                grow(store, session, chain(f"s{number}", 30)[start : start + 10])
        heads = heads_of(machine, sessions)
        assert 120 <= sum(heads) <= 134
        check_every_key(store, sessions)
    finally:
        store.close()


def test_objects_of_other_software_are_left_alone(machine: MooncakeMachine) -> None:
    store = machine.open(SIZE)
    client = store._connection.client
    assert client is not None
    names = [f"theirs/{number}" for number in range(40)]
    for name in names:
        assert client._handle.put(name, name.encode() * 20_000) == 0
    sessions: list[list[str]] = [[] for _ in range(8)]
    for number, session in enumerate(sessions):
        grow(store, session, chain(f"s{number}", 20))
    heads = heads_of(machine, sessions)
    assert heads[-1] == 20 and sum(heads) < 110
    assert client.exist(names, 5.0) == [1] * 40


def test_where_others_have_taken_all_pages_are_refused_from_one_on(
    machine: MooncakeMachine,
) -> None:
    store = machine.open(SIZE)
    client = store._connection.client
    assert client is not None
    (first,) = chain("first", 1)
    assert store.put([first], pages([first], SIZE)) == [True]
    for number in range(24):  # of 25.6 MiB
        assert client._handle.put(f"theirs/{number}", bytes(MIB)) == 0
    store = machine.open(SIZE)
    keys = chain("s", 20)
    kept = store.put(keys, pages(keys, SIZE))
    assert 0 < sum(kept) < 20
    assert kept == sorted(kept, reverse=True)
    assert heads_of(machine, [keys]) == [sum(kept)]
    assert store.put(keys[12:], pages(keys[12:], SIZE), keys[11:-1]) == [False] * 8
    status = store.status()
    assert (status.state, status.counters["failures"]) == (StoreState.UP, 0)
