# SPDX-License-Identifier: Apache-2.0
"""Puts pages into a file store for ever, one line for each flush: `python -m ... DIR QUOTA`.

Every line is the number of pages of each chain that are flushed by now; it is killed in mid-write.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtiers.file_store import FileStore
from tests.fakes.stored_pages import LAYOUT, chain, pages

CHAIN_LEN = 8


def main() -> None:
    store = FileStore(Path(sys.argv[1]), int(sys.argv[2]), LAYOUT)
    for number in range(10_000):
        keys = chain(f"c{number}", CHAIN_LEN)
        assert store.put(keys, pages(keys)) == [True] * CHAIN_LEN, store.status()
        if number % 4 == 3:
            assert store.flush(10.0)
            print(number + 1, flush=True)


if __name__ == "__main__":
    main()
