# SPDX-License-Identifier: Apache-2.0
"""Both ways to move a GPU's pages, on a lane that writes down what happens in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtiers.device_memory import CopiedMemory, DeviceMemory, GatheredMemory, HostMemory

NUM_PAGES, NUM_SLOTS, PAGE_BYTES, HEADER, WIDTH = 6, 5, 1048, 256, 4096


class NotingLane:
    """A stream as it may be: nothing is done for sure before `finish`."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.log.append("enter")
        try:
            yield
        finally:
            self.log.append("leave")

    def finish(self) -> None:
        assert self.log[-1] == "leave", "it waits for nothing that was not queued"
        self.log.append("finish")


Make = Callable[[torch.Tensor, NDArray[np.uint8], NotingLane], DeviceMemory]
MEMORIES: dict[str, Make] = {
    "host": lambda pages, slots, lane: HostMemory(pages),
    "copied": lambda pages, slots, lane: CopiedMemory(pages, lane),
    "gathered": GatheredMemory,
}


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
    memory.write([1, 3], [slots[4], slots[0]])
    assert torch.equal(pages[1], before[5]) and torch.equal(pages[3], before[0])
    assert not pages[[0, 2, 4, 5]].any()
    memory.write([], [])


@pytest.mark.parametrize("kind", ["copied", "gathered"])
def test_a_call_returns_when_the_lane_has_done_what_it_queued(kind: str) -> None:
    lane, slots = NotingLane(), region()
    memory = MEMORIES[kind](torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), slots, lane)
    memory.read([1], [slots[1]])
    memory.write([2], [slots[1]])
    assert lane.log == ["enter", "leave", "finish"] * 2


def test_a_copy_that_fails_leaves_none_before_it_under_way() -> None:
    """Its pages go to others when its tickets are lost."""
    lane, slots = NotingLane(), region()
    memory = CopiedMemory(torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), lane)
    for move in (memory.read, memory.write):
        with pytest.raises(IndexError):
            move([1, NUM_PAGES], [slots[1], slots[2]])
    assert lane.log == ["enter", "leave", "finish"] * 2
