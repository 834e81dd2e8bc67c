# SPDX-License-Identifier: Apache-2.0
"""Pages between a GPU's pool and pinned shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading

import pytest
import torch

from kvtiers.batch_copy import driver_batch_copy
from kvtiers.device_memory import CopiedMemory, device_memory
from kvtiers.device_pool import DevicePool
from kvtiers.host_pool import HostPool, PoolShape
from kvtiers.host_region import HostRegion, make_region_fd
from kvtiers.keys import ObjectKeys
from kvtiers.layered_load import LayeredLoad
from kvtiers.layout import LatentLayout
from kvtiers.transfer import Move, MoveKind, TransferEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_PAGES = 40
LAYOUT = LatentLayout(num_layers=27, page_size=64, latent_dim=512, rope_dim=64, dtype="bfloat16")


def run(engine: TransferEngine, kind: MoveKind, sources: list[int], targets: list[int]) -> None:
    """Move pages and wait; the page of a slot is named by the slot's number."""
    slots = targets if kind is MoveKind.WRITE_BACK else sources
    engine.submit(
        [
            Move(ticket=i, kind=kind, source=source, target=target, page_hash=bytes([slot]) * 16)
            for i, (source, target, slot) in enumerate(zip(sources, targets, slots, strict=True))
        ]
    )
    assert engine.wait_idle(30)
    acks = engine.take_acks()
    assert len(acks) == len(sources) and all(ack.ok for ack in acks)


@pytest.mark.parametrize("is_kept_by_another", [True, False])
def test_pages_go_down_and_come_back_byte_for_byte(is_kept_by_another: bool) -> None:
    device = torch.device("cuda")
    pool = DevicePool(LAYOUT, NUM_PAGES, device)
    pool.kv.random_(-8, 8)
    before = pool.kv.clone()
    shape = PoolShape(num_slots=NUM_PAGES, page_bytes=LAYOUT.page_bytes, page_size=64)
    fd = make_region_fd() if is_kept_by_another else None
    host = HostPool(shape, LAYOUT, ObjectKeys("model", LAYOUT), fd)
    assert host.region.pin()
    memory = device_memory(pool.kv, LAYOUT.page_bytes)
    assert memory.kind == "cuda"
    engine = TransferEngine(memory, host, None, threading.Event().set, checks_bodies=False)
    everyone = list(range(NUM_PAGES))
    run(engine, MoveKind.WRITE_BACK, everyone, everyone[::-1])
    for page in everyone:
        assert host.is_sound(NUM_PAGES - 1 - page, bytes([NUM_PAGES - 1 - page]) * 16)
    pool.kv.zero_()
    torch.cuda.synchronize()
    run(engine, MoveKind.LOAD_BACK, everyone, everyone)  # slot s held page NUM_PAGES - 1 - s
    assert torch.equal(pool.kv, before.flip(0))
    engine.close()
    host.region.unpin()
    if fd is not None:
        os.close(fd)


class Tiers:
    """L1 of random bytes, all of them in L2 too; slot i holds page i."""

    def __init__(self, *, is_pinned: bool = True, num_pages: int = NUM_PAGES) -> None:
        self.l1 = DevicePool(LAYOUT, num_pages, torch.device("cuda"))
        self.bytes = self.l1.kv.view(num_pages, -1).view(torch.uint8)
        self.bytes.random_(1, 256)
        self.before = self.bytes.clone()
        shape = PoolShape(num_slots=num_pages, page_bytes=LAYOUT.page_bytes, page_size=64)
        self.l2 = HostPool(shape, LAYOUT, ObjectKeys("model", LAYOUT))
        assert not is_pinned or self.l2.region.pin()
        memory = device_memory(self.l1.kv, LAYOUT.page_bytes)
        assert isinstance(memory, CopiedMemory)
        self.memory = memory
        wake = threading.Event().set
        self.engine = TransferEngine(self.memory, self.l2, None, wake, checks_bodies=False)
        everyone = list(range(num_pages))
        run(self.engine, MoveKind.WRITE_BACK, everyone, everyone)
        self.forget()

    def forget(self) -> None:
        self.bytes.zero_()
        torch.cuda.synchronize()

    def start(self, slots: list[int], pages: list[int]) -> LayeredLoad:
        load = LayeredLoad(LAYOUT.num_layers)
        moves = [
            Move(
                ticket=page,
                kind=MoveKind.LOAD_BACK,
                source=slot,
                target=page,
                page_hash=bytes([slot]) * 16,
            )
            for slot, page in zip(slots, pages, strict=True)
        ]
        self.engine.load_layers(moves, load)
        return load

    def acks(self) -> dict[int, bool]:
        assert self.engine.wait_idle(30)
        return {ack.ticket: ack.ok for ack in self.engine.take_acks()}


def has_batches() -> bool:
    """Whether the driver has such a call, which is new with 12.8."""
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value >= 12080


def test_a_stream_reads_each_layer_behind_the_copies_that_bring_it() -> None:
    """On a stream of its own, as a step is; what it saw of each layer is what was sent."""
    tiers = Tiers()
    seen = torch.empty_like(tiers.l1.kv)
    everyone = list(range(NUM_PAGES))
    with torch.cuda.stream(torch.cuda.Stream()):
        load = tiers.start(everyone, everyone)
        for layer in range(LAYOUT.num_layers):
            load.wait(layer)
            seen[:, layer].copy_(tiers.l1.kv[:, layer])
        torch.cuda.current_stream().synchronize()
    assert all(tiers.acks().values())
    assert torch.equal(seen.view(NUM_PAGES, -1).view(torch.uint8), tiers.before)
    assert torch.equal(tiers.bytes, tiers.before)
    assert tiers.memory.by_layers.name.startswith("cuMemcpyBatchAsync") == has_batches()
    tiers.engine.close()


@pytest.mark.parametrize("way", ["batch", "batch beside computing", "torch", "not pinned"])
def test_random_pages_come_by_layers_and_no_other_byte_changes(way: str) -> None:
    num_pages = 150  # more than are looked at in one go; larger than what is queued at once
    tiers = Tiers(is_pinned=way != "not pinned", num_pages=num_pages)
    now, rng = tiers.memory.by_layers, random.Random(way)
    if way == "torch":
        now.batch = None
    elif way == "batch beside computing":
        now.batch = driver_batch_copy(0, flags=1)
    for num in (1, 7, 129, num_pages):
        slots, pages = (rng.sample(range(num_pages), num) for _ in range(2))
        tiers.forget()
        load = tiers.start(slots, pages)
        load.wait_all()
        torch.cuda.current_stream().synchronize()
        want = torch.zeros_like(tiers.before)
        want[pages] = tiers.before[slots]
        assert torch.equal(tiers.bytes, want)
        assert tiers.acks() == dict.fromkeys(pages, True)
    is_batch = way.startswith("batch") and has_batches()
    assert is_batch == (now.batch is not None and way != "not pinned")
    tiers.engine.close()


def test_damaged_pages_of_a_load_by_layers_are_lost_and_no_others() -> None:
    tiers = Tiers()
    damaged = {0, 7, 8, 39}
    for slot in damaged:
        tiers.l2.slot(slot)[slot] ^= 1
    everyone = list(range(NUM_PAGES))
    tiers.start(everyone, everyone[::-1]).wait_all()
    assert tiers.acks() == {NUM_PAGES - 1 - slot: slot not in damaged for slot in everyone}
    want = tiers.before.clone()
    want[list(damaged)] = 0
    assert torch.equal(tiers.bytes, want.flip(0))
    tiers.engine.close()


def test_memory_is_unpinned_before_it_is_unmapped() -> None:
    """The next region often comes to lie at the same address."""
    for _ in range(8):
        assert HostRegion(1 << 20).pin()
        gc.collect()


def test_a_refused_pin_fails_nothing_behind_it() -> None:
    region = HostRegion(1 << 20)
    assert int(torch.cuda.cudart().cudaHostRegister(region.address, region.num_bytes, 0)) == 0
    assert not region.pin()
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert int(torch.cuda.cudart().cudaHostUnregister(region.address)) == 0
    assert region.pin()
    region.unpin()
