# SPDX-License-Identifier: Apache-2.0
"""Batches of pieces: where each lies, against brute force, and what becomes of refused ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtiers.batch_copy import Addresses, CopyRefusedError
from kvtiers.device_memory import CopiedMemory
from kvtiers.host_pool import HostPool, PoolShape
from kvtiers.keys import ObjectKeys
from kvtiers.layer_copies import LayerCopies
from kvtiers.layered_load import LayeredLoad
from kvtiers.layout import LatentLayout
from kvtiers.page_pieces import Incoming, Rows, Window
from kvtiers.transfer import Move, MoveKind, TransferEngine
from tests.fakes.memmove_batch import MemmoveBatch
from tests.kvtiers.test_device_memory import NotingLane

LAYERS, LAYER_BYTES, PAGES, SLOTS = 7, 24, 40, 31
PAGE_BYTES = LAYERS * LAYER_BYTES


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"FIRST_PIECE": 1, "PIECE": 3, "LEAST_COPY": 2, "CALL": 15, "UNDER_WAY": 32}
    for name, size in sizes.items():
        monkeypatch.setattr(f"kvtiers.layer_copies.{name}_BYTES", size * LAYER_BYTES)


def test_addresses_are_those_of_each_byte_range() -> None:
    whole = np.zeros((SLOTS, 512), np.uint8)
    rows = Rows(whole[:, 64:].ctypes.data, SLOTS, 512, PAGE_BYTES)
    rng = random.Random(5)
    for _ in range(200):
        start = rng.randrange(PAGE_BYTES)
        piece = slice(start, rng.randint(start, PAGE_BYTES))
        which = [rng.randrange(SLOTS) for _ in range(rng.randrange(9))]
        got = rows.addresses(np.array(which, np.int64), piece)
        assert got.dtype == np.uint64
        assert got.tolist() == [whole[row, 64 + start :].ctypes.data for row in which]


@pytest.mark.parametrize("row", [-1, SLOTS, 1 << 40])
def test_a_row_that_is_not_there_has_no_address(row: int) -> None:
    rows = Rows(1 << 20, SLOTS, 512, PAGE_BYTES)
    with pytest.raises(IndexError, match="allowed: 0 to 30"):
        rows.addresses(np.array([3, row, 4]), slice(0, 8))
    with pytest.raises(IndexError, match="of 168 bytes"):
        rows.addresses(np.array([3]), slice(160, 169))


def test_no_more_is_under_way_than_the_window_allows() -> None:
    window, done = Window(100), list[int]()
    under_way: list[tuple[int, int]] = []
    rng = random.Random(2)
    for number in range(200):
        size = rng.choice([10, 30, 60, 150])
        window.make_room(size)
        left = [one for one in under_way if one[0] not in done]
        assert not left or sum(one[1] for one in left) + size <= 100
        under_way.append((number, size))
        window.note(size, lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == sorted(done)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["batch", "torch", "not pinned"])
def test_random_pages_come_whole_and_no_other_byte_changes(seed: int, way: str) -> None:
    rng = random.Random(seed)
    slots = np.random.default_rng(seed).integers(1, 256, (SLOTS, 512), dtype=np.uint8)
    bodies = slots[:, 64 : 64 + PAGE_BYTES]
    pages = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    batch = MemmoveBatch(knows_memory=way != "not pinned")
    lane = NotingLane()
    copies = LayerCopies(pages, lane, None if way == "torch" else batch)
    num = rng.randint(1, SLOTS)
    targets, sources = rng.sample(range(PAGES), num), rng.sample(range(SLOTS), num)
    cuts = sorted(rng.sample(range(num + 1), min(3, num)))
    bounds = list(zip([0, *cuts], [*cuts, num], strict=True))
    load = LayeredLoad(LAYERS)
    parts = [(targets[a:b], sources[a:b]) for a, b in bounds]
    copies.write(Incoming(bodies, parts), load)
    load.wait_all()
    want = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    for target, source in zip(targets, sources, strict=True):
        want[target] = slots[source, 64 : 64 + PAGE_BYTES]
    assert np.array_equal(pages.numpy(), want)
    assert lane.log[-1] == "finish"
    if way != "batch":
        assert not batch.calls
        return
    assert sum(copies * size for copies, size, _ in batch.calls) == num * PAGE_BYTES
    assert all(copies * size <= 15 * LAYER_BYTES for copies, size, _ in batch.calls)
    assert all(copies <= 7 for copies, _, _ in batch.calls), "a small copy counts for more"
    assert {stream for _, _, stream in batch.calls} == {lane.handle}


class Counting(MemmoveBatch):
    """Knows at each call how many of those before it have been waited for."""

    def __init__(self, lane: NotingLane) -> None:
        super().__init__()
        self.lane = lane
        self.waited: list[int] = []

    def __call__(self, targets: Addresses, sources: Addresses, num_bytes: int, stream: int) -> None:
        self.waited.append(self.lane.log.count("wait"))
        super().__call__(targets, sources, num_bytes, stream)


def test_copies_are_queued_no_further_ahead_than_the_window_allows() -> None:
    lane = NotingLane()
    batch = Counting(lane)
    pages = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    bodies = np.zeros((SLOTS, PAGE_BYTES), np.uint8)
    everyone = list(range(SLOTS))
    copies = LayerCopies(pages, lane, batch)
    copies.write(Incoming(bodies, [(everyone, everyone)]), LayeredLoad(LAYERS))
    weights = [num * max(size, 2 * LAYER_BYTES) for num, size, _ in batch.calls]
    under_way = [sum(weights[done : at + 1]) for at, done in enumerate(batch.waited)]
    assert max(under_way) <= 32 * LAYER_BYTES
    assert min(under_way[3:]) > 15 * LAYER_BYTES, "the link has its next call in time"


def load_all(batch: MemmoveBatch, loads: int = 1) -> tuple[CopiedMemory, torch.Tensor, np.ndarray]:
    bodies = np.random.default_rng(1).integers(1, 256, (8, PAGE_BYTES), dtype=np.uint8)
    pages = torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)
    memory = CopiedMemory(pages, NotingLane(), batch)
    everyone = list(range(8))
    for _ in range(loads):
        memory.write_layers(Incoming(bodies, [(everyone, everyone)]), LayeredLoad(LAYERS))
    return memory, pages, bodies


@pytest.mark.parametrize("code", [1, 801])
def test_a_driver_without_batches_is_asked_once(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    batch = MemmoveBatch(code, code)
    memory, pages, bodies = load_all(batch, loads=2)
    assert np.array_equal(pages.numpy(), bodies)
    assert len(batch.calls) == 1 and memory.by_layers.name == "torch"
    assert caplog.text.count("one by one") == 1


@pytest.mark.parametrize("codes", [(700,), (0, 1), (0, 0, 0, 801), (2,)])
def test_any_other_refusal_is_an_error(codes: tuple[int, ...]) -> None:
    """Half of the batch may be under way, and what it read is in doubt."""
    with pytest.raises(CopyRefusedError):
        load_all(MemmoveBatch(*codes))


# Under the transfer engine ----------------------------------------------------------------

LAYOUT = LatentLayout(num_layers=LAYERS, page_size=2, latent_dim=4, rope_dim=2, dtype="bfloat16")


class Tiers:
    """L1 in a tensor, written by batches; L2 behind it, its pages named by their slots."""

    def __init__(self, batch: MemmoveBatch) -> None:
        assert LAYOUT.page_bytes == PAGE_BYTES
        self.pages = torch.randint(1, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.before = self.pages.clone()
        shape = PoolShape(num_slots=PAGES, page_bytes=PAGE_BYTES, page_size=2)
        self.pool = HostPool(shape, LAYOUT, ObjectKeys("model", LAYOUT))
        memory = CopiedMemory(self.pages, NotingLane(), batch)
        self.engine = TransferEngine(memory, self.pool, None, lambda: None, checks_bodies=False)
        self.engine.submit([self.move(MoveKind.WRITE_BACK, i, i) for i in range(PAGES)])
        assert self.engine.wait_idle(10) and all(ack.ok for ack in self.engine.take_acks())
        self.pages.zero_()

    def move(self, kind: MoveKind, source: int, target: int) -> Move:
        slot = target if kind is MoveKind.WRITE_BACK else source
        return Move(
            ticket=target, kind=kind, source=source, target=target, page_hash=bytes([slot]) * 16
        )

    def load(self, pairs: list[tuple[int, int]]) -> dict[int, bool]:
        """(slot, page) each; what was said of the pages."""
        load = LayeredLoad(LAYERS)
        self.engine.load_layers([self.move(MoveKind.LOAD_BACK, *pair) for pair in pairs], load)
        load.wait_all()
        assert self.engine.wait_idle(10)
        return {ack.ticket: ack.ok for ack in self.engine.take_acks()}


@pytest.fixture
def tiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiers]:
    monkeypatch.setattr("kvtiers.transfer.LOOK_PAGES", 11)
    made = Tiers(MemmoveBatch(*getattr(request, "param", ())))
    yield made
    made.engine.close()


def test_damaged_pages_are_found_and_the_others_come(tiers: Tiers) -> None:
    rng = random.Random(9)
    pairs = list(zip(rng.sample(range(PAGES), 30), rng.sample(range(PAGES), 30), strict=True))
    damaged = {slot for slot, _ in rng.sample(pairs, 6)}
    for number, slot in enumerate(sorted(damaged)):
        if number == 0:
            tiers.pool.begin(slot)
        elif number == 1:  # whole, but another page
            tiers.pool.finish(slot, bytes([200]) * 16, None)
        elif number == 2:  # its header is whole, its body is not, and somebody has seen that
            tiers.pool.body(slot)[5] ^= 1
            tiers.pool.doubt(slot)
        else:
            tiers.pool.slot(slot)[rng.randrange(256)] ^= 1 << rng.randrange(8)
    assert tiers.load(pairs) == {page: slot not in damaged for slot, page in pairs}
    want = torch.zeros_like(tiers.before)
    for slot, page in pairs:
        if slot not in damaged:
            want[page] = tiers.before[slot]
    assert torch.equal(tiers.pages, want)


@pytest.mark.parametrize(
    "tiers", [(700,), (0, 0, 0, 700), (0, 1), (0, 0, 0, 0, 801)], indirect=True
)
def test_pages_of_a_load_whose_batch_was_refused_are_lost(tiers: Tiers) -> None:
    """Some hold wrong bytes: none of them is said to be there. The next load goes on."""
    pairs = [(slot, slot) for slot in range(PAGES)]
    assert tiers.load(pairs) == dict.fromkeys(range(PAGES), False)
    assert tiers.load(pairs) == dict.fromkeys(range(PAGES), True)
    assert torch.equal(tiers.pages, tiers.before)


@pytest.mark.parametrize("tiers", [(801,), (1,)], indirect=True)
def test_pages_come_by_single_copies_where_the_driver_has_no_batches(tiers: Tiers) -> None:
    pairs = [(slot, PAGES - 1 - slot) for slot in range(PAGES)]
    assert all(tiers.load(pairs).values())
    assert torch.equal(tiers.pages, tiers.before.flip(0))


def test_a_reader_sees_each_layer_when_it_is_said_to_be_there(tiers: Tiers) -> None:
    load = LayeredLoad(LAYERS)
    seen: list[bool] = []

    def read() -> None:
        for layer in range(LAYERS):
            load.wait(layer)
            piece = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
            seen.append(torch.equal(tiers.pages[:, piece], tiers.before[:, piece]))

    reader = threading.Thread(target=read)
    reader.start()
    moves = [tiers.move(MoveKind.LOAD_BACK, slot, slot) for slot in range(PAGES)]
    tiers.engine.load_layers(moves, load)
    reader.join(60)
    assert seen == [True] * LAYERS
