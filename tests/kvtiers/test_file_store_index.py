# SPDX-License-Identifier: Apache-2.0
"""The order in which pages go: least recently used, and never a head before its tail."""

from __future__ import annotations

import random

from kvtiers.file_store_index import PageIndex
from kvtiers.file_store_segments import Record
from kvtiers.page_order import NO_PARENT
from kvtiers.page_reuse import ReuseHistory


def _record(
    name: str, parent: str = "", *, seq: int = 0, segment: str = "s", at: int = 0
) -> Record:
    follows = parent.encode().ljust(16) if parent else NO_PARENT
    return Record(name.encode().ljust(16), follows, seq, segment, at, 100)


def _order(index: PageIndex) -> list[str]:
    return [record.key_hash.decode().strip() for record in index.in_order()]


def _add(index: PageIndex, *names: tuple[str, str]) -> None:
    for name, parent in names:
        index.add(_record(name, parent))
    index.touch(name.encode().ljust(16) for name, _ in names)


def test_the_tail_of_the_least_recently_used_prefix_goes_first() -> None:
    index = PageIndex()
    _add(index, ("a0", ""), ("a1", "a0"), ("a2", "a1"))
    _add(index, ("b0", ""), ("b1", "b0"))
    assert _order(index) == ["a2", "a1", "a0", "b1", "b0"]
    index.touch([b"a1".ljust(16)])
    assert _order(index) == ["a2", "b1", "b0", "a1", "a0"]


def test_a_turn_that_puts_only_its_new_pages_renews_the_old_ones() -> None:
    index = PageIndex()
    _add(index, ("a0", ""), ("a1", "a0"))
    _add(index, ("b0", ""))
    _add(index, ("a2", "a1"))
    assert _order(index) == ["b0", "a2", "a1", "a0"]


def test_a_shared_head_stays_as_long_as_any_branch() -> None:
    index = PageIndex()
    _add(index, ("head", ""), ("left", "head"))
    _add(index, ("right", "head"))
    assert _order(index) == ["left", "right", "head"]


def test_a_head_that_comes_after_its_tail_stands_behind_it() -> None:
    index = PageIndex()
    _add(index, ("a1", "a0"))
    _add(index, ("b0", ""))
    _add(index, ("a0", ""))
    assert _order(index) == ["a1", "b0", "a0"]


def test_parents_in_a_circle_end_the_walk() -> None:
    index = PageIndex()
    _add(index, ("a", "b"), ("b", "a"), ("c", "c"))
    assert sorted(_order(index)) == ["a", "b", "c"]


def test_random_use_never_leaves_a_page_behind_one_it_follows() -> None:
    rng = random.Random(7)
    for _ in range(40):
        index = PageIndex()
        parents: dict[str, str] = {}
        for step in range(120):
            known = list(parents)
            action = rng.random()
            if action < 0.5 or not known:
                name = f"p{step}"
                parents[name] = rng.choice([*known, ""])
                segment = f"s{rng.randrange(4)}"
                index.add(_record(name, parents[name], seq=step, segment=segment, at=step))
                index.touch([name.encode().ljust(16)])
            elif action < 0.75:
                index.touch(key.encode().ljust(16) for key in rng.sample(known, min(3, len(known))))
            elif action < 0.9:
                oldest = index.oldest()
                assert oldest is not None
                gone = oldest.key_hash.decode().strip()
                assert gone not in {parents[name] for name in known if name != gone}
                assert index.discard(oldest)
                del parents[gone]
            else:  # as a compaction does
                moved = index.find(rng.choice(known).encode().ljust(16))
                assert moved is not None
                name = moved.key_hash.decode().strip()
                index.add(_record(name, parents[name], seq=step, segment="s9", at=step))
            _check(index, parents)
        # A restart reads the records in the order they were written and settles them.
        again = PageIndex()
        for record in sorted(index.in_order(), key=lambda record: record.seq):
            again.add(record)
        again.settle()
        _check(again, parents)


def test_random_loops_with_lost_pages_never_drop_a_head_before_its_tail() -> None:
    rng = random.Random(11)
    num_on_probation = 0
    for _ in range(10):
        index = PageIndex()
        parents: dict[str, str] = {}
        chains = [[f"{c}.{at}" for at in range(4)] for c in range(rng.randrange(6, 20))]
        for step in range(150):
            names = chains[step % len(chains)] if rng.random() < 0.8 else rng.choice(chains)
            keys = [name.encode().ljust(16) for name in names]
            held = [key in index for key in keys]
            index.touch([key for key, is_held in zip(keys, held, strict=True) if is_held])
            in_use = index.touch(keys, proves=False)
            while len(index) + held.count(False) > 20:
                assert index.evict(in_use)
            assert all(key in index for key in in_use)
            for name, parent in zip(names, ["", *names[:-1]], strict=True):
                if name.encode().ljust(16) not in index:
                    index.add(_record(name, parent))
                    parents[name] = parent
            index.touch(keys, proves=False)
            if rng.random() < 0.1:  # a damaged page is found, and put again later
                damaged = index.find(rng.choice(keys))
                assert damaged is not None and index.discard(damaged)
            order = _order(index)
            parents = {name: parents[name] for name in order}
            _check(index, parents)
            num_on_probation += order[-1] not in names
    assert num_on_probation > 100


def _check(index: PageIndex, parents: dict[str, str]) -> None:
    order = _order(index)
    assert sorted(order) == sorted(parents)
    place = {name: at for at, name in enumerate(order)}
    for name, parent in parents.items():
        if parent in place:
            assert place[name] < place[parent]
    by_segment: dict[str, int] = {}
    for record in index.in_order():
        by_segment[record.segment] = by_segment.get(record.segment, 0) + record.num_bytes
    assert index.live_by_segment == by_segment
    assert index.live_bytes == sum(by_segment.values())


def test_a_record_is_forgotten_only_while_it_is_the_one_held() -> None:
    index = PageIndex()
    old, new = _record("a", segment="s1"), _record("a", segment="s2")
    index.add(old)
    index.add(new)
    assert not index.discard(old)
    assert index.records_of("s1") == []
    assert index.discard_segment("s2") == 1
    assert len(index) == 0 and index.live_by_segment == {}


def test_late_uses_must_outweigh_the_others_by_half() -> None:
    """As L1's and L2's history does (tests/csrc/reuse_test.cpp)."""
    reuse = ReuseHistory()
    for _ in range(20):
        reuse.note(100, 100)
    for _ in range(60):  # half of what is used so late could be served: 30
        reuse.note(200, 100)
    assert not reuse.is_looping(100)
    reuse.note(200, 100)
    assert reuse.is_looping(100)
