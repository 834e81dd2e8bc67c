# SPDX-License-Identifier: Apache-2.0
"""Pages of a 64K context between a GPU's pool and pinned L2, as the engine moves them.

Prints JSON lines: the link's own rate; load-back and write-back by copies and by the kernel, as
GB/s and as a share of the link's rate; how much a memory-bound step is slowed by write-backs
beside it. `python -m benchmarks.gpu.page_moves`; with --dry the same on a CPU, small.
"""

from __future__ import annotations

import argparse
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator

import torch

from kvtiers.device_memory import device_memory
from kvtiers.device_pool import DevicePool
from kvtiers.host_pool import HostPool, PoolShape
from kvtiers.keys import ObjectKeys
from kvtiers.layout import LatentLayout
from kvtiers.transfer import Move, MoveKind, TransferEngine

CONTEXT_LEN = 65_536
PAGE_SIZE = 64
LINK_BYTES = 1 << 30


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def rate(device: torch.device, num_bytes: int, work: Callable[[], object], rounds: int) -> float:
    """GB/s of the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        wait(device)
        start_s = time.perf_counter()
        work()
        wait(device)
        best = min(best, time.perf_counter() - start_s)
    return num_bytes / best / 1e9


def link_rates(device: torch.device, num_bytes: int) -> dict[str, float]:
    """What one large copy from and to pinned memory reaches."""
    host = torch.zeros(num_bytes, dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return {
        "load_back": rate(device, num_bytes, lambda: there.copy_(host, non_blocking=True), 5),
        "write_back": rate(device, num_bytes, lambda: host.copy_(there, non_blocking=True), 5),
    }


class Tiers:
    """L1, L2 and what moves pages between them."""

    def __init__(self, device: torch.device, num_pages: int, by_kernel: bool) -> None:
        self.layout = LatentLayout(
            num_layers=27, page_size=PAGE_SIZE, latent_dim=512, rope_dim=64, dtype="bfloat16"
        )
        self.num_pages = num_pages
        self.l1 = DevicePool(self.layout, num_pages, device)
        shape = PoolShape(
            num_slots=num_pages, page_bytes=self.layout.page_bytes, page_size=PAGE_SIZE
        )
        self.l2 = HostPool(shape, self.layout, ObjectKeys("bench", self.layout))
        if device.type == "cuda":
            self.l2.region.pin()
        slots = self.l2.bodies if by_kernel else None
        self.memory = device_memory(self.l1.kv, self.layout.page_bytes, slots=slots)
        self.engine = TransferEngine(self.memory, self.l2, None, lambda: None, checks_bodies=False)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    def moves(self, kind: MoveKind) -> list[Move]:
        """Every page, to or from the slot of its number."""
        return [
            Move(ticket=i, kind=kind, source=i, target=i, page_hash=i.to_bytes(16, "little"))
            for i in range(self.num_pages)
        ]

    def move(self, kind: MoveKind) -> None:
        """All pages; returns when they are there."""
        self.engine.submit(self.moves(kind))
        if not self.engine.wait_idle(60):
            raise RuntimeError("the moves do not end")
        if not all(ack.ok for ack in self.engine.take_acks()):
            raise RuntimeError("a page was lost")

    def close(self) -> None:
        self.engine.close()
        self.l2.region.unpin()


def slowdown(device: torch.device, tiers: Tiers, num_bytes: int, num_steps: int) -> float:
    """How much longer a pass over memory takes while pages go down, as a share."""
    weights = torch.zeros(num_bytes // 4, device=device)

    def steps() -> float:
        wait(device)
        start_s = time.perf_counter()
        for _ in range(num_steps):
            weights.sum()
        wait(device)
        return time.perf_counter() - start_s

    steps()
    alone_s = min(steps() for _ in range(3))
    is_over = threading.Event()

    def write_back() -> None:
        while not is_over.is_set():
            tiers.move(MoveKind.WRITE_BACK)

    writer = threading.Thread(target=write_back)
    writer.start()
    beside_s = min(steps() for _ in range(3))
    is_over.set()
    writer.join()
    return beside_s / alone_s - 1.0


def bench(device: torch.device, *, is_small: bool) -> Iterator[dict[str, object]]:
    """One line a figure."""
    link = link_rates(device, LINK_BYTES >> (5 if is_small else 0))
    for name, gb_s in link.items():
        yield {"case": "link", "kind": name, "gb_s": round(gb_s, 2)}
    num_pages = (1024 if is_small else CONTEXT_LEN) // PAGE_SIZE
    for by_kernel in (False, True):
        tiers = Tiers(device, num_pages, by_kernel)
        way = "kernel" if by_kernel else "copies"
        for kind in (MoveKind.WRITE_BACK, MoveKind.LOAD_BACK):
            gb_s = rate(device, tiers.num_bytes, functools.partial(tiers.move, kind), 5)
            name = kind.name.lower()
            yield {
                "case": "move",
                "way": way,
                "kind": name,
                "mib": tiers.num_bytes >> 20,
                "gb_s": round(gb_s, 2),
                "ms": round(tiers.num_bytes / gb_s / 1e6, 2),
                "share_of_link": round(gb_s / link[name], 3),
            }
        share = slowdown(device, tiers, LINK_BYTES >> (6 if is_small else 0), 100)
        yield {"case": "slowdown", "way": way, "share": round(share, 4)}
        tiers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, small")
    is_dry = parser.parse_args().dry
    for line in bench(torch.device("cpu" if is_dry else "cuda"), is_small=is_dry):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
