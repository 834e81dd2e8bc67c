# SPDX-License-Identifier: Apache-2.0
"""The file store: what it keeps, what it lets go, what it finds again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtiers.file_store import FileStore
from kvtiers.file_store_segments import ALIGN_BYTES, record_bytes
from kvtiers.objects import object_bytes
from kvtiers.store import StoreState
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES, blank, chain, page, pages, read

QUOTA = 4 << 20
RECORD = record_bytes(object_bytes(PAGE_BYTES))
Open = Callable[..., FileStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    opened: list[FileStore] = []

    def open_(quota_bytes: int = QUOTA) -> FileStore:
        opened.append(FileStore(tmp_path / "l3", quota_bytes, LAYOUT))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def _fill(store: FileStore, num_chains: int, length: int = 8, start: int = 0) -> list[list[str]]:
    chains = [chain(f"c{number}", length) for number in range(start, start + num_chains)]
    for keys in chains:
        assert store.put(keys, pages(keys)) == [True] * length, store.status()
    return chains


def _leading(hits: list[bool]) -> int:
    return (hits + [False]).index(False)


def test_pages_are_there_after_a_restart(open_store: Open) -> None:
    store = open_store()
    chains = _fill(store, 6)
    store.close()
    again = open_store()
    assert again.status().num_objects == 48
    for keys in chains:
        assert read(again, keys) == [True] * 8


def test_it_knows_at_once_what_it_lacks_once_it_is_open(open_store: Open, tmp_path: Path) -> None:
    here, gone, never = chain("c0", 2)[0], chain("c1", 1)[0], chain("c2", 1)[0]
    store = FileStore(tmp_path / "late", QUOTA, LAYOUT, opens_now=False)
    assert not store.surely_lacks(never)  # it has not looked at its directory
    store.close()
    store = open_store()
    store.put([here, gone], pages([here, gone]), ["", ""])
    store.remove([gone])
    assert [store.surely_lacks(key) for key in (here, gone, never)] == [False, True, True]
    store.close()
    assert not store.surely_lacks(here)


@pytest.mark.parametrize("harm", ["missing", "torn", "flipped", "older", "empty"])
def test_a_bad_snapshot_costs_a_scan_and_no_page(
    open_store: Open, tmp_path: Path, harm: str
) -> None:
    snapshot = tmp_path / "l3" / "index"
    store = open_store()
    first = _fill(store, 3)
    assert store.flush(10)
    old = snapshot.read_bytes()
    chains = [*first, *_fill(store, 3, start=3)]
    assert store.remove(first[0]) == 8
    store.close()
    raw = bytearray(snapshot.read_bytes())
    if harm == "missing":
        snapshot.unlink()
    elif harm == "flipped":
        raw[len(raw) // 2] ^= 16
        snapshot.write_bytes(raw)
    else:
        snapshot.write_bytes({"torn": bytes(raw[:-100]), "older": old, "empty": b""}[harm])
    again = open_store()
    for keys in chains[1:]:
        assert read(again, keys) == [True] * 8
    assert read(again, first[0]) == [False] * 8


def test_the_order_of_use_outlives_a_restart(open_store: Open) -> None:
    store = open_store()
    chains = _fill(store, 10)
    assert read(store, chains[0]) == [True] * 8
    store.close()
    again = open_store()
    _fill(again, 11, start=100)
    assert again.status().counters["evicted"] > 8
    assert read(again, chains[0]) == [True] * 8
    assert read(again, chains[1])[-1] is False


def test_the_files_never_take_more_than_the_quota(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    rng = random.Random(3)
    kept: list[list[str]] = []
    for number in range(150):
        kept += _fill(store, 1, rng.randint(1, 9), start=number)
        if rng.random() < 0.5:
            read(store, rng.choice(kept))
        files = sum(path.stat().st_size for path in (tmp_path / "l3").glob("*.pages"))
        assert files == store.status().used_bytes <= QUOTA
    status = store.status()
    assert status.counters["evicted"] > 300
    # What is kept is worth the space: well over half of the quota, and little was copied for it.
    assert status.num_objects * RECORD > 0.6 * QUOTA
    assert status.counters["compacted_bytes"] < 1.5 * status.counters["puts"] * RECORD


def test_what_is_left_of_a_prefix_is_always_its_head(open_store: Open) -> None:
    store = open_store()
    rng = random.Random(5)
    system = chain("system", 2)
    store.put(system, pages(system))
    sessions: dict[int, list[str]] = {}
    for turn in range(200):
        number = rng.randrange(14)
        keys = sessions.get(number, system)
        keys = keys[: store.probe(keys)]
        new = [f"ns/s{number}/{turn}/{at}" for at in range(rng.randint(1, 4))]
        # A turn puts its new pages alone: it says which page each of them follows.
        store.put(new, pages(new), [keys[-1], *new[:-1]])
        sessions[number] = [*keys, *new]
        for held in sessions.values():
            present = [store.probe([key]) == 1 for key in held]
            assert not any(present[_leading(present) :]), f"turn {turn}: {present}"
        assert store.probe(system) == 2, "the head that all sessions share went before a tail"
    assert store.status().counters["evicted"] > 100
    assert store.status().counters["compacted_bytes"] > 0


def test_a_loop_larger_than_the_quota_finds_its_share_and_whole_heads(open_store: Open) -> None:
    """Sessions take turns: each reads what is there and puts the rest, as an engine does."""
    store = open_store()
    fitting = int(QUOTA * 0.72) // (8 * RECORD)
    chains = [chain(f"loop{number}", 8) for number in range(3 * fitting)]
    found = asked = 0
    for lap in range(6):
        for keys in chains:
            hits = read(store, keys)
            num_found = _leading(hits)
            assert not any(hits[num_found:])
            for at in range(num_found, 8, 4):
                some = keys[at : at + 4]
                before = keys[at - 1] if at else ""
                assert all(store.put(some, pages(some), [before, *some[:-1]]))
            if lap >= 3:
                found, asked = found + num_found, asked + 8
    assert found / asked > 0.25  # 1/3 at best; the least recently used order finds none


def test_what_fits_is_found_as_before_after_a_loop_ended(open_store: Open) -> None:
    store = open_store()
    fitting = int(QUOTA * 0.72) // (8 * RECORD)
    loop = [chain(f"loop{number}", 8) for number in range(2 * fitting)]
    live = [chain(f"live{number}", 8) for number in range(fitting // 2)]
    for keys in [*loop, *loop, *loop]:
        read(store, keys)
        store.put(keys, pages(keys))
    for lap in range(4):
        for keys in live:
            hits = read(store, keys)
            assert lap == 0 or hits == [True] * 8
            store.put(keys, pages(keys))


def test_a_page_larger_than_the_store_is_refused_and_hurts_nothing(open_store: Open) -> None:
    store = open_store()
    (keys,) = _fill(store, 1)
    big = QUOTA
    assert store.put(["ns/big"], [page("ns/big", big)]) == [False]
    assert read(store, keys) == [True] * 8
    assert store.status().state is StoreState.UP
    assert store.status().counters["refused_puts"] == 1


@pytest.mark.parametrize("quota_bytes", [1, ALIGN_BYTES, RECORD, 2 * RECORD, 5 * RECORD])
def test_a_quota_of_a_few_pages_works_or_refuses(open_store: Open, quota_bytes: int) -> None:
    store = open_store(quota_bytes)
    for number in range(6):
        keys = chain(f"c{number}", 2)
        kept = store.put(keys, pages(keys))
        assert store.status().used_bytes <= quota_bytes
        assert read(store, keys)[0] <= kept[0]
    assert (store.status().num_objects > 0) == (quota_bytes >= 2 * RECORD)


def test_a_smaller_quota_after_a_restart_is_kept_at_once(open_store: Open) -> None:
    store = open_store()
    chains = _fill(store, 12)
    store.close()
    again = open_store(QUOTA // 4)
    assert again.status().used_bytes <= QUOTA // 4
    assert read(again, chains[-1]) == [True] * 8
    assert read(again, chains[0]) == [False] * 8


def test_removed_pages_stay_away_after_a_restart_without_a_snapshot(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store()
    (keys,) = _fill(store, 1)
    assert store.remove(keys[2:5]) == 3
    store.close()
    (tmp_path / "l3" / "index").unlink()
    again = open_store()
    assert read(again, keys) == [True, True, False, False, False, True, True, True]


def test_a_removed_page_that_an_old_snapshot_remembers_is_a_miss(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store()
    (keys,) = _fill(store, 1)
    assert store.flush(10)
    old = (tmp_path / "l3" / "index").read_bytes()
    assert store.remove(keys[:1]) == 1
    store.close()
    (tmp_path / "l3" / "index").write_bytes(old)
    assert read(open_store(), keys) == [False] + [True] * 7


def test_a_page_of_another_length_reads_as_nothing_and_stays(open_store: Open) -> None:
    store = open_store()
    (keys,) = _fill(store, 1)
    assert store.get(keys[:1], blank(1, 10)) == [False]
    assert read(store, keys) == [True] * 8


def test_reads_stay_right_while_segments_are_compacted_under_them(open_store: Open) -> None:
    store = open_store(2 << 20)
    hot = chain("hot", 20)
    for at, key in enumerate(hot):  # beside pages that go: their segments get compacted
        store.put([key], [page(key)], hot[at - 1 : at] or [""])
        _fill(store, 1, 2, start=1000 + at)
    is_over = threading.Event()
    lost: list[list[bool]] = []
    num_reads = [0, 0]

    def read_on(reader: int) -> None:
        while not is_over.is_set():
            hits = read(store, hot)
            if not all(hits):
                lost.append(hits)
            num_reads[reader] += 1

    readers = [threading.Thread(target=read_on, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    for number in range(60):
        _fill(store, 1, 3, start=number)
        seen = list(num_reads)  # a reading that begins from here on keeps the pages in use
        while any(now < before + 2 for now, before in zip(num_reads, seen, strict=True)):
            assert all(reader.is_alive() for reader in readers)
            time.sleep(0.001)
    is_over.set()
    for reader in readers:
        reader.join()
    assert lost == []
    assert store.status().counters["compacted_bytes"] > 6 * RECORD
    assert store.status().counters["failures"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_use_with_restarts_agrees_with_a_dictionary(open_store: Open, seed: int) -> None:
    """Nothing is damaged and all fits: what was put and not removed is there, to the byte."""
    rng = random.Random(seed)
    store = open_store(16 << 20)
    held: set[str] = set()
    names = [f"ns/r/{number}" for number in range(60)]
    for _ in range(150):
        some = rng.sample(names, rng.randint(1, 6))
        action = rng.random()
        if action < 0.45:
            parents = [rng.choice(["", *names]) for _ in some]
            assert store.put(some, pages(some), parents) == [True] * len(some)
            held |= set(some)
        elif action < 0.75:
            assert read(store, some) == [key in held for key in some]
            assert store.probe(some) == _leading([key in held for key in some])
        elif action < 0.85:
            assert store.remove(some) == len(held & set(some))
            held -= set(some)
        elif action < 0.92:
            assert store.flush(10)
        else:
            store.close()
            store = open_store(16 << 20)
            assert store.status().num_objects == len(held)
    assert read(store, names) == [key in held for key in names]
