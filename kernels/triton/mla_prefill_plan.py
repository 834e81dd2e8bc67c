# SPDX-License-Identifier: Apache-2.0
"""Work list of MLA prefill attention over expanded keys and values, made on the host.

Owns: where each row's KV lies in the expanded buffer, which program computes which queries over
which KV tiles, and which partial results are merged. Does not know: kernels, page tables' content.

The buffer holds the KV of all rows one behind the other, each from a multiple of a tile on and
filled up with zeros, so that no tile holds tokens of two rows. A work item is one tile of queries
over a run of KV tiles, for every head. Where the query tiles alone would leave processors idle,
their KV is cut into parts of equal length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Start, end and merge of an item cost about as much as so many tiles; a part has at least as many.
ITEM_TILES = 4
MIN_TILES = 8
MAX_PARTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Device int32: `pages` [pages, 4] = (slot, index in its table, tokens, 0); `items` [items, 8]
    = (first query token, queries, first KV row, KV tiles, tokens that the first query sees of
    them, partial result or -1, 0, 0); `merges` [split tiles, 4] = (first query token, queries,
    first partial result, parts)."""

    num_kv: int
    num_partials: int
    num_items: int
    num_merges: int
    pages: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor


def choose_parts(
    tiles: np.ndarray[tuple[int], np.dtype[np.int64]], num_heads: int, num_processors: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """In how many parts to cut the KV of each query tile, from its number of KV tiles."""
    best: tuple[float, np.ndarray[tuple[int], np.dtype[np.int64]]] | None = None
    for most in range(1, MAX_PARTS + 1):
        parts = np.clip(tiles // MIN_TILES, 1, most)
        lengths = -(-tiles // parts) + ITEM_TILES
        num_items = int(parts.sum()) * num_heads
        total = float((lengths * parts).sum()) * num_heads
        longest = float(lengths.max())
        if longest * num_items < 1.3 * total:  # items alike: they run in waves
            cost = -(-num_items // num_processors) * total / num_items
        else:  # long ones first: what is left over at the end is short
            cost = max(longest, total / num_processors + longest / 4)
        if best is None or cost < 0.99 * best[0]:
            best = (cost, parts)
    assert best is not None
    return best[1]


@functools.lru_cache(maxsize=8)
def make_plan(
    slots: Sequence[int],
    starts: Sequence[int],
    lens: Sequence[int],
    *,
    num_heads: int,
    page_size: int,
    block_m: int,
    tile: int,
    num_processors: int,
    device: torch.device,
) -> PrefillPlan:
    """One step's plan, for all its layers.

    Args:
        slots: row of the page table of each row.
        starts: first query token of each row, and the number of tokens.
        lens: tokens of each row after this step.
    """
    pages: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
    query_tiles: list[tuple[int, int, int, int, int]] = []  # row, KV base, past, q from, q to
    base = 0
    for row, (slot, length) in enumerate(zip(slots, lens, strict=True)):
        first, end = starts[row], starts[row + 1]
        padded = -(-length // tile) * tile
        index = np.arange(padded // page_size)
        tokens = np.clip(length - index * page_size, 0, page_size)
        index = np.minimum(index, (length - 1) // page_size)
        pages.append(np.stack((np.full_like(index, slot), index, tokens, 0 * index), axis=1))
        query_tiles += [
            (row, base, length - (end - first), at - first, min(at - first + block_m, end - first))
            for at in range(first, end, block_m)
        ]
        base += padded
    tiles = np.array([-(-(past + to) // tile) for _, _, past, _, to in query_tiles])
    parts = choose_parts(tiles, num_heads, num_processors)
    first_partials = np.cumsum(np.where(parts > 1, parts, 0)) - np.where(parts > 1, parts, 0)
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, int, int, int]] = []
    for number, (row, kv_base, past, at, to) in enumerate(query_tiles):
        count, first_partial = int(parts[number]), int(first_partials[number])
        q_row = starts[row] + at
        if count > 1:
            merges.append((q_row, to - at, first_partial, count))
        for part in range(count):
            begin = int(tiles[number]) * part // count
            stop = int(tiles[number]) * (part + 1) // count
            items.append(
                (
                    row,
                    part,
                    -number,
                    q_row,
                    to - at,
                    kv_base + begin * tile,
                    stop - begin,
                    past + at + 1 - begin * tile,
                    first_partial + part if count > 1 else -1,
                    0,
                    0,
                )
            )
    # Tiles that read the same keys and values run side by side, the longest of a row first.
    items.sort()

    def on_device(table: object, columns: int) -> torch.Tensor:
        host = torch.from_numpy(np.asarray(table, dtype=np.int32).reshape(-1, columns))
        return host.to(device, non_blocking=True)

    return PrefillPlan(
        num_kv=base,
        num_partials=int(np.where(parts > 1, parts, 0).sum()),
        num_items=len(items),
        num_merges=len(merges),
        pages=on_device(np.concatenate(pages), 4),
        items=on_device([item[3:] for item in items], 8),
        merges=on_device(merges, 4),
    )
