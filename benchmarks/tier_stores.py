# SPDX-License-Identifier: Apache-2.0
"""Measures the L3 stores: put and get of 1 MiB pages in batches of 32. Prints JSON lines.

    python -m benchmarks.tier_stores [--store file] [--store mooncake] [--directory DIR]

Both stores are used as an engine uses them, with breaker and deadlines around, and every byte read
is verified. Figures are the median of rounds over the same 256 MiB of keys that are new in each
round; `first_put` is a round that touches memory or disk for the first time. `put_full` is into a
store at its quota, where each page puts out another. Mooncake runs as children of this process, by
shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from appliance.children import MooncakeChildren, MooncakeSettings
from kvtiers.objects import object_bytes, seal
from kvtiers.store import Store, StoreState
from kvtiers.stores import StoreSpec, open_store

PAGE_BYTES = 1 << 20
NUM_PAGES = 256
BATCH = 32
ROUNDS = 7
LAYOUT = "5a" * 16
FULL_ROUNDS = 5
BAR_GB_S = {
    ("mooncake", "put"): 1.5,
    ("mooncake", "put_full"): 1.5,
    ("mooncake", "get"): 1.5,
    ("file", "get"): 1.5,
}


class Pages:
    """Sealed pages, as a host pool holds them, and buffers to read them into."""

    def __init__(self) -> None:
        shape = (NUM_PAGES, object_bytes(PAGE_BYTES))
        self._pool = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self._into = np.zeros(shape, np.uint8)
        self.keys: list[str] = []

    def rename(self, round_: int) -> None:
        """New keys: what is put is not there yet."""
        self.keys = [f"bench/{round_}/{page}" for page in range(NUM_PAGES)]
        for key, blob in zip(self.keys, self._pool, strict=True):
            seal(blob.data, key, LAYOUT)

    def batches(self, *, to_read: bool) -> Iterator[tuple[list[str], list[memoryview]]]:
        rows = self._into if to_read else self._pool
        for start in range(0, NUM_PAGES, BATCH):
            end = start + BATCH
            yield self.keys[start:end], [row.data for row in rows[start:end]]

    def are_read(self) -> bool:
        return bool(np.array_equal(self._pool, self._into))


def measure(store: Store, pages: Pages) -> dict[str, list[float]]:
    """GB/s of each round: put, and get of the same."""
    rates: dict[str, list[float]] = {"put": [], "get": []}
    for round_ in range(ROUNDS):
        pages.rename(round_)
        start_s = time.perf_counter()
        kept = [all(store.put(keys, blobs)) for keys, blobs in pages.batches(to_read=False)]
        rates["put"].append(NUM_PAGES * PAGE_BYTES / (time.perf_counter() - start_s) / 1e9)
        start_s = time.perf_counter()
        found = [all(store.get(keys, into)) for keys, into in pages.batches(to_read=True)]
        rates["get"].append(NUM_PAGES * PAGE_BYTES / (time.perf_counter() - start_s) / 1e9)
        if not (all(kept) and all(found) and pages.are_read()):
            raise SystemExit(f"round {round_}: not all pages came back: {store.status()}")
        store.remove(pages.keys)
    return rates | {"put_full": measure_full(store, pages)}


def measure_full(store: Store, pages: Pages) -> list[float]:
    """GB/s of puts that make others go; the first rounds fill the store, and are left out."""
    rates: list[float] = []
    while len(rates) <= FULL_ROUNDS:
        pages.rename(ROUNDS + store.status().counters["puts"])
        before = store.status().counters["evicted"]
        start_s = time.perf_counter()
        kept = [all(store.put(keys, blobs)) for keys, blobs in pages.batches(to_read=False)]
        took_s = time.perf_counter() - start_s
        if not all(kept):
            raise SystemExit(f"not all pages were taken: {store.status()}")
        if store.status().counters["evicted"] - before >= NUM_PAGES - BATCH:
            rates.append(NUM_PAGES * PAGE_BYTES / took_s / 1e9)
    return rates


@contextmanager
def opened(kind: str, directory: Path) -> Iterator[Store]:
    """The store, ready; ends its processes afterwards."""
    children: MooncakeChildren | None = None
    if kind == "mooncake":
        settings = MooncakeSettings(segment_bytes=2 * NUM_PAGES * PAGE_BYTES)
        children = MooncakeChildren(settings, directory)
        children.start()
    store = open_store(
        StoreSpec(
            kind=kind,
            layout_fingerprint=LAYOUT,
            object_bytes=object_bytes(PAGE_BYTES),
            directory=str(directory),
            quota_bytes=8 * NUM_PAGES * PAGE_BYTES,
            run_dir=str(directory),
        )
    )
    assert store is not None
    try:
        deadline_s = time.monotonic() + 30
        while store.status().state is not StoreState.UP:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{kind}: {store.status().reason}")
            if children is not None:
                children.watch()
            time.sleep(0.05)
        yield store
    finally:
        store.close()
        if children is not None:
            children.stop()


def report(kind: str, rates: dict[str, list[float]]) -> None:
    for case, values in rates.items():
        line: dict[str, object] = {
            "case": f"{kind}_{case}_1mib",
            "unit": "GB/s",
            "median": round(statistics.median(values[1:]), 2),
            "min": round(min(values[1:]), 2),
            "max": round(max(values[1:]), 2),
            "first": round(values[0], 2),
            "rounds": len(values) - 1,
        }
        bar = BAR_GB_S.get((kind, case))
        if bar is not None:
            line |= {"bar": f">= {bar}", "reached": statistics.median(values[1:]) >= bar}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--store", action="append", choices=("file", "mooncake"))
    parser.add_argument("--directory", help="where the file store is measured")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "commit": commit}
    print(json.dumps({"bench": "tier_stores", **machine, "date": time.strftime("%Y-%m-%d")}))
    pages = Pages()
    for kind in arguments.store or ("file", "mooncake"):
        with (
            tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
            opened(kind, Path(directory)) as store,
        ):
            report(kind, measure(store, pages))


if __name__ == "__main__":
    main()
