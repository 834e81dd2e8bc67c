# SPDX-License-Identifier: Apache-2.0
"""Which pages go from Mooncake, over a store in a dictionary: engines that know nothing of each
other, lists that are old when they come, calls that are not answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvtiers.mooncake_endpoints import MooncakeEndpoints, MooncakeUsage
from kvtiers.mooncake_heads import OTHER_LENGTH
from kvtiers.mooncake_pages import DISK_SHARE, MEMORY_SHARE, SWEEP_S, MooncakePages
from kvtiers.objects import HEADER_BYTES, key_hash, object_bytes, stamp
from kvtiers.page_order import NO_PARENT
from tests.fakes.stored_pages import chain, page

BODY = 1000
SIZE = object_bytes(BODY)
ROOM = 100  # pages within the limit
ENDPOINTS = MooncakeEndpoints(owner="o", metrics="m", capacity_bytes=1)


class FakeMooncake:
    """Objects by key, and what a master says of them."""

    def __init__(self) -> None:
        self.objects: dict[str, memoryview] = {}
        self.num_put = 0
        self.now_s = 0.0
        self.answers = True
        self.call_s = 0.0
        self.while_listing: Callable[[], None] = lambda: None
        self.unreadable: dict[str, int] = {}

    def usage(self, metrics: str) -> MooncakeUsage:
        return MooncakeUsage(
            num_objects=len(self.objects),
            num_put=self.num_put,
            memory_bytes=sum(map(len, self.objects.values())),
            memory_capacity=int(SIZE * ROOM / MEMORY_SHARE) + 1,
        )

    def keys(self, metrics: str) -> set[str]:
        """A key that is put while the list is made may be in it, or not: here the half that comes
        last in the alphabet is listed last."""
        half = sorted(self.objects)[: len(self.objects) // 2]
        listed = set(half)
        last = half[-1] if half else ""
        self.while_listing()
        return listed | {key for key in self.objects if key > last}

    def put(self, key: str, parent: bytes, put_ms: int = 0) -> None:
        if key not in self.objects:
            blob = page(key, BODY)
            stamp(blob, parent, put_ms)
            self.objects[key] = blob
            self.num_put += 1

    def exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys] if self.answers else []

    def remove(self, keys: list[str]) -> list[int]:
        if not self.answers:
            return []
        return [0 if self.objects.pop(key, None) is not None else -704 for key in keys]

    def heads(self, keys: list[str], into: memoryview, *, whole: bool) -> list[int]:
        self.now_s += self.call_s
        codes = []
        for at, key in enumerate(keys[:7]):  # as many as there is room for
            codes.append(self.unreadable.get(key, HEADER_BYTES if key in self.objects else -704))
            if codes[-1] > 0:
                start = at * HEADER_BYTES
                into[start : start + HEADER_BYTES] = self.objects[key][:HEADER_BYTES]
        return codes


class Engine:
    """Puts as the store does."""

    def __init__(self, mooncake: FakeMooncake, endpoints: MooncakeEndpoints = ENDPOINTS) -> None:
        self._mooncake = mooncake
        self.pages = MooncakePages(lambda: mooncake.now_s)
        self.pages.connect(endpoints)

    def put(self, keys: Sequence[str], before: str = "") -> int:
        """A chain behind a page; how many were taken."""
        parents = [key_hash(key) if key else NO_PARENT for key in [before, *keys[:-1]]]
        sizes = [SIZE] * len(keys)
        with self.pages.writing:
            fits = self.pages.make_room(self._mooncake, keys, parents, sizes)
            taken = [key for key in keys if key in fits]
            assert taken == list(keys[: len(taken)])
            for key, parent in zip(taken, parents, strict=False):
                self._mooncake.put(key, parent, int(self._mooncake.now_s * 1000))
            self.pages.add(taken, parents[: len(taken)], sizes[: len(taken)])
        return len(taken)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeMooncake:
    fake = FakeMooncake()
    monkeypatch.setattr("kvtiers.mooncake_pages.read_usage", fake.usage)
    monkeypatch.setattr("kvtiers.mooncake_pages.list_keys", fake.keys)
    monkeypatch.setattr("kvtiers.mooncake_pages._now_ms", lambda: int(fake.now_s * 1000))
    return fake


def orphans(mooncake: FakeMooncake, sessions: Sequence[Sequence[str]]) -> list[str]:
    """Pages that are there without all the pages before them."""
    found: list[str] = []
    for keys in sessions:
        are_there = [key in mooncake.objects for key in keys]
        num_leading = are_there.index(False) if False in are_there else len(keys)
        found += [key for key in keys[num_leading:] if key in mooncake.objects]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_whoever_puts_and_dies_no_page_is_without_its_head(
    mooncake: FakeMooncake, seed: int
) -> None:
    rng = random.Random(seed)
    engines = [Engine(mooncake) for _ in range(3)]
    sessions: list[list[str]] = [[] for _ in range(12)]
    for turn in range(300):
        mooncake.now_s += rng.random() * 3
        at = rng.randrange(3)
        if rng.random() < 0.05:
            engines[at] = Engine(mooncake)
        number = rng.randrange(12)
        session = sessions[number]
        while session and session[-1] not in mooncake.objects:
            session.pop()
        if session and rng.random() < 0.4:
            engines[at].pages.touch(session)
        keys = [f"ns/{number}/{turn:03d}/{place}" for place in range(rng.randint(1, 12))]
        num_taken = engines[at].put(keys, session[-1] if session else "")
        session += keys[:num_taken]
        assert orphans(mooncake, sessions) == [], f"turn {turn}"
        assert len(mooncake.objects) <= ROOM
    assert len(mooncake.objects) > 0.75 * ROOM
    assert sum(engine.pages.num_evicted for engine in engines) > 100
    assert all(engine.pages.num_orphaned == 0 for engine in engines)


@pytest.mark.parametrize("seed", range(4))
def test_what_others_drop_and_calls_that_fail_are_mended_by_the_next_puts(
    mooncake: FakeMooncake, seed: int
) -> None:
    rng = random.Random(seed)
    engines = [Engine(mooncake), Engine(mooncake)]
    sessions = [chain(f"s{number}", 15) for number in range(40)]
    for number, keys in enumerate(sessions):
        mooncake.now_s += 2
        engine = rng.choice(engines)
        mooncake.answers = rng.random() > 0.2
        num_taken = engine.put(keys[:8])
        if num_taken == 8:
            engine.put(keys[8:], keys[7])
        mooncake.answers = True
        for key in rng.sample(sorted(mooncake.objects), min(2, len(mooncake.objects))):
            if rng.random() < 0.5:
                del mooncake.objects[key]
        assert len(mooncake.objects) <= ROOM, number
    mooncake.now_s += 10
    engines[0].put(chain("last", ROOM // 2))
    assert orphans(mooncake, sessions) == []
    assert sum(engine.pages.num_orphaned for engine in engines) > 10


def test_a_chain_that_is_put_while_a_list_is_made_is_not_taken_for_an_orphan(
    mooncake: FakeMooncake,
) -> None:
    one, other = Engine(mooncake), Engine(mooncake)
    for number in range(9):
        one.put(chain(f"m{number}", 10))
    mooncake.now_s += 60
    moved = ["ns/a/head", "ns/z/tail"]  # of which the list has the tail alone

    def put_meanwhile() -> None:
        if moved[0] not in mooncake.objects:
            other.put(moved)

    mooncake.while_listing = put_meanwhile
    assert one.put(chain("more", 20)) == 20
    assert [key in mooncake.objects for key in moved] == [True, True]
    assert one.pages.num_orphaned == 0


def test_nothing_goes_before_all_is_known(mooncake: FakeMooncake) -> None:
    """After a restart: reading what is there takes longer than a put may."""
    Engine(mooncake).put(chain("old", 60))
    Engine(mooncake).put(chain("older", 30))
    mooncake.now_s += 60
    mooncake.call_s = SWEEP_S / 4
    engine = Engine(mooncake)
    keys = chain("new", 30)
    taken = [engine.put(keys)]
    assert taken == [10], "what there is room for"
    assert len(mooncake.objects) == ROOM
    for _ in range(10):
        if taken[-1] == 30:
            break
        taken.append(engine.put(keys))
        assert orphans(mooncake, [chain("old", 60), chain("older", 30), keys]) == []
    assert taken[-1] == 30
    assert len(taken) > 2
    assert engine.pages.num_evicted >= 20


def test_a_removal_that_is_not_answered_makes_no_room_and_loses_no_page(
    mooncake: FakeMooncake,
) -> None:
    engine = Engine(mooncake)
    old = chain("old", 95)
    assert engine.put(old) == 95
    mooncake.answers = False
    new = chain("new", 10)
    assert engine.put(new) == 0
    assert len(mooncake.objects) == 95
    assert engine.pages.num_objects == 95
    mooncake.answers = True
    mooncake.now_s += 60
    assert engine.put(new) == 10
    assert orphans(mooncake, [old, new]) == []
    assert engine.pages.num_objects == len(mooncake.objects)


def test_what_lost_its_head_goes_sooner_or_later(mooncake: FakeMooncake) -> None:
    """Though nothing has to make room, and the first attempt is not answered."""
    engine = Engine(mooncake)
    keys = chain("s", 20)
    engine.put(keys)
    del mooncake.objects[keys[3]]
    engine.pages.note_missing([keys[3]], engine.pages.num_put)
    mooncake.answers = False
    engine.put(["ns/a"])
    assert orphans(mooncake, [keys]) == keys[4:]
    mooncake.answers = True
    mooncake.now_s += 2
    engine.put(["ns/b"])
    assert orphans(mooncake, [keys]) == []
    assert engine.pages.num_orphaned == 16
    assert engine.pages.num_objects == len(mooncake.objects) == 5


def test_an_answer_that_says_nothing_is_not_taken_for_a_page_that_is_gone(
    mooncake: FakeMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(mooncake, MooncakeEndpoints(owner="o", capacity_bytes=100 * SIZE))
    keys = chain("s", 20)
    engine.put(keys)
    engine.pages.note_missing(["ns/never"], engine.pages.num_put)
    del mooncake.objects[keys[10]]
    engine.pages.note_missing([keys[10]], engine.pages.num_put)
    monkeypatch.setattr(
        mooncake, "exist", lambda some: [-703 if key == keys[5] else 1 for key in some]
    )
    engine.put(["ns/a"])
    assert engine.pages.num_orphaned == 9
    assert set(keys[:10]) <= set(mooncake.objects)


def test_an_object_that_is_being_written_or_is_not_ours_is_left_alone(
    mooncake: FakeMooncake,
) -> None:
    Engine(mooncake).put(chain("old", 60))
    mooncake.objects["theirs/1"] = memoryview(bytearray(20 * SIZE))
    mooncake.objects["theirs/large"] = page("theirs/large", BODY)
    mooncake.unreadable["theirs/large"] = OTHER_LENGTH
    mooncake.objects["ns/old/0060"] = page("ns/old/0060", BODY)
    mooncake.unreadable["ns/old/0060"] = -703
    mooncake.now_s += 60
    engine = Engine(mooncake)
    assert engine.put(chain("new", 40)) == 40
    kept = {"theirs/1", "theirs/large", "ns/old/0060"}
    assert kept <= set(mooncake.objects)
    assert orphans(mooncake, [chain("old", 60)]) == []
    assert engine.pages.used_bytes <= engine.pages.limit_bytes


def test_what_was_used_last_by_whomever_is_kept(mooncake: FakeMooncake) -> None:
    one = Engine(mooncake)
    first, second, third = (chain(name, 30) for name in ("first", "second", "third"))
    for keys in (first, second):
        one.put(keys)
        mooncake.now_s += 1
    Engine(mooncake).put(third)
    mooncake.now_s += 1
    one.pages.touch(first)
    mooncake.now_s += 1
    assert one.put(chain("new", 30)) == 30
    there = [sum(key in mooncake.objects for key in keys) for keys in (first, second, third)]
    assert there[0] == 30 and there[2] == 30
    assert 0 < there[1] < 10


def test_without_the_master_an_engine_keeps_to_what_its_machine_lends(
    mooncake: FakeMooncake,
) -> None:
    mooncake_less = MooncakeEndpoints(owner="o", capacity_bytes=int(50 * SIZE / MEMORY_SHARE) + 1)
    engine = Engine(mooncake, mooncake_less)
    sessions = [chain(f"s{number}", 12) for number in range(9)]
    for number, keys in enumerate(sessions):
        mooncake.now_s += 2
        if number == 6:
            del mooncake.objects[sessions[5][4]]
            engine.pages.note_missing([sessions[5][4]], engine.pages.num_put)
        assert engine.put(keys) == 12
        assert len(mooncake.objects) <= 50
        assert orphans(mooncake, sessions) == []
    assert engine.pages.num_orphaned == 7


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_master_that_is_silent_for_a_while_is_not_taken_for_a_small_store(
    mooncake: FakeMooncake, monkeypatch: pytest.MonkeyPatch, has_disk: bool
) -> None:
    """Each machine lends a quarter of what the master has."""
    share = int(ROOM * SIZE / 4)
    told = MooncakeEndpoints(
        owner="o", metrics="m", capacity_bytes=share, disk_bytes=share, has_disk=has_disk
    )
    full = int(ROOM * SIZE / DISK_SHARE) + 1

    def usage(metrics: str) -> MooncakeUsage:
        counted = mooncake.usage(metrics)
        return replace(counted, disk_bytes=counted.memory_bytes, disk_capacity=full)

    def refuse(metrics: str) -> MooncakeUsage:
        raise TimeoutError

    monkeypatch.setattr("kvtiers.mooncake_pages.read_usage", usage)
    old = chain("old", 60)
    Engine(mooncake, told).put(old)
    engine = Engine(mooncake, told)
    assert engine.put(chain("own", 38)) == 38
    mooncake.now_s += 60
    assert engine.put(chain("more", 6)) == 6  # for which all that is there had to be known
    num_before, num_evicted = len(mooncake.objects), engine.pages.num_evicted
    monkeypatch.setattr("kvtiers.mooncake_pages.read_usage", refuse)
    mooncake.now_s += 60
    assert engine.put(["ns/one"]) == 1
    assert engine.pages.num_evicted == num_evicted
    assert len(mooncake.objects) == num_before + 1
    assert engine.put(chain("new", 12)) == 12
    assert 0.9 * ROOM <= len(mooncake.objects) <= ROOM
    assert orphans(mooncake, [old]) == []
