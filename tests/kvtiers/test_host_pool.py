# SPDX-License-Identifier: Apache-2.0
"""L2 slots: what was finished is there after a restart, anything less or else is not."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvtiers.errors import TierConfigError
from kvtiers.host_pool import HostPool, PageName, PoolShape, kept_slots, shape_within
from kvtiers.host_region import HostRegion, make_region_fd
from kvtiers.keys import ObjectKeys
from kvtiers.layout import PageLayout

LAYOUT = PageLayout(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
SHAPE = PoolShape(num_slots=5, page_bytes=LAYOUT.page_bytes, page_size=4)


@pytest.fixture
def fd() -> Iterator[int]:
    made = make_region_fd()
    yield made
    os.close(made)


def open_pool(fd: int | None = None, model: str = "model", shape: PoolShape = SHAPE) -> HostPool:
    return HostPool(shape, LAYOUT, ObjectKeys(model, LAYOUT), fd)


def name_of(number: int, salt: str = "") -> PageName:
    return PageName(
        page_hash=bytes([number]) * 16,
        parent_hash=bytes(16),
        token_ids=np.arange(number, number + 4, dtype="<i4").tobytes(),
        salt=salt,
    )


def fill(pool: HostPool, slot: int, name: PageName) -> bytes:
    body = bytes((slot * 7 + i) % 251 for i in range(LAYOUT.page_bytes))
    pool.begin(slot)
    pool.body(slot)[:] = np.frombuffer(body, np.uint8)
    pool.finish(slot, name.page_hash, name)
    return body


def test_a_finished_page_is_found_by_the_next_process_with_what_it_is(fd: int) -> None:
    pool = open_pool(fd)
    names = {slot: name_of(slot + 1, salt="tenant \u00e9" * slot) for slot in (0, 3, 4)}
    bodies = {slot: fill(pool, slot, name) for slot, name in names.items()}
    after = open_pool(fd)
    assert dict(after.survivors()) == names
    for slot, body in bodies.items():
        assert after.body(slot).tobytes() == body
        assert after.is_sound(slot, names[slot].page_hash)
        assert not after.is_sound(slot, bytes([99]) * 16)


def test_a_slot_that_was_being_written_holds_nothing(fd: int) -> None:
    pool = open_pool(fd)
    fill(pool, 1, name_of(1))
    fill(pool, 2, name_of(2))
    pool.begin(1)  # a copy begins, and the process dies
    pool.body(1)[:100] = 255
    assert [slot for slot, _ in open_pool(fd).survivors()] == [2]


@pytest.mark.parametrize("where", ["body", "header", "record"])
def test_one_flipped_bit_is_noticed(fd: int, where: str) -> None:
    pool = open_pool(fd)
    name = name_of(1)
    fill(pool, 2, name)
    if where == "record":
        start = 4096 + 2 * SHAPE.record_bytes
        pool.region.memory[start + 30] ^= 4
    else:
        pool.slot(2)[600 if where == "body" else 40] ^= 4
    after = open_pool(fd)
    survivors = dict(after.survivors())
    if where == "body":  # survivors are told by their headers; their bytes are summed up apart
        assert survivors == {2: name} and not after.is_sound(2, name.page_hash)
        after.doubt(2)
        assert not after.holds(2, name.page_hash)
    else:
        assert survivors == {}


def test_pages_of_another_model_or_size_are_wiped(fd: int) -> None:
    fill(open_pool(fd), 0, name_of(1))
    assert list(open_pool(fd, model="another").survivors()) == []
    assert list(open_pool(fd).survivors()) == []
    fill(open_pool(fd), 0, name_of(1))
    larger = PoolShape(num_slots=9, page_bytes=LAYOUT.page_bytes, page_size=4)
    assert list(open_pool(fd, shape=larger).survivors()) == []


def test_a_page_without_a_name_serves_this_process_and_no_other(fd: int) -> None:
    pool = open_pool(fd)
    name = name_of(1)
    pool.begin(0)
    pool.finish(0, name.page_hash, None)
    assert pool.is_sound(0, name.page_hash)
    assert list(open_pool(fd).survivors()) == []


def test_a_salt_too_long_for_its_place_is_not_cut_short(fd: int) -> None:
    pool = open_pool(fd)
    fill(pool, 0, name_of(1, salt="x" * 1025))
    fill(pool, 1, name_of(2, salt="x" * 1024))
    assert [slot for slot, _ in open_pool(fd).survivors()] == [1]


def test_a_region_says_how_many_slots_it_was_cut_into(fd: int) -> None:
    assert kept_slots(fd, LAYOUT) == 0
    open_pool(fd)
    assert kept_slots(fd, LAYOUT) == 5
    other = PageLayout(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    assert kept_slots(fd, other) == 0


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_slots_fill_a_budget_to_the_byte_and_never_exceed_it(page_size: int) -> None:
    layout = PageLayout(
        num_layers=2, page_size=page_size, num_kv_heads=2, head_dim=8, dtype="float32"
    )
    for num_slots in (*range(1, 40), 1000, 4096):
        exact = PoolShape(
            num_slots=num_slots, page_bytes=layout.page_bytes, page_size=page_size
        ).num_bytes
        assert shape_within(exact, layout, most_slots=5000).num_slots == num_slots
        assert shape_within(exact - 1, layout, most_slots=5000).num_slots == num_slots - 1
    for budget in (0, 1, 4096, 5000, 20_000, 100_000, 1 << 20):
        shape = shape_within(budget, layout, most_slots=20)
        assert 0 <= shape.num_slots <= 20
        assert not shape.num_slots or shape.num_bytes <= budget


def test_no_slot_and_no_memory_are_refused() -> None:
    with pytest.raises(TierConfigError, match="at least one slot"):
        open_pool(shape=PoolShape(num_slots=0, page_bytes=LAYOUT.page_bytes, page_size=4))
    with open(os.devnull, "rb") as file, pytest.raises(TierConfigError, match="l2 region"):
        HostRegion(4096, file.fileno())


@pytest.mark.parametrize("num", [0, 3, 8, 40])
def test_many_slots_are_looked_at_as_one_is(num: int) -> None:
    """Whole, another's, never filled, begun anew, damaged, and in doubt with a body that is bad."""
    pool = open_pool(shape=PoolShape(num_slots=40, page_bytes=LAYOUT.page_bytes, page_size=4))
    for slot in range(40):
        if slot % 7 != 3:
            fill(pool, slot, name_of(slot + 1))
    for slot in range(0, 40, 7):
        pool.slot(slot)[slot] ^= 4  # within the header
    pool.begin(11)
    pool.body(12)[9] ^= 1
    pool.body(13)[9] ^= 1
    for slot in (13, 15):
        pool.doubt(slot)
    slots = [(5 * at + 1) % 40 for at in range(num)]
    hashes = [bytes([slot + 1 if slot % 9 else 77]) * 16 for slot in slots]
    bad = {3, 10, 17, 24, 31, 38} | set(range(0, 40, 7)) | {11, 13} | set(range(0, 40, 9))
    assert pool.which_hold(slots, hashes) == [slot not in bad for slot in slots]


def test_a_slot_in_doubt_is_summed_up_once() -> None:
    pool = open_pool(shape=PoolShape(num_slots=9, page_bytes=LAYOUT.page_bytes, page_size=4))
    for slot in range(9):
        fill(pool, slot, name_of(slot + 1))
    slots, hashes = list(range(9)), [bytes([slot + 1]) * 16 for slot in range(9)]
    pool.doubt(4)
    assert all(pool.which_hold(slots, hashes))
    pool.body(4)[0] ^= 1  # nobody says so: headers alone are read
    assert all(pool.which_hold(slots, hashes))


def test_a_pool_that_nobody_holds_is_gone_at_once() -> None:
    """Its memory is gigabytes: it does not wait for the collector of cycles."""
    pool = open_pool()
    fill(pool, 0, name_of(1))
    watch = weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert watch() is None
    finally:
        gc.enable()
