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
