# SPDX-License-Identifier: Apache-2.0
"""What share of their pages sessions find again in a file store too small for all of them.

The index without its files, beside the same with the plain order of last use. Prints one
JSON line a load: `python -m benchmarks.store_eviction [--trace FILE]` (a trace has JSON lines with
`hash_ids`, a page each).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtiers.file_store_index import PageIndex
from kvtiers.file_store_segments import Record
from kvtiers.page_order import NO_PARENT

SESSION_PAGES = 50
FITTING = 20  # sessions
BATCH = 16


class LeastRecentlyUsed(PageIndex):
    """Nothing is ever put on probation."""

    def _came_back_late(self, key_hash: bytes) -> bool:
        return False


def run(index: PageIndex, turns: Sequence[Sequence[bytes]], most: int, warm: int) -> float:
    """The share of pages found by turns from `warm` on: each reads the head, puts the rest."""
    found = asked = 0
    for number, turn in enumerate(turns):
        num_held = next((at for at, name in enumerate(turn) if name not in index), len(turn))
        index.touch(turn[:num_held])
        for start in range(num_held, len(turn), BATCH):
            batch = turn[start : start + BATCH]
            follows = [turn[start - 1] if start else NO_PARENT, *batch[:-1]]
            in_use = index.touch([*batch, *follows], proves=False)
            if len(in_use) + len(batch) > most:
                break
            while len(index) + len(batch) > most:
                index.evict(in_use)
            for name, parent in zip(batch, follows, strict=True):
                index.add(Record(name, parent, 0, "s", 0, 100))
            index.touch(batch, proves=False)
        if number >= warm:
            found, asked = found + num_held, asked + len(turn)
    return round(found / asked, 3)


def session(number: int) -> list[bytes]:
    return [f"{number}/{page}".encode() for page in range(SESSION_PAGES)]


def loads() -> Iterator[tuple[str, list[list[bytes]]]]:
    rng = random.Random(5)
    for times in (1.2, 2, 3):
        live = int(times * FITTING)
        yield f"loop {times}", [session(turn % live) for turn in range(40 * live)]
    yield "any next, 3", [session(rng.randrange(3 * FITTING)) for _ in range(2000)]
    for live in (15, 30):  # each turn in 20 a session is replaced by a new one
        names, turns, made = list(range(live)), [], live
        for turn in range(2000):
            if turn % 20 == 0:
                names[rng.randrange(live)] = made = made + 1
            turns.append(session(rng.choice(names)))
        yield f"{live} live, new ones come", turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids")
    trace = parser.parse_args().trace
    cases = [(name, turns, SESSION_PAGES * FITTING) for name, turns in loads()]
    if trace is not None:
        lines = [json.loads(line)["hash_ids"] for line in trace.open()]
        turns = [[str(page).encode() for page in line] for line in lines]
        cases += [(f"trace, {most} pages", turns, most) for most in (2_000, 10_000, 40_000)]
    for name, turns, most in cases:
        warm = len(turns) // 4
        lru = run(LeastRecentlyUsed(), turns, most, warm)
        print(
            json.dumps({"load": name, "lru": lru, "found": run(PageIndex(), turns, most, warm)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
