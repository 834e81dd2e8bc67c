# SPDX-License-Identifier: Apache-2.0
"""Mooncake's processes killed, stopped, restarted, full: misses in time, and back by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar
from urllib.error import URLError

import pytest

from appliance.children import MooncakeSettings
from kvtiers.breaker import BreakerLimits, BreakerState, BreakerStore
from kvtiers.mooncake_connection import RENEW_S
from kvtiers.mooncake_endpoints import MooncakeUsage
from kvtiers.mooncake_library import check_answers
from kvtiers.mooncake_store import MooncakeLimits, MooncakeStore
from kvtiers.objects import HEADER_BYTES, object_bytes, seal
from kvtiers.store import StoreState
from tests.fakes import mooncake_writer
from tests.fakes.clock import FakeClock
from tests.fakes.mooncake_processes import HASTY, MooncakeMachine, require_mooncake
from tests.fakes.signals import kill_now, stop_now
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES, blank, chain, page, pages, read

KEYS = chain("a", 8)
MIB = 1 << 20
SOON = BreakerLimits(failures=2, first_pause_s=0.3, max_pause_s=0.6)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMachine]:
    require_mooncake()
    machine = MooncakeMachine(tmp_path_factory.mktemp("mooncake"))
    yield machine
    machine.close()


@pytest.fixture
def guarded(machine: MooncakeMachine) -> Iterator[BreakerStore]:
    store = BreakerStore(machine.open(), LAYOUT, SOON)
    machine.wait(lambda: _is_closed(store))
    yield store
    store.close()


def _is_closed(store: BreakerStore) -> bool:
    return store.state is BreakerState.CLOSED


def _comes_back(machine: MooncakeMachine, store: BreakerStore) -> None:
    """The breaker closes by itself, and what is put then is read."""
    machine.wait(lambda: _is_closed(store) and store.put(KEYS, pages(KEYS)) == [True] * 8)
    assert read(store, KEYS) == [True] * 8


def test_an_owner_killed_is_cut_off_and_comes_back_with_its_master(
    machine: MooncakeMachine, guarded: BreakerStore
) -> None:
    assert guarded.put(KEYS, pages(KEYS)) == [True] * 8
    before = machine.children.pids
    kill_now(before["mooncake_client"])
    read(guarded, KEYS)
    read(guarded, KEYS)
    machine.wait(lambda: guarded.status().state is not StoreState.UP)
    _comes_back(machine, guarded)
    after = machine.children.pids
    assert after["mooncake_client"] != before["mooncake_client"]
    assert after["mooncake_master"] != before["mooncake_master"]
    assert guarded.status().counters["trips"] == 1


def test_a_master_killed_is_restarted_alone(
    machine: MooncakeMachine, guarded: BreakerStore
) -> None:
    before = machine.children.pids
    kill_now(before["mooncake_master"])
    for _ in range(2):
        guarded.put(chain("b", 2), pages(chain("b", 2)))
    _comes_back(machine, guarded)
    after = machine.children.pids
    assert after["mooncake_client"] == before["mooncake_client"]
    assert after["mooncake_master"] != before["mooncake_master"]


@pytest.mark.parametrize("name", ["mooncake_master", "mooncake_client"])
def test_a_process_stopped_costs_misses_until_it_goes_on(
    machine: MooncakeMachine, guarded: BreakerStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded.put(KEYS, pages(KEYS)) == [True] * 8
    monkeypatch.setattr(guarded._store, "_limits", HASTY)
    stop_now(machine.children.pids[name])
    try:
        into = blank(8)
        for _ in range(2):
            assert guarded.get(chain("c", 8), into) == [False] * 8
        assert into == blank(8)
        status = guarded.status()
        assert status.state is not StoreState.UP
        # On a master the library gives up by itself, on an owner only after half a minute.
        assert name == "mooncake_master" or "no answer in" in status.reason
        assert read(guarded, KEYS) == [False] * 8, "cut off: no waiting at all"
    finally:
        os.kill(machine.children.pids[name], signal.SIGCONT)
        monkeypatch.undo()
    _comes_back(machine, guarded)


def test_a_set_up_with_an_owner_that_hangs_stops_nobody(
    machine: MooncakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would hold the interpreter lock for 30 s: another process tries it first."""
    machine.shared()
    soon = partial(check_answers, timeout_s=1)
    monkeypatch.setattr("kvtiers.mooncake_client.check_answers", soon)
    owner = machine.children.pids["mooncake_client"]
    stop_now(owner)
    try:
        store = MooncakeStore(machine.endpoints, LAYOUT, object_bytes(PAGE_BYTES))
        assert store.status().state is StoreState.DOWN
        assert "takes a connection and answers nothing" in store.status().reason
    finally:
        os.kill(owner, signal.SIGCONT)
        monkeypatch.undo()
    machine.wait(lambda: store.probe(["ns/none"]) == 0 and store.status().state is StoreState.UP)
    store.close()


class LostClient:
    """A connection that works, or whose owner has forgotten it: the library never says why."""

    made: ClassVar[list[LostClient]] = []

    def __init__(self, address: str, slot_bytes: int, num_slots: int) -> None:
        self.address = address
        self.is_lost = False
        self.is_closed = False
        self.num_stuck = 0
        self.made.append(self)

    def exist(self, keys: list[str], timeout_s: float) -> list[int]:
        return [-900 if self.is_lost else 0 for _ in keys]

    def close(self) -> None:
        self.is_closed = True


def test_a_connection_that_fails_for_good_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a master that stood still for seconds: the owner kept the client's old memory, and
    refused the same memory ever after, while the library tried again with it."""
    monkeypatch.setattr("kvtiers.mooncake_connection.MooncakeClient", LostClient)
    monkeypatch.setattr(LostClient, "made", [])
    endpoints = tmp_path / "mooncake.json"
    endpoints.write_text('{"owner": "127.0.0.1:1"}')
    clock = FakeClock()
    store = MooncakeStore(endpoints, LAYOUT, object_bytes(PAGE_BYTES), now_s=lambda: clock() / 1000)
    (first,) = LostClient.made
    first.is_lost = True
    assert store.probe(KEYS) == 0
    clock.advance(int(1000 * RENEW_S) - 1)
    store.probe(KEYS)
    assert not first.is_closed, "the library may find its owner again by itself"
    first.is_lost = False
    store.probe(KEYS)
    first.is_lost = True
    store.probe(KEYS)
    clock.advance(int(1000 * RENEW_S) - 1)
    store.probe(KEYS)
    assert not first.is_closed, "it has worked meanwhile"
    clock.advance(1)
    store.probe(KEYS)
    assert [client.is_closed for client in LostClient.made] == [True]
    assert store.status().state is StoreState.DOWN
    store.probe(KEYS)
    assert [client.is_closed for client in LostClient.made] == [True, False]
    assert store.status().state == "up"
    assert store.status().counters["connects"] == 2


def test_a_master_that_answers_too_late_at_times_ends_no_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.mooncake_connection.MooncakeClient", LostClient)
    monkeypatch.setattr(LostClient, "made", [])
    endpoints = tmp_path / "mooncake.json"
    endpoints.write_text('{"owner": "127.0.0.1:1", "metrics": "127.0.0.1:1", "has_disk": true}')
    store = MooncakeStore(endpoints, LAYOUT, object_bytes(PAGE_BYTES))
    late = [TimeoutError("timed out"), URLError(TimeoutError("timed out"))]
    answers: list[MooncakeUsage | OSError] = []

    def read_usage(metrics: str) -> MooncakeUsage:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("kvtiers.mooncake_store.read_usage", read_usage)
    answers[:] = [*late, MooncakeUsage(num_objects=2, num_on_disk=2)]
    assert store.flush(60.0)
    answers[:] = [URLError(ConnectionRefusedError("nobody listens"))]
    assert not store.flush(60.0)
    answers[:] = [late[0]]
    assert not store.flush(0.0)
    assert answers == []


def test_kill_9_of_a_writer_in_mid_write_leaves_what_it_put(machine: MooncakeMachine) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.mooncake_writer", str(machine.endpoints)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "kept\n"
    writer.kill()
    writer.wait()
    store = machine.shared()
    assert read(store, mooncake_writer.KEYS) == [True] * 8
    for number in range(20):
        read(store, chain(f"writer-{number}", 8))  # whatever is there is right
    assert store.status().counters["failures"] == 0


def test_two_writers_of_one_key_leave_one_whole_object(machine: MooncakeMachine) -> None:
    first = machine.shared()
    (key,) = chain("w", 1)
    assert first.put([key], [page(key)]) == [True]
    second = machine.open()
    assert second.status().num_objects >= 1, "what others put counts too"
    assert second.status().used_bytes >= PAGE_BYTES
    assert second.put([key], [page(key, seed=1)]) == [True]
    assert read(first, [key]) == read(second, [key]) == [True]
    second.close()
    first.remove([key])


def test_an_object_of_another_length_under_the_key_is_a_miss(machine: MooncakeMachine) -> None:
    store = machine.shared()
    (key,) = chain("l", 1)
    assert store.put([key], [page(key, 5000)]) == [True]
    assert read(store, [key]) == [False]
    assert store.get([key], blank(1, 4000)) == [False]
    assert read(store, [key], 5000) == [True]
    store.remove([key])


def test_a_full_store_refuses_and_goes_on(machine: MooncakeMachine) -> None:
    """Half as much again as fits, at once: pages refused or evicted, none wrong, no failure."""
    size = MIB - HEADER_BYTES
    store = machine.open(size, MooncakeLimits(ring_bytes=16 * MIB, batch=8))
    prefixes = [chain(f"f{number}", 8) for number in range(6)]
    for keys in prefixes:
        kept = store.put(keys, pages(keys, size))
        assert kept == sorted(kept, reverse=True), "no page behind a refused one"
    hits = [sum(read(store, keys, size)) for keys in prefixes]
    assert 8 <= sum(hits) < 48
    status = store.status()
    assert (status.state, status.counters["failures"]) == (StoreState.UP, 0)
    assert status.used_bytes <= status.capacity_bytes
    for keys in prefixes:
        store.remove(keys)
    store.close()


def test_an_object_larger_than_a_slot_is_refused_not_truncated(machine: MooncakeMachine) -> None:
    store = machine.shared()
    (key,) = chain("big", 1)
    assert store.put([key], [page(key, PAGE_BYTES + 1)]) == [False]
    assert store.get([key], blank(1, PAGE_BYTES + 1)) == [False]


def test_a_store_without_processes_is_down_with_the_reason(tmp_path: Path) -> None:
    require_mooncake()
    endpoints = tmp_path / "mooncake.json"
    store = MooncakeStore(endpoints, LAYOUT, object_bytes(PAGE_BYTES))
    assert (store.status().state, str(endpoints) in store.status().reason) == ("down", True)
    assert store.put(KEYS, pages(KEYS)) == [False] * 8
    assert read(store, KEYS) == [False] * 8
    assert store.probe(KEYS) == store.remove(KEYS) == 0
    assert not store.flush(0.1)
    store.close()
    endpoints.write_text('{"owner": "127.0.0.1:1"}')
    store = MooncakeStore(endpoints, LAYOUT, object_bytes(PAGE_BYTES))
    assert "nobody listens on 127.0.0.1:1" in store.status().reason
    store.close()
    endpoints.write_text("not json")
    store = MooncakeStore(endpoints, LAYOUT, object_bytes(PAGE_BYTES))
    assert store.status().state is StoreState.DOWN
    store.close()


def test_pages_on_the_disk_tier_outlive_kill_9_of_everything(tmp_path: Path) -> None:
    require_mooncake()
    size = 200_000
    settings = MooncakeSettings(
        segment_bytes=64 * MIB, ssd_dir=str(tmp_path / "ssd"), ssd_quota_bytes=256 * MIB
    )
    machine = MooncakeMachine(tmp_path / "run", settings)
    try:
        store = machine.open(size)
        prefixes = [chain(f"d{number}", 10) for number in range(4)]
        for keys in prefixes:
            assert store.put(keys, pages(keys, size)) == [True] * 10
        assert store.flush(60.0)
        for pid in machine.children.pids.values():
            kill_now(pid)
        store.close()
        machine.wait(lambda: len(machine.children.pids) < 2)
        machine.wait(lambda: len(machine.children.pids) == 2)
        again = machine.open(size)
        machine.wait(lambda: again.probe(prefixes[-1]) == 10)
        assert [read(again, keys, size) for keys in prefixes] == [[True] * 10] * 4
    finally:
        machine.close()


def test_a_bit_flipped_in_a_stored_object_is_a_miss_and_then_repaired(
    machine: MooncakeMachine,
) -> None:
    store = machine.shared()
    (key,) = chain("flip", 1)
    blob = page(key)
    blob[HEADER_BYTES + 5] ^= 1  # under a header that still holds: as memory that went bad
    assert store.put([key], [blob]) == [True]
    assert read(store, [key]) == [False]
    assert store.put([key], [page(key)]) == [True]
    assert read(store, [key]) == [True]
    store.remove([key])


def test_an_object_of_another_layout_under_the_key_is_a_miss(machine: MooncakeMachine) -> None:
    store = machine.shared()
    other = MooncakeStore(machine.endpoints, LAYOUT[::-1], object_bytes(PAGE_BYTES))
    (key,) = chain("lay", 1)
    blob = page(key)
    seal(blob, key, LAYOUT[::-1])
    assert other.put([key], [blob]) == [True]
    other.close()
    assert read(store, [key]) == [False]


def test_a_second_machine_reads_through_a_master_that_is_not_its_own(
    machine: MooncakeMachine, tmp_path: Path
) -> None:
    """As two appliances that share a master: what one put, the other resumes from."""
    master = machine.children.master_address
    second = MooncakeMachine(tmp_path, MooncakeSettings(master=master, segment_bytes=16 * MIB))
    try:
        assert set(second.children.pids) == {"mooncake_client"}
        store, other = machine.shared(), second.open()
        keys = chain("shared", 6)
        assert store.put(keys, pages(keys)) == [True] * 6
        assert other.probe(keys) == 6
        assert read(other, keys) == [True] * 6
        assert other.remove(keys) == 6
        assert read(store, keys) == [False] * 6
    finally:
        second.close()
