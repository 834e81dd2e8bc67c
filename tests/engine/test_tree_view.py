# SPDX-License-Identifier: Apache-2.0
"""The picture of what is cached: L1's tree, and runs of pages that only lower tiers have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.loop.tree_view import ROOT, lower_runs

ZEROS = bytes(16)


def page(name: str, parent: str, *, in_l2: bool = True, in_l3: bool = False) -> Any:
    parent_hash = parent.encode() if parent else ZEROS
    return SimpleNamespace(
        page_hash=name.encode(), parent_hash=parent_hash, in_l2=in_l2, in_l3=in_l3
    )


def test_pages_are_joined_while_one_follows_the_other_alone_and_in_the_same_tiers() -> None:
    pages = [
        page("a", "l1 end"),
        page("b", "a"),
        page("c", "b", in_l3=True),  # another tier
        page("d", "c", in_l3=True),
        page("e", "d", in_l3=True),  # two follow
        page("f", "d", in_l3=True),
        page("g", ""),  # nothing above it is in L1
    ]
    runs = lower_runs(pages, {b"l1 end": 7}, 4)
    rows = [(r.page_hash.decode(), r.parent_id, r.num_pages, r.num_children) for r in runs]
    assert rows == [("b", 7, 2, 1), ("g", ROOT, 1, 0), ("d", -2, 2, 2), ("e", -4, 1, 0),
                    ("f", -4, 1, 0)]  # fmt: skip
    assert [r.node_id for r in runs] == [-2, -3, -4, -5, -6]
    assert [(r.num_tokens, r.num_l1_pages, r.num_l2_pages, r.num_l3_pages) for r in runs][::2] == [
        (8, 0, 2, 0),
        (8, 0, 2, 2),
        (4, 0, 1, 1),
    ]
