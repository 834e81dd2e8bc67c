# SPDX-License-Identifier: Apache-2.0
"""What every L3 store must do. Subclass `KvStoreContract` with a `make_store` fixture."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest

from kvtiers.errors import StoreCallError
from kvtiers.objects import HEADER_BYTES, seal
from kvtiers.store import COUNTERS, Store, StoreState
from tests.fakes.stored_pages import (
    OTHER_LAYOUT,
    PAGE_BYTES,
    blank,
    chain,
    page,
    pages,
    read,
)

MakeStore = Callable[[], Store]
ALL_KEYS = [*chain("a", 12), "ns/never/put"]  # a store that outlives a test is emptied of these


class KvStoreContract:
    """The suite. `make_store` opens an empty store for pages of `stored_pages.LAYOUT`, with room
    for all that is put; `make_small_store` one for 50 to 150 pages of `small_page_bytes`."""

    small_page_bytes: ClassVar[int] = PAGE_BYTES

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Store:
        return make_store()

    def test_what_was_put_is_read_back_byte_for_byte(self, store: Store) -> None:
        keys = chain("a", 5)
        assert store.put(keys, pages(keys)) == [True] * 5
        assert read(store, keys) == [True] * 5
        assert read(store, keys[::-1]) == [True] * 5

    def test_what_was_never_put_is_a_miss(self, store: Store) -> None:
        keys = chain("a", 3)
        assert store.put(keys[1:2], pages(keys[1:2])) == [True]
        assert read(store, keys) == [False, True, False]
        assert store.status().counters["failures"] == 0

    def test_a_probe_counts_the_leading_run_alone(self, store: Store) -> None:
        keys = chain("a", 6)
        assert store.probe(keys) == 0
        store.put(keys[:3], pages(keys[:3]))
        store.put(keys[4:], pages(keys[4:]), keys[3:5])
        assert store.probe(keys) == 3
        assert store.probe(keys[4:]) == 2
        assert store.probe([]) == 0

    def test_a_probe_finds_nothing_of_what_is_surely_lacking(self, store: Store) -> None:
        keys = chain("a", 4)
        store.put(keys[:2], pages(keys[:2]))
        assert not any(map(store.surely_lacks, keys[:2]))
        for gone in ([], keys[1:2], keys[:1]):
            store.remove(gone)
            lacking = [key for key in keys if store.surely_lacks(key)]
            assert [store.probe([key]) for key in lacking] == [0] * len(lacking)

    def test_empty_calls_answer_nothing(self, store: Store) -> None:
        assert store.put([], []) == []
        assert store.get([], []) == []
        assert store.remove([]) == 0

    def test_a_key_twice_in_one_put_is_kept_once(self, store: Store) -> None:
        a, b = chain("a", 2)
        assert store.put([a, b, a], pages([a, b, a]), ["", a, ""]) == [True] * 3
        assert read(store, [a, b]) == [True] * 2

    def test_a_key_twice_in_one_get_fills_both_buffers(self, store: Store) -> None:
        a, b = chain("a", 2)
        store.put([a, b], pages([a, b]))
        assert read(store, [a, b, a, a]) == [True] * 4

    def test_an_object_that_is_there_stays_as_it_is(self, store: Store) -> None:
        (key,) = chain("a", 1)
        assert store.put([key], [page(key)]) == [True]
        assert store.put([key], [page(key, seed=1)]) == [True]
        assert read(store, [key]) == [True]

    def test_a_buffer_of_another_length_is_a_miss(self, store: Store) -> None:
        (key,) = chain("a", 1)
        store.put([key], [page(key)])
        for num_bytes in (PAGE_BYTES - 1, PAGE_BYTES + 1):
            assert store.get([key], blank(1, num_bytes)) == [False]
        assert read(store, [key]) == [True]

    def test_objects_of_several_lengths_live_side_by_side(self, store: Store) -> None:
        keys = chain("a", 3)
        sizes = (1, 4096, 15_000)
        blobs = [page(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert store.put(keys, blobs) == [True] * 3
        into = [memoryview(bytearray(len(blob))) for blob in blobs]
        assert store.get(keys, into) == [True] * 3
        assert into == blobs

    def test_an_object_under_another_name_or_layout_is_not_kept(self, store: Store) -> None:
        a, b = chain("a", 2)
        foreign = page(b)
        seal(foreign, b, OTHER_LAYOUT)
        assert store.put([b], [page(a)]) == [False]
        assert store.put([b], [foreign]) == [False]
        assert read(store, [b]) == [False]

    def test_an_object_damaged_before_it_came_is_never_read(self, store: Store) -> None:
        (key,) = chain("a", 1)
        blob = page(key)
        blob[HEADER_BYTES + 77] ^= 4
        store.put([key], [blob])
        assert read(store, [key]) == [False]

    def test_a_damaged_object_found_by_a_read_makes_room_for_a_good_one(self, store: Store) -> None:
        (key,) = chain("a", 1)
        blob = page(key)
        blob[-1] ^= 1
        store.put([key], [blob])
        assert read(store, [key]) == [False]
        assert store.put([key], [page(key)]) == [True]
        assert read(store, [key]) == [True]

    def test_removed_objects_are_gone_and_counted(self, store: Store) -> None:
        keys = chain("a", 3)
        store.put(keys, pages(keys))
        assert store.remove([keys[1], keys[1], "ns/never/put"]) == 1
        assert read(store, keys) == [True, False, True]
        assert store.probe(keys) == 1
        assert store.put(keys[1:2], pages(keys[1:2]), keys[:1]) == [True]
        assert read(store, keys) == [True] * 3

    def test_callers_mistakes_are_raised(self, store: Store) -> None:
        a, b = chain("a", 2)
        with pytest.raises(StoreCallError, match="1 for 2 keys"):
            store.put([a, b], [page(a)])
        with pytest.raises(StoreCallError, match="parents"):
            store.put([a], [page(a)], ["", a])
        with pytest.raises(StoreCallError, match="1 for 2 keys"):
            store.get([a, b], blank(1))
        with pytest.raises(StoreCallError, match="read-only"):
            store.get([a], [memoryview(bytes(1000))])

    def test_a_healthy_store_says_so_with_its_figures(self, store: Store) -> None:
        keys = chain("a", 4)
        before = store.status().counters
        store.put(keys, pages(keys))
        read(store, [*keys, "ns/never/put"])
        status = store.status()
        risen = {name: count - before[name] for name, count in status.counters.items()}
        assert (status.state, status.reason, status.kind) == (StoreState.UP, "", store.kind)
        assert 4 * PAGE_BYTES < status.used_bytes <= status.capacity_bytes
        assert status.num_objects == 4
        assert set(COUNTERS) <= set(status.counters)
        assert (risen["puts"], risen["refused_puts"]) == (4, 0)
        assert (risen["hits"], risen["misses"]) == (4, 1)
        assert risen["failures"] == 0

    def test_flush_says_when_what_was_put_is_as_safe_as_it_gets(self, store: Store) -> None:
        keys = chain("a", 2)
        store.put(keys, pages(keys))
        assert store.flush(10.0)
        assert read(store, keys) == [True] * 2

    def test_heads_are_never_dropped_before_tails(self, make_small_store: MakeStore) -> None:
        """Sessions that share a head, grow in turn and are read, in a store too small for them."""
        store, size = make_small_store(), self.small_page_bytes
        rng = random.Random(5)
        sessions: dict[int, list[str]] = {number: chain("system", 2) for number in range(14)}
        assert store.put(sessions[0], pages(sessions[0], size)) == [True] * 2
        for turn in range(150):
            number = rng.randrange(14)
            keys = sessions[number]
            keys = keys[: store.probe(keys)]
            if rng.random() < 0.3:
                assert read(store, keys, size) == [True] * len(keys)
            # A turn puts its new pages alone: it says which page each of them follows.
            new = [f"ns/s{number}/{turn}/{at}" for at in range(rng.randint(1, 4))]
            kept = store.put(new, pages(new, size), [keys[-1], *new[:-1]])
            assert kept == sorted(kept, reverse=True), "a page behind one that was refused"
            sessions[number] = [*keys, *new[: sum(kept)]]
            if turn % 10 == 9:
                for held in sessions.values():
                    are_there = [store.probe([key]) == 1 for key in held]
                    assert are_there == sorted(are_there, reverse=True), f"turn {turn}"
                    assert are_there[:2] == [True] * 2, "the head that all share"
        status = store.status()
        assert (status.state, status.counters["failures"]) == (StoreState.UP, 0)
        assert status.counters.get("evicted", 0) + status.counters["refused_puts"] > 100

    def test_what_follows_a_page_that_had_no_room_is_not_kept_either(
        self, make_small_store: MakeStore
    ) -> None:
        store, size = make_small_store(), self.small_page_bytes
        keys = chain("long", 200)
        kept: list[bool] = []
        for start in range(0, 200, 20):
            some = keys[start : start + 20]
            before = keys[start - 1] if start else ""
            kept += store.put(some, pages(some, size), [before, *some[:-1]])
        assert 50 <= sum(kept) <= 150
        assert kept == sorted(kept, reverse=True)
        assert read(store, keys, size) == kept

    def test_a_closed_store_answers_no_and_says_why(self, store: Store) -> None:
        keys = chain("a", 2)
        store.put(keys, pages(keys))
        store.close()
        store.close()
        assert store.probe(keys) == 0
        assert store.put(keys, pages(keys)) == [False] * 2
        assert store.get(keys, blank(2)) == [False] * 2
        assert store.remove(keys) == 0
        assert not store.flush(1.0)
        status = store.status()
        assert (status.state, status.reason) == (StoreState.DOWN, "closed")

    def test_threads_that_put_and_read_the_same_keys_agree(self, store: Store) -> None:
        keys = chain("a", 12)
        blobs = pages(keys)
        wrong: list[str] = []

        def work(start: int) -> None:
            for step in range(12):
                at = (start + step) % 12
                # A head each: behind a page that is known to be absent none is taken.
                if store.put([keys[at]], [blobs[at]], [""]) != [True]:
                    wrong.append(f"put {at}")
                for key, is_hit in zip(keys, read(store, keys), strict=True):
                    if key == keys[at] and not is_hit:
                        wrong.append(f"lost {at}")

        threads = [threading.Thread(target=work, args=(3 * start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        assert read(store, keys) == [True] * 12
