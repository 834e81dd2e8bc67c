# SPDX-License-Identifier: Apache-2.0
"""What happens to a file store, and what its answers are then: a miss, never a wrong byte."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.file_store import FileStore
from kvtiers.file_store_segments import RECORD_HEADER_BYTES
from kvtiers.objects import HEADER_BYTES
from kvtiers.store import StoreState
from tests.fakes.page_writer import CHAIN_LEN
from tests.fakes.stored_pages import LAYOUT, blank, chain, page, pages, read

_ROOT = Path(__file__).resolve().parents[2]
QUOTA = 32 << 20
KEYS = chain("a", 8)
Open = Callable[..., FileStore]


class Clock:
    """Seconds that jump when a test says so."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "l3"


@pytest.fixture
def open_store(directory: Path, clock: Clock) -> Iterator[Open]:
    opened: list[FileStore] = []

    def open_(quota_bytes: int = QUOTA) -> FileStore:
        opened.append(FileStore(directory, quota_bytes, LAYOUT, now_s=clock))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> FileStore:
    opened = open_store()
    assert opened.put(KEYS, pages(KEYS)) == [True] * 8
    return opened


def _segment(directory: Path) -> Path:
    (path,) = directory.glob("*.pages")
    return path


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@contextlib.contextmanager
def _files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond; Python ignores SIGXFSZ, so writes fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_flipped_bit_anywhere_in_an_object_is_a_miss(
    store: FileStore, directory: Path, open_store: Open
) -> None:
    # The third record of 20,480 bytes: its record header does not matter to a read, the rest does.
    start = 2 * 20_480 + RECORD_HEADER_BYTES
    for offset in (0, 30, 44, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 19_999):
        _flip(_segment(directory), start + offset)
        assert read(store, KEYS) == [True, True, False, True, True, True, True, True]
        assert store.status().counters["bad_reads"] == 1
        assert store.put(KEYS[2:3], pages(KEYS[2:3]), KEYS[1:2]) == [True], "it can be put again"
        assert read(store, KEYS) == [True] * 8
        store.close()
        for path in directory.iterdir():
            path.unlink()
        store = open_store()
        store.put(KEYS, pages(KEYS))


def test_a_damaged_record_header_costs_that_record_alone(
    store: FileStore, directory: Path, open_store: Open
) -> None:
    store.close()
    (directory / "index").unlink()
    _flip(_segment(directory), 2 * 20_480 + 9)
    again = open_store()
    assert read(again, KEYS) == [True, True, False, True, True, True, True, True]


def test_an_object_cut_short_is_a_miss(store: FileStore, directory: Path) -> None:
    os.truncate(_segment(directory), 5 * 20_480 + 9000)
    assert read(store, KEYS) == [True] * 5 + [False] * 3
    assert store.put(KEYS[5:], pages(KEYS[5:]), KEYS[4:7]) == [True] * 3
    assert read(store, KEYS) == [True] * 8


def test_a_torn_tail_is_cut_off_at_start(
    store: FileStore, directory: Path, open_store: Open
) -> None:
    store.close()
    (directory / "index").unlink()
    os.truncate(_segment(directory), 7 * 20_480 + 9000)
    again = open_store()
    assert again.status().num_objects == 7
    assert _segment(directory).stat().st_size == 7 * 20_480 == again.status().used_bytes
    assert read(again, KEYS) == [True] * 7 + [False]


def test_segments_deleted_under_it_are_misses_and_it_writes_on(
    store: FileStore, directory: Path
) -> None:
    _segment(directory).unlink()
    assert read(store, KEYS) == [False] * 8
    assert store.status().num_objects == 0
    assert store.put(KEYS, pages(KEYS)) == [True] * 8
    assert read(store, KEYS) == [True] * 8


def test_a_deleted_directory_is_made_again(store: FileStore, directory: Path) -> None:
    shutil.rmtree(directory)
    assert read(store, KEYS) == [False] * 8
    assert store.put(KEYS, pages(KEYS)) == [False] * 8
    assert store.status().state is StoreState.DOWN
    assert store.put(KEYS, pages(KEYS)) == [True] * 8
    assert read(store, KEYS) == [True] * 8


def test_foreign_files_in_the_directory_are_left_alone(directory: Path, open_store: Open) -> None:
    directory.mkdir()
    (directory / "README").write_text("mine")
    (directory / "garbage.pages").write_bytes(random.Random(1).randbytes(50_000))
    (directory / "index").write_text("no index")
    store = open_store()
    assert store.put(KEYS, pages(KEYS)) == [True] * 8
    assert read(store, KEYS) == [True] * 8
    assert (directory / "README").read_text() == "mine"


def test_a_full_disk_degrades_writes_alone_and_is_left_again(
    store: FileStore, clock: Clock
) -> None:
    more = chain("b", 8)
    with _files_end_at(8 * 20_480 + 30_000):
        assert store.put(more, pages(more)) == [True] + [False] * 7
        status = store.status()
        assert status.state is StoreState.DEGRADED
        assert status.reason == "cannot write: File too large"
        assert status.counters["failures"] == 1, "it does not try again for every page"
        assert read(store, KEYS) == [True] * 8
    assert store.put(more, pages(more)) == [True] + [False] * 7, "nor in the same second"
    clock.at_s += 1.0
    assert store.put(more, pages(more)) == [True] * 8
    assert store.status().state is StoreState.UP
    assert read(store, [*KEYS, *more]) == [True] * 16


def test_a_disk_that_is_full_from_the_start_keeps_nothing_and_piles_up_nothing(
    directory: Path, open_store: Open, clock: Clock
) -> None:
    store = open_store()
    with _files_end_at(4096):
        for _ in range(5):
            clock.at_s += 1.0
            assert store.put(KEYS, pages(KEYS)) == [False] * 8
        assert not store.flush(5) or store.status().num_objects == 0
    assert store.status().used_bytes == 0
    assert len(list(directory.glob("*.pages"))) == 1


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_directory_that_cannot_be_is_a_store_that_is_down(
    tmp_path: Path, place: str, clock: Clock
) -> None:
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" if place == "a file" else tmp_path / "file" / "l3"
    store = FileStore(directory, QUOTA, LAYOUT, now_s=clock)
    assert store.status().state is StoreState.DOWN
    assert str(tmp_path / "file") in store.status().reason
    assert store.put(KEYS, pages(KEYS)) == [False] * 8
    assert store.get(KEYS, blank(8)) == [False] * 8
    (tmp_path / "file").unlink()
    clock.at_s += 1.0
    assert store.put(KEYS, pages(KEYS)) == [True] * 8
    store.close()


def test_a_second_owner_is_down_until_the_first_is_gone(
    store: FileStore, open_store: Open, directory: Path, clock: Clock
) -> None:
    second = open_store()
    status = second.status()
    assert status.state is StoreState.DOWN
    assert status.reason == f"another process owns {directory}"
    assert second.put(KEYS, pages(KEYS)) == [False] * 8
    assert read(second, KEYS) == [False] * 8
    store.close()
    clock.at_s += 1.0
    assert read(second, KEYS) == [True] * 8
    assert second.status().state is StoreState.UP


def test_a_clock_that_jumps_changes_no_answer(
    store: FileStore, clock: Clock, open_store: Open
) -> None:
    for jump_s in (86_400.0, -172_800.0, 3.0):
        clock.at_s += jump_s
        assert read(store, KEYS) == [True] * 8
        keys = chain(f"at{jump_s}", 2)
        assert store.put(keys, pages(keys)) == [True] * 2
    store.close()
    assert read(open_store(), KEYS) == [True] * 8


def test_a_read_that_hangs_is_left_behind_and_writes_into_nobodys_page(
    store: FileStore, directory: Path
) -> None:
    path = _segment(directory)
    whole = path.read_bytes()
    path.unlink()
    os.mkfifo(path)  # opening it waits until somebody writes
    guarded = DeadlineStore(store, Deadlines(call_s=0.1))
    into = blank(8)
    assert guarded.get(KEYS, into) == [False] * 8
    status = guarded.status()
    assert (status.state, status.counters["failures"]) == (StoreState.DOWN, 1)
    assert "no answer in 0.1 s" in status.reason
    # the reader wakes, finds no segment in the pipe and may have closed it before the bytes arrive
    with contextlib.suppress(BrokenPipeError), path.open("wb") as pipe:
        pipe.write(whole[:1000])
    path.unlink()
    for _ in range(6000):
        if guarded.status().state is StoreState.UP:
            break
        threading.Event().wait(0.01)
    assert into == blank(8)
    guarded._deadlines = Deadlines(call_s=60.0)
    assert guarded.put(KEYS, pages(KEYS)) == [True] * 8


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_between_restarts_gives_misses_and_never_a_wrong_byte(
    directory: Path, open_store: Open, seed: int
) -> None:
    rng = random.Random(seed)
    names = [f"ns/d/{number}" for number in range(40)]
    num_found = 0
    for _ in range(12):
        store = open_store(4 << 20)
        num_found += sum(read(store, names))
        some = rng.sample(names, 15)
        assert store.put(some, pages(some)) == [True] * 15
        assert read(store, some) == [True] * 15
        store.close()
        for _ in range(rng.randint(1, 4)):
            path = rng.choice([path for path in directory.iterdir() if path.name != "lock"])
            size = path.stat().st_size
            harm = rng.random()
            if harm < 0.6 and size:
                _flip(path, rng.randrange(size))
            elif harm < 0.8:
                os.truncate(path, rng.randrange(size + 1))
            elif harm < 0.9:
                path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(9000)))
            else:
                path.unlink()
                break
    assert num_found > 100


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_in_mid_write_loses_nothing_that_was_flushed(
    directory: Path, open_store: Open, seed: int
) -> None:
    num_flushed, writer = 0, _start_writer(directory)
    assert writer.stdout is not None
    for _ in range(random.Random(seed).randint(2, 12)):
        num_flushed = int(writer.stdout.readline())
    other = open_store()
    assert other.status().reason == f"another process owns {directory}"
    other.close()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    if seed == 3:
        (directory / "index").unlink()
    again = open_store()
    chains = [chain(f"c{number}", CHAIN_LEN) for number in range(num_flushed + 8)]
    found = [sum(read(again, keys)) for keys in chains]
    assert sum(found[:num_flushed]) == num_flushed * CHAIN_LEN
    assert again.put(["ns/new"], [page("ns/new")]) == [True]


def _start_writer(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.page_writer", str(directory), str(QUOTA)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
