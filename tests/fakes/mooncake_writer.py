# SPDX-License-Identifier: Apache-2.0
"""Puts the pages of one prefix into Mooncake over and over: `python -m ... ENDPOINTS`.

Prints a line when all of them are there for the first time; it is killed in mid-write.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtiers.mooncake_store import MooncakeStore
from kvtiers.objects import object_bytes
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES, chain, pages

KEYS = chain("writer", 8)


def main() -> None:
    store = MooncakeStore(Path(sys.argv[1]), LAYOUT, object_bytes(PAGE_BYTES))
    assert store.put(KEYS, pages(KEYS)) == [True] * 8, store.status()
    print("kept", flush=True)
    for number in range(100_000):
        keys = chain(f"writer-{number}", 8)
        store.put(keys, pages(keys))


if __name__ == "__main__":
    main()
