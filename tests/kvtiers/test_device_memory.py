# SPDX-License-Identifier: Apache-2.0
"""Both ways to move a GPU's pages, on a lane that writes down what happens in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtiers.device_memory import (
    Body,
    CopiedMemory,
    DeviceMemory,
    GatheredMemory,
    HostMemory,
    Wait,
)
from kvtiers.layered_load import Fence

NUM_PAGES, NUM_SLOTS, PAGE_BYTES, HEADER, WIDTH = 6, 5, 1048, 256, 4096


class NotingLane:
    """A stream as it may be: nothing is done for sure before `finish`."""

    handle = 77

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_inside = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.log.append("enter")
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False
            self.log.append("leave")

    def mark(self) -> Wait:
        assert not self.is_inside, "it waits for nothing that was not queued"
        self.log.append("mark")
        return lambda: self.log.append("wait")

    def fence(self) -> Fence:
        self.log.append("fence")
        return lambda: None

    def finish(self) -> None:
        assert not self.is_inside, "it waits for nothing that was not queued"
        self.log.append("finish")


Make = Callable[[torch.Tensor, NDArray[np.uint8], NotingLane], DeviceMemory]
MEMORIES: dict[str, Make] = {
    "host": lambda pages, slots, lane: HostMemory(pages),
    "copied": lambda pages, slots, lane: CopiedMemory(pages, lane),
    "gathered": GatheredMemory,
}


def done() -> None:
    """What waits for bytes that are there."""


def region() -> NDArray[np.uint8]:
    """Bodies of slots, each behind its header."""
    whole = np.zeros((NUM_SLOTS, WIDTH), np.uint8)
    return whole[:, HEADER : HEADER + PAGE_BYTES]


@pytest.mark.parametrize("kind", MEMORIES)
def test_pages_go_out_to_any_slots_and_come_back(kind: str) -> None:
    lane, slots = NotingLane(), region()
    pages = torch.randint(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
    before = pages.clone()
    memory = MEMORIES[kind](pages, slots, lane)
    memory.read([4, 0, 5], [slots[2], slots[0], slots[4]])
    for page, slot in ((4, 2), (0, 0), (5, 4)):
        assert slots[slot].tobytes() == before[page].numpy().tobytes()
    assert not slots[[1, 3]].any()
    whole = slots.base
    assert isinstance(whole, np.ndarray) and not whole[:, :HEADER].any()
    pages.zero_()
    (memory.write([(1, slots[4]), (3, slots[0])]) or done)()
    assert torch.equal(pages[1], before[5]) and torch.equal(pages[3], before[0])
    assert not pages[[0, 2, 4, 5]].any()
    (memory.write([]) or done)()


@pytest.mark.parametrize("kind", ["copied", "gathered"])
def test_what_is_read_is_there_and_what_is_written_is_waited_for(kind: str) -> None:
    lane, slots = NotingLane(), region()
    memory = MEMORIES[kind](torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), slots, lane)
    memory.read([1], [slots[1]])
    wait = memory.write([(2, slots[1])])
    if wait is None:
        assert lane.log == ["enter", "leave", "finish"] * 2
        return
    assert lane.log == ["enter", "leave", "finish", "enter", "leave", "mark"]
    wait()
    assert lane.log[-1] == "wait"


@pytest.mark.parametrize("kind", ["host", "copied"])
def test_a_page_is_on_its_way_before_the_next_one_is_drawn(kind: str) -> None:
    """Whoever draws looks at each page; a link that waited for all of that would idle."""
    slots = region()
    slots[:] = 7
    pages = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
    memory = MEMORIES[kind](pages, slots, NotingLane())

    def drawn() -> Iterator[tuple[int, Body]]:
        for page in range(4):
            assert bool(pages[:page].eq(7).all()) and not pages[page:].any()
            yield page, slots[page]

    (memory.write(drawn()) or done)()
    assert bool(pages[:4].eq(7).all())


def test_a_copy_that_fails_leaves_none_before_it_under_way() -> None:
    """Its pages go to others when its tickets are lost."""
    lane, slots = NotingLane(), region()
    memory = CopiedMemory(torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), lane)
    with pytest.raises(IndexError):
        memory.read([1, NUM_PAGES], [slots[1], slots[2]])
    with pytest.raises(IndexError):
        memory.write([(1, slots[1]), (NUM_PAGES, slots[2])])
    assert lane.log == ["enter", "leave", "finish"] * 2


def test_a_look_that_fails_leaves_no_copy_before_it_under_way() -> None:
    lane, slots = NotingLane(), region()
    memory = CopiedMemory(torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), lane)

    def drawn() -> Iterator[tuple[int, Body]]:
        yield 1, slots[1]
        raise RuntimeError("no header can be read")

    with pytest.raises(RuntimeError):
        memory.write(drawn())
    assert lane.log == ["enter", "leave", "finish"]
