# SPDX-License-Identifier: Apache-2.0
"""Pages that come layer by layer: no layer is read before it is there, nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvtiers.device_memory import CopiedMemory, GatheredMemory, HostMemory, Incoming
from kvtiers.layered_load import Fence, LayeredLoad, layer_groups
from kvtiers.transfer import MoveKind
from tests.fakes.memmove_batch import MemmoveBatch
from tests.kvtiers.test_device_memory import NotingLane
from tests.kvtiers.test_transfer import Bench

NUM_LAYERS, LAYER_BYTES, NUM_PAGES = 5, 16, 6
PAGE_BYTES = NUM_LAYERS * LAYER_BYTES


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(None)
    yield made
    made.device.gate.set()
    made.engine.close()


def waits(work: Callable[[], None]) -> tuple[threading.Thread, threading.Event]:
    """A thread that does it, and says when it has."""
    is_done = threading.Event()

    def run() -> None:
        work()
        is_done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, is_done


def test_a_reader_goes_on_when_its_layer_is_there_and_no_sooner() -> None:
    load = LayeredLoad(NUM_LAYERS)
    load.arrived(2, None)
    load.wait(0)
    load.wait(1)
    thread, is_done = waits(lambda: load.wait(3))
    load.arrived(3, None)
    assert not is_done.wait(0.05), "layer 3 is not there"
    load.arrived(5, None)
    thread.join(60)
    assert is_done.is_set()
    load.wait_all()


def test_nobody_waits_for_what_will_never_come() -> None:
    load = LayeredLoad(NUM_LAYERS)
    load.arrived(1, None)
    threads = [waits(lambda layer=layer: load.wait(layer))[0] for layer in (1, 4)]  # type: ignore[misc]
    load.end()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_device_is_given_the_fence_of_the_part_that_has_the_layer() -> None:
    passed: list[int] = []
    load = LayeredLoad(NUM_LAYERS)
    for num in (2, 4, 5):
        load.arrived(num, lambda num=num: passed.append(num))  # type: ignore[misc]
    load.end()
    for layer in range(NUM_LAYERS):
        load.wait(layer)
    assert passed == [2, 2, 4, 4, 5]


KB = 1 << 10


@pytest.mark.parametrize(
    ("num_layers", "layer_bytes", "first_bytes", "lens"),
    [
        (27, 73_728, 400 * KB, [6, 6, 6, 6, 3]),  # V2-Lite, bf16, pages of 64
        (27, 73_728, 144 * KB, [2, 3, 4, 5, 6, 6, 1]),
        (27, 41_472, 144 * KB, [4, 5, 7, 10, 1]),  # fp8
        (61, 73_728, 400 * KB, [6] * 10 + [1]),
        (4, 1 << 20, 144 * KB, [1, 1, 1, 1]),  # a layer is large enough
        (3, 8, 144 * KB, [3]),
        (4, 73_728, 1 << 30, [4]),
    ],
)
def test_layers_come_in_pieces_that_begin_small(
    num_layers: int, layer_bytes: int, first_bytes: int, lens: list[int]
) -> None:
    groups = layer_groups(num_layers, layer_bytes, first_bytes, max(400 * KB, first_bytes))
    assert [group.stop - group.start for group in groups] == lens
    assert [group.start for group in groups[1:]] == [group.stop for group in groups[:-1]]
    assert groups[0].start == 0 and groups[-1].stop == num_layers


class Watched(LayeredLoad):
    """Looks at the pages whenever more of them is said to be there."""

    def __init__(self, look: Callable[[int], None]) -> None:
        super().__init__(NUM_LAYERS)
        self._look = look

    def arrived(self, num_layers: int, fence: Fence | None) -> None:
        self._look(num_layers)
        super().arrived(num_layers, fence)


@pytest.mark.parametrize("kind", ["host", "copied", "batched", "gathered"])
def test_the_first_layers_of_all_pages_come_before_the_next(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.layer_copies.PIECE_BYTES", 2 * LAYER_BYTES)
    monkeypatch.setattr("kvtiers.layer_copies.FIRST_PIECE_BYTES", LAYER_BYTES)
    monkeypatch.setattr("kvtiers.layer_copies.CALL_BYTES", 2 * LAYER_BYTES)
    monkeypatch.setattr("kvtiers.layer_copies.LEAST_COPY_BYTES", LAYER_BYTES)
    rng = np.random.default_rng(1)
    bodies = rng.integers(1, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    pages = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
    lane = NotingLane()
    memory = {
        "host": lambda: HostMemory(pages),
        "copied": lambda: CopiedMemory(pages, lane),
        "batched": lambda: CopiedMemory(pages, lane, MemmoveBatch()),
        "gathered": lambda: GatheredMemory(pages, bodies, lane),
    }[kind]()
    targets = [5, 0, 3]
    said: list[int] = []

    def look(num_layers: int) -> None:
        said.append(num_layers)
        end = num_layers * LAYER_BYTES
        held = pages[targets].numpy()
        assert np.array_equal(held[:, :end], bodies[[0, 1, 2], :end])
        assert not held[:, end:].any(), "a later layer took the link first"

    drawn: list[int] = []

    def draw() -> Iterator[tuple[list[int], list[int]]]:
        for some in ([0, 1], [2]):
            drawn.extend(targets[number] for number in some)
            yield [targets[number] for number in some], some

    load = Watched(look)
    memory.write_layers(Incoming(bodies, draw()), load)
    many = {"host": [1, 2, 3, 4, 5], "copied": [2, 4, 5], "batched": [1, 2, 4, 5], "gathered": [5]}
    assert said == many[kind]
    assert drawn == targets, "each page is looked at once"
    assert not pages[[1, 2, 4]].any()
    assert kind == "host" or lane.log[-1] == "finish", "nothing is under way any more"


@pytest.mark.parametrize("batch", [None, MemmoveBatch()])
@pytest.mark.parametrize(("page", "slot"), [(NUM_PAGES, 1), (1, NUM_PAGES), (-1, 1), (1, -1)])
def test_a_copy_that_fails_leaves_no_layer_under_way(
    batch: MemmoveBatch | None, page: int, slot: int
) -> None:
    lane = NotingLane()
    memory = CopiedMemory(torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), lane, batch)
    bodies = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    load = LayeredLoad(NUM_LAYERS)
    with pytest.raises(IndexError):
        memory.write_layers(Incoming(bodies, [([1], [1]), ([2, page], [2, slot])]), load)
    assert lane.log[-1] == "finish"


# The transfer engine ----------------------------------------------------------------------


def test_a_load_by_layers_passes_all_others_and_finds_what_is_damaged(bench: Bench) -> None:
    bench.run(*(bench.move(MoveKind.WRITE_BACK, page, page, page) for page in range(4)))
    bench.pool.slot(2)[700] ^= 1
    bench.device.done.clear()
    bench.device.gate.clear()
    others = [bench.move(MoveKind.LOAD_BACK, 3, 3 + page, 3) for page in range(6)]
    bench.engine.submit(others)  # the thread takes the first four of them
    load = LayeredLoad(1)
    mine = [bench.move(MoveKind.LOAD_BACK, page, 9 + page, page) for page in (1, 2)]
    bench.engine.load_layers(mine, load)
    bench.device.gate.set()
    load.wait_all()
    assert bench.engine.wait_idle(10)
    acks = {ack.ticket: ack.ok for ack in bench.engine.take_acks()}
    assert [acks[move.ticket] for move in mine] == [True, False]
    assert all(acks[move.ticket] for move in others) and len(acks) == 8
    assert np.array_equal(bench.device.pages[10], bench.device.pages[1])
    assert bench.device.done.index("write [10]") <= 1
    assert bench.engine.counters()["load_back_layered_pages"] == 1


@pytest.mark.parametrize("when", ["it fails", "all is closed"])
def test_whoever_reads_a_load_that_is_lost_does_not_wait_for_it(bench: Bench, when: str) -> None:
    bench.run(bench.move(MoveKind.WRITE_BACK, 0, 0, 0))
    bench.device.is_broken = True
    if when == "all is closed":
        bench.engine.close()
    load = LayeredLoad(1)
    mine = [bench.move(MoveKind.LOAD_BACK, 0, 9 + page, 0) for page in range(2)]
    bench.engine.load_layers(mine, load)
    load.wait_all()
    assert bench.acks(2) == {move.ticket: False for move in mine}
