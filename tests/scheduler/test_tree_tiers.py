# SPDX-License-Identifier: Apache-2.0
"""What the snapshots say of the tiers, against where each page of a prefix is found."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from engine.loop.tree_view import tree_reply
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel

PAGE = 4


@pytest.fixture
def harness() -> Harness:
    config = cpp.SchedulerConfig(
        page_size=PAGE, num_pages=12, max_slots=2, max_context_len=60, token_budget=16,
        num_l2_pages=50, use_l3=True,
    )  # fmt: skip
    made = Harness(config, ToyModel())
    made.mover = TierMover(config, made.device, random.Random(1))
    made.mover.delay = 0.0
    return made


def run(harness: Harness, prompt: list[int]) -> None:
    harness.submit(prompt, 1)
    harness.run()
    for _ in range(8):
        harness.step()


def test_every_page_is_shown_once_with_the_tiers_that_have_it(harness: Harness) -> None:
    prompts = [list(range(20)), [*range(12), *range(50, 58)], list(range(100, 144))]
    for prompt in prompts:
        run(harness, prompt)
    found = [harness.scheduler.query_prefix(np.array(prompt, np.int32)) for prompt in prompts]
    stats = harness.check()
    nodes, lower = harness.scheduler.tree(1000), harness.scheduler.lower_pages()
    assert sum(node.num_pages for node in nodes) == stats["cached_pages"]
    in_l2 = sum(node.num_l2_pages for node in nodes) + sum(page.in_l2 for page in lower)
    assert in_l2 == stats["cached_l2_pages"]
    in_l3 = sum(node.num_l3_pages for node in nodes) + sum(page.in_l3 for page in lower)
    assert in_l3 == stats["cached_l3_pages"] > 0
    # What the first two have in common is counted once; the last one took the room of the others.
    assert found[2].l1 >= 40 and lower and any(hit.l2 or hit.l3 for hit in found[:2])
    assert len(harness.scheduler.lower_pages(1)) == 1
    reply = tree_reply(harness.scheduler, "q", 1000, PAGE)
    assert not reply.truncated
    below = [node for node in reply.nodes if node.node_id < -1]
    assert sum(node.num_pages for node in below) == len(lower)
    ids = {node.node_id for node in reply.nodes}
    assert len(ids) == len(reply.nodes)
    assert all(node.parent_id in ids or node.parent_id == -1 for node in reply.nodes)
    cut = tree_reply(harness.scheduler, "q", len(nodes), PAGE)
    assert cut.truncated and len(cut.nodes) == len(nodes)
