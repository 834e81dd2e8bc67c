# SPDX-License-Identifier: Apache-2.0
"""Pages between a GPU's pool and pinned shared memory."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from kvtiers.device_memory import device_memory
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


def test_a_stream_reads_each_layer_behind_the_copies_that_bring_it() -> None:
    """On a stream of its own, as a step is; what it saw of each layer is what was sent."""
    device = torch.device("cuda")
    pool = DevicePool(LAYOUT, NUM_PAGES, device)
    pool.kv.random_(-8, 8)
    before = pool.kv.clone()
    shape = PoolShape(num_slots=NUM_PAGES, page_bytes=LAYOUT.page_bytes, page_size=64)
    host = HostPool(shape, LAYOUT, ObjectKeys("model", LAYOUT))
    assert host.region.pin()
    memory = device_memory(pool.kv, LAYOUT.page_bytes)
    engine = TransferEngine(memory, host, None, threading.Event().set, checks_bodies=False)
    run(engine, MoveKind.WRITE_BACK, list(range(NUM_PAGES)), list(range(NUM_PAGES)))
    pool.kv.zero_()
    torch.cuda.synchronize()
    load = LayeredLoad(LAYOUT.num_layers)
    moves = [
        Move(ticket=i, kind=MoveKind.LOAD_BACK, source=i, target=i, page_hash=bytes([i]) * 16)
        for i in range(NUM_PAGES)
    ]
    seen = torch.empty_like(before)
    with torch.cuda.stream(torch.cuda.Stream()):
        engine.load_layers(moves, load)
        for layer in range(LAYOUT.num_layers):
            load.wait(layer)
            seen[:, layer].copy_(pool.kv[:, layer])
        torch.cuda.current_stream().synchronize()
    assert engine.wait_idle(30) and all(ack.ok for ack in engine.take_acks())
    assert torch.equal(seen, before) and torch.equal(pool.kv, before)
    engine.close()


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
