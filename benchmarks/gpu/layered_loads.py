# SPDX-License-Identifier: Apache-2.0
"""All pages of a 64K context from L2, as one load after the other and by layers, timed and checked.

Part of `benchmarks.gpu.layered`, which says what the lines mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.page_moves import CONTEXT_LEN, LINK_BYTES, PAGE_SIZE, Tiers, link_rates, wait
from kvtiers.batch_copy import Addresses, BatchCopy, driver_batch_copy
from kvtiers.device_memory import CopiedMemory
from kvtiers.layer_copies import LayerCopies
from kvtiers.layered_load import Fence, LayeredLoad
from kvtiers.transfer import LOOK_PAGES, MoveKind

ROUNDS = 6
PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
PIECE_KIB = ((72, 400), (144, 1024), (400, 400), (4096, 4096))  # tried: of the first, of the last


class Differs(SystemExit):
    """What came is not what was sent."""


class NotedLoad(LayeredLoad):
    """Knows which layers came together."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.ends: list[int] = []

    def arrived(self, num_layers: int, fence: Fence | None) -> None:
        self.ends.append(num_layers)
        super().arrived(num_layers, fence)


class TimedBatch:
    """A driver's batches, and the seconds their calls took."""

    def __init__(self, batch: BatchCopy) -> None:
        self.name, self.is_pinned, self._batch = batch.name, batch.is_pinned, batch
        self.seconds = 0.0

    def __call__(self, targets: Addresses, sources: Addresses, num_bytes: int, stream: int) -> None:
        start_s = time.perf_counter()
        self._batch(targets, sources, num_bytes, stream)
        self.seconds += time.perf_counter() - start_s


class LoadBench:
    """Pages that lie in L2, and what they were in L1."""

    def __init__(self, device: torch.device, *, is_small: bool) -> None:
        self.device = device
        self.link = link_rates(device, LINK_BYTES >> (5 if is_small else 0))["load_back"]
        num_pages = (1024 if is_small else CONTEXT_LEN) // PAGE_SIZE
        self.tiers = Tiers(device, num_pages, by_kernel=False)
        self.tiers.l1.kv.random_(-8, 8)
        self.before = self.tiers.l1.kv.clone()
        self.sums = self._sums(range(self.tiers.layout.num_layers), self.before)
        wait(device)
        self.tiers.move(MoveKind.WRITE_BACK)

    def lines(self) -> Iterator[dict[str, Any]]:
        """As the engine does it."""
        yield {"case": "link", "kind": "load_back", "gb_s": round(self.link, 2)}
        yield self._look()
        yield self._by_pages()
        yield self._by_layers()

    def trials(self) -> Iterator[dict[str, Any]]:
        """Other ways to copy by layers."""
        memory = self.tiers.memory
        if not isinstance(memory, CopiedMemory):
            return
        now = memory.by_layers
        yield self._trial(memory, "torch", LayerCopies(now.pages, now.lane, None))
        if now.batch is None:
            return
        for first, most in PIECE_KIB:
            sizes = {"first_bytes": first << 10, "most_bytes": most << 10}
            copies = LayerCopies(now.pages, now.lane, now.batch, **sizes)
            yield self._trial(memory, f"pieces of {first} to {most} KiB", copies)
        other = driver_batch_copy(now.pages.device.index or 0, flags=PREFER_OVERLAP)
        yield self._trial(memory, "prefer overlap", LayerCopies(now.pages, now.lane, other))

    def close(self) -> None:
        self.tiers.close()

    def _trial(self, memory: CopiedMemory, name: str, copies: LayerCopies) -> dict[str, Any]:
        memory.by_layers = copies
        return {**self._by_layers(), "trial": name}

    def _look(self) -> dict[str, Any]:
        """Microseconds a page, one by one and many at a time."""
        pool, moves = self.tiers.l2, self.tiers.moves(MoveKind.LOAD_BACK)
        slots, hashes = [m.source for m in moves], [m.page_hash for m in moves]
        best = {"one_us": float("inf"), "many_us": float("inf")}
        for _ in range(4):
            start_s = time.perf_counter()
            found = [pool.holds(*which) for which in zip(slots, hashes, strict=True)]
            middle_s = time.perf_counter()
            for at in range(0, len(slots), LOOK_PAGES):
                some = slice(at, at + LOOK_PAGES)
                found += pool.which_hold(slots[some], hashes[some])
            end_s = time.perf_counter()
            if not all(found):
                raise Differs("a page is not held")
            for name, seconds in (("one_us", middle_s - start_s), ("many_us", end_s - middle_s)):
                best[name] = min(best[name], round(seconds / len(moves) * 1e6, 2))
        return {"case": "look", "pages": len(moves), **best}

    def _by_pages(self) -> dict[str, Any]:
        times = []
        for _ in range(ROUNDS):
            self._forget()
            start_s = time.perf_counter()
            self.tiers.move(MoveKind.LOAD_BACK)
            times.append(time.perf_counter() - start_s)
            self._check("pages")
        return self._line("pages", times)

    def _by_layers(self) -> dict[str, Any]:
        """In a first round, not counted, a reader sums up each layer as it comes."""
        memory, found = self.tiers.memory, []
        timed = None
        if isinstance(memory, CopiedMemory) and memory.by_layers.batch is not None:
            timed = memory.by_layers.batch = TimedBatch(memory.by_layers.batch)
        for number in range(ROUNDS + 1):
            self._forget()
            before_s = timed.seconds if timed is not None else 0.0
            ends, group_s, all_s = self._load(looks=number == 0)
            calls_s = timed.seconds - before_s if timed is not None else 0.0
            self._check("layers")
            if number:
                found.append((all_s, ends, group_s, calls_s))
        _, ends, group_s, calls_s = min(found)
        group_ms = [round(seconds * 1e3, 2) for seconds in group_s]
        line = self._line("layers", [one[0] for one in found])
        by = memory.by_layers.name if isinstance(memory, CopiedMemory) else memory.kind
        line |= {"copies": by, "first_group_ms": group_ms[0]}
        line |= {"layers": ends, "group_ms": group_ms}
        return line | ({"calls_ms": round(calls_s * 1e3, 2)} if timed is not None else {})

    def _load(self, *, looks: bool) -> tuple[list[int], list[float], float]:
        """How many layers were there with each group, after how many seconds, and the seconds of
        all, acks and all."""
        num_layers = self.tiers.layout.num_layers
        load = NotedLoad(num_layers)
        start_s = time.perf_counter()
        self.tiers.engine.load_layers(self.tiers.moves(MoveKind.LOAD_BACK), load)
        times, sums, layer = list[float](), list[torch.Tensor](), 0
        while layer < num_layers:
            load.wait(layer)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # and not the stream of the copies
            times.append(time.perf_counter() - start_s)
            end = next((end for end in load.ends if end > layer), None)
            if end is None:
                raise Differs("the load is over, and not all layers are there")
            if looks:
                sums.append(self._sums(range(layer, end), self.tiers.l1.kv))
            layer = end
        if not self.tiers.engine.wait_idle(60):
            raise RuntimeError("the load does not end")
        all_s = time.perf_counter() - start_s
        if not all(ack.ok for ack in self.tiers.engine.take_acks()):
            raise Differs("a page was lost")
        if looks and not torch.equal(torch.cat(sums), self.sums):
            raise Differs("a layer was read before it was there")
        return load.ends, times, all_s

    def _forget(self) -> None:
        self.tiers.l1.kv.zero_()
        wait(self.device)

    def _check(self, way: str) -> None:
        wait(self.device)
        if not torch.equal(self.tiers.l1.kv, self.before):
            raise Differs(f"by {way}: bytes differ")

    def _sums(self, layers: range, kv: torch.Tensor) -> torch.Tensor:
        return torch.stack([kv[:, layer].float().sum() for layer in layers])

    def _line(self, way: str, times: list[float]) -> dict[str, Any]:
        gb_s = self.tiers.num_bytes / min(times) / 1e9
        return {
            "case": "load_back",
            "way": way,
            "mib": self.tiers.num_bytes >> 20,
            "gb_s": round(gb_s, 2),
            "share_of_link": round(gb_s / self.link, 3),
            "ms": round(min(times) * 1e3, 2),
            "ms_max": round(max(times) * 1e3, 2),
        }
