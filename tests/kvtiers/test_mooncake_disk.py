# SPDX-License-Identifier: Apache-2.0
"""Mooncake over what an operating system does to it: damaged and missing files, a full disk, a
clock that jumps. Misses at most, and never a page of others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.children import MooncakeSettings
from kvtiers.mooncake_endpoints import list_keys
from kvtiers.mooncake_store import MooncakeStore
from kvtiers.objects import HEADER_BYTES
from kvtiers.store import StoreState
from tests.fakes.full_disk import FullDisk
from tests.fakes.jumping_clock import JumpingClock
from tests.fakes.mooncake_processes import MooncakeMachine, require_mooncake
from tests.fakes.signals import kill_now
from tests.fakes.stored_pages import chain, page, pages, read

MIB = 1 << 20
SIZE = 200_000


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# Of an object: its file, and the sidecar that says what is in it.
HARMS: dict[str, Callable[[Path, Path], object]] = {
    "a bit flipped": lambda data, sidecar: flip(data, data.stat().st_size // 2),
    "cut short": lambda data, sidecar: halve(data),
    "emptied": lambda data, sidecar: os.truncate(data, 0),
    "gone": lambda data, sidecar: data.unlink(),
    "sidecar gone": lambda data, sidecar: sidecar.unlink(),
    "sidecar cut short": lambda data, sidecar: halve(sidecar),
    "sidecar of zeros": lambda data, sidecar: sidecar.write_bytes(bytes(sidecar.stat().st_size)),
}


def machine_with_disk(folder: Path) -> MooncakeMachine:
    require_mooncake()
    settings = MooncakeSettings(
        segment_bytes=64 * MIB, ssd_dir=str(folder / "ssd"), ssd_quota_bytes=256 * MIB
    )
    return MooncakeMachine(folder / "run", settings)


def file_of(folder: Path, key: str) -> Path:
    """The one file with the bytes of this page."""
    body = bytes(page(key, SIZE)[HEADER_BYTES:])
    (found,) = [path for path in folder.rglob("*.bucket") if body in path.read_bytes()]
    return found


def test_a_damaged_file_costs_its_own_page_alone_and_is_repaired(tmp_path: Path) -> None:
    """kill -9 of everything between: what is read comes from the files."""
    machine = machine_with_disk(tmp_path)
    try:
        store = machine.open(SIZE)
        prefixes = {harm: chain(f"harm{at}", 6) for at, harm in enumerate(HARMS)}
        for keys in prefixes.values():
            assert store.put(keys, pages(keys, SIZE)) == [True] * 6
        assert store.flush(60.0)
        for pid in machine.children.pids.values():
            kill_now(pid)
        store.close()
        for harm, keys in prefixes.items():
            data = file_of(tmp_path / "ssd", keys[3])
            HARMS[harm](data, data.with_suffix(".meta"))
        (tmp_path / "ssd" / "1234.bucket").write_bytes(b"not Moorage's")
        machine.wait(lambda: len(machine.children.pids) < 2)
        machine.wait(lambda: len(machine.children.pids) == 2)
        again = machine.open(SIZE)
        for keys in prefixes.values():
            machine.wait(lambda head=keys[:1]: again.probe(head) == 1)  # type: ignore[misc]
        for harm, keys in prefixes.items():
            assert read(again, keys, SIZE) == [True] * 3 + [False] + [True] * 2, harm
        assert again.status().state is StoreState.UP
        assert again.status().counters["failures"] == 0
        for harm, keys in prefixes.items():
            assert again.put(keys, pages(keys, SIZE)) == [True] * 6
            assert read(again, keys, SIZE) == [True] * 6, harm
    finally:
        machine.close()


def test_a_full_disk_below_it_costs_what_was_to_go_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(tmp_path, tmp_path / "ssd")
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(disk.shim))
        machine = machine_with_disk(tmp_path)
    try:
        store = machine.open(SIZE)
        kept, lost, later = (chain(name, 6) for name in ("kept", "lost", "later"))
        assert store.put(kept, pages(kept, SIZE)) == [True] * 6
        assert store.flush(60.0)
        disk.fill()
        assert store.put(lost, pages(lost, SIZE)) == [True] * 6, "there is room in memory"
        assert not store.flush(3.0), "and it does not say that they are on the disk"
        assert read(store, [*kept, *lost], SIZE) == [True] * 12
        disk.make_room()
        assert store.put(later, pages(later, SIZE)) == [True] * 6
        machine.wait(lambda: len(list((tmp_path / "ssd").rglob("*.bucket"))) >= 12)
        assert machine.children.restarts == {"mooncake_master": 0, "mooncake_client": 0}
        for pid in machine.children.pids.values():
            kill_now(pid)
        machine.wait(lambda: len(machine.children.pids) < 2)
        machine.wait(lambda: len(machine.children.pids) == 2)
        again = machine.open(SIZE)
        machine.wait(lambda: again.probe(later) == 6)
        assert read(again, [*kept, *later], SIZE) == [True] * 12
        read(again, lost, SIZE)  # whatever is there is right
    finally:
        machine.close()


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases, times to live and the order of use are not counted by the wall clock."""
    clock = JumpingClock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(clock.shim))
        machine = machine_with_disk(tmp_path)
    try:
        store = machine.open(SIZE)
        all_keys: list[str] = []
        for jump_s in (0, 86_400, -172_800, 400 * 86_400, 3):
            clock.jump_to(jump_s)
            keys = chain(f"at{jump_s}", 4)
            assert store.put(keys, pages(keys, SIZE)) == [True] * 4
            all_keys += keys
            assert store.flush(60.0)
            assert read(store, all_keys, SIZE) == [True] * len(all_keys)
        status = store.status()
        assert (status.state, status.counters["failures"]) == (StoreState.UP, 0)
        assert machine.children.restarts == {"mooncake_master": 0, "mooncake_client": 0}
    finally:
        machine.close()


def test_on_disk_heads_stay_as_well_and_what_comes_back_after_a_restart_is_put_in_order(
    tmp_path: Path,
) -> None:
    """Twice the quota goes through it. Removing a page leaves its file, so those of pages that
    were evicted come back when all is started again: they are known by what they say."""
    require_mooncake()
    size = 400_000
    settings = MooncakeSettings(
        segment_bytes=32 * MIB, ssd_dir=str(tmp_path / "ssd"), ssd_quota_bytes=32 * MIB
    )
    machine = MooncakeMachine(tmp_path / "run", settings)
    prefixes: list[list[str]] = []

    def put_more(store: MooncakeStore, count: int) -> None:
        for _ in range(count):
            keys = chain(f"p{len(prefixes)}", 8)
            kept = store.put(keys, pages(keys, size))
            prefixes.append(keys[: sum(kept)])

    def all_heads(store: MooncakeStore) -> int:
        num_pages = 0
        for keys in prefixes:
            are_there = [store.probe([key]) == 1 for key in keys]
            assert are_there == sorted(are_there, reverse=True)
            num_pages += sum(are_there)
        return num_pages

    try:
        store = machine.open(size)
        for _ in range(4):
            put_more(store, 5)
            assert store.flush(60.0)
            all_heads(store)
        assert 40 <= all_heads(store) <= 58, "seven tenths of the quota are 58 pages"
        assert store.status().counters["evicted"] >= 100
        metrics = json.loads(machine.endpoints.read_text())["metrics"]
        known = list_keys(metrics)
        for pid in machine.children.pids.values():
            kill_now(pid)
        store.close()
        machine.wait(lambda: len(machine.children.pids) < 2)
        machine.wait(lambda: len(machine.children.pids) == 2)
        again = machine.open(size)
        metrics = json.loads(machine.endpoints.read_text())["metrics"]
        num_files = len(list((tmp_path / "ssd").rglob("*.bucket")))
        machine.wait(lambda: len(list_keys(metrics)) == num_files)
        assert list_keys(metrics) - known, "evicted, and there again"
        put_more(again, 3)
        assert [len(keys) for keys in prefixes[-3:]] == [8] * 3
        assert 40 <= all_heads(again) <= 58
        assert again.status().num_objects == len(list_keys(metrics)), "all is known"
        for keys in prefixes[-3:]:
            assert read(again, keys, size) == [True] * 8
        assert again.status().counters["failures"] == 0
    finally:
        machine.close()
