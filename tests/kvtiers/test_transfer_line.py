# SPDX-License-Identifier: Apache-2.0
"""Stores that wait: random trees of pages against what a set can say of them."""

from __future__ import annotations

import random

import pytest

from kvtiers.host_pool import PageName
from kvtiers.transfer_line import StoreLine
from kvtiers.transfer_queues import Move, MoveKind

ROOT = bytes(16)


class Forest:
    """Pages with names, parents and depths; every offer of a page has a ticket of its own."""

    def __init__(self) -> None:
        self.parent: dict[bytes, bytes] = {}
        self.depth: dict[bytes, int] = {ROOT: 0}
        self._num_tickets = 0

    def grow(self, parent: bytes) -> bytes:
        page = (len(self.parent) + 1).to_bytes(16, "big")
        self.parent[page] = parent
        self.depth[page] = self.depth[parent] + 1
        return page

    def chain(self, length: int, parent: bytes = ROOT) -> list[bytes]:
        pages = []
        for _ in range(length):
            parent = self.grow(parent)
            pages.append(parent)
        return pages

    def offer(self, page: bytes) -> Move:
        self._num_tickets += 1
        name = PageName(
            page_hash=page,
            parent_hash=self.parent[page],
            token_ids=b"",
            salt="",
            start=self.depth[page] - 1,
        )
        return Move(
            ticket=self._num_tickets,
            kind=MoveKind.STORE,
            source=0,
            target=-1,
            page_hash=page,
            name=name,
        )

    def heads_of(self, page: bytes) -> set[bytes]:
        heads = set()
        while (page := self.parent[page]) != ROOT:
            heads.add(page)
        return heads


def make_line(most: int) -> StoreLine:
    return StoreLine(most, lambda move: move.name.parent_hash if move.name else b"")


def hashes(moves: list[Move]) -> list[bytes]:
    return [move.page_hash for move in moves]


def test_the_end_of_the_prefix_that_waits_longest_gives_way_first() -> None:
    forest, line = Forest(), make_line(4)
    old, new = forest.chain(4), forest.chain(6)
    assert line.put([forest.offer(page) for page in old]) == []
    assert hashes(line.put([forest.offer(new[0]), forest.offer(new[1])])) == [old[3], old[2]]
    # What follows a page that gave way goes with it, until that page is offered again.
    late = forest.grow(old[3])
    assert hashes(line.put([forest.offer(late)])) == [late]
    assert hashes(line.put([forest.offer(new[2])])) == [old[1]]
    assert hashes(line.take(9)) == [old[0], new[0], new[1], new[2]]
    assert line.put([forest.offer(late), *map(forest.offer, reversed(old[1:]))]) == []
    assert hashes(line.take(9)) == [*old[1:], late]


def test_a_prefix_longer_than_the_line_keeps_its_head() -> None:
    forest, line = Forest(), make_line(8)
    pages = forest.chain(100)
    gone = [page for page in pages for page in hashes(line.put([forest.offer(page)]))]
    assert (hashes(line.take(99)), sorted(gone)) == (pages[:8], sorted(pages[8:]))
    # In one piece, from its end on: as a suspend tells of it.
    gone = hashes(line.put([forest.offer(page) for page in reversed(pages)]))
    assert (hashes(line.take(99)), sorted(gone)) == (pages[:8], sorted(pages[8:]))


@pytest.mark.parametrize("seed", range(60))
def test_no_head_ever_gives_way_before_its_tail(seed: int) -> None:
    rng = random.Random(seed)
    forest, line = Forest(), make_line(rng.randint(1, 12))
    pages: list[bytes] = []
    waiting: dict[int, bytes] = {}
    stored: set[bytes] = set()

    def give_way(moves: list[Move], *, is_lost: bool) -> None:
        for move in moves:
            assert waiting.pop(move.ticket) == move.page_hash
        standing = {head for page in waiting.values() for head in forest.heads_of(page)}
        assert is_lost or not standing & set(hashes(moves)), "a head went, and what follows waits"

    for _ in range(120):
        what = rng.random()
        if what < 0.6:
            # A prefix goes on somewhere, and all of it that is not there is offered, heads first.
            start = rng.choice([ROOT, *pages])
            pages += forest.chain(rng.randint(1, 5), start)
            wanted = [*sorted(forest.heads_of(pages[-1]), key=forest.depth.__getitem__), pages[-1]]
            batch = [
                forest.offer(page)
                for page in wanted
                if page not in stored and page not in waiting.values()
            ]
            rng.shuffle(batch)
            waiting |= {move.ticket: move.page_hash for move in batch}
            give_way(line.put(batch), is_lost=False)
        else:
            taken = line.take(rng.randint(1, 6))
            refused: list[bytes] = []
            for move in taken:
                assert waiting.pop(move.ticket) == move.page_hash
                is_behind = forest.heads_of(move.page_hash) & set(refused)
                if is_behind or rng.random() < 0.1:
                    refused.append(move.page_hash)
                else:
                    stored.add(move.page_hash)
            give_way(line.lose(refused), is_lost=True)
        assert len(line) == len(waiting)
        # Each stored page has all the pages before it: nothing is kept that is worth nothing.
        assert all(forest.heads_of(page) <= stored for page in stored)
    left = line.clear()
    assert {move.ticket for move in left} == set(waiting) and len(line) == 0
    assert hashes(line.take(5)) == []
