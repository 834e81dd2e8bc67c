# SPDX-License-Identifier: Apache-2.0
"""A bounded picture of what is cached: the radix tree of L1, and below it what only L2 and L3 have.

Pages of the lower tiers are joined to runs: as long as one page follows the other alone and in the
same tiers. Does not know: sessions, text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _scheduler import LowerPage, Scheduler, TreeNode
from engine import api
from engine.transport import pack_ids

MAX_NODES = 10_000
MAX_LOWER_PAGES = 65_536  # looked at; a look costs about a microsecond a page
ROOT = -1


def tree_reply(
    scheduler: Scheduler, query_id: str, max_nodes: int, page_size: int
) -> api.TreeReply:
    """Answer a question for at most so many nodes, those of L1 first."""
    wanted = max(0, min(max_nodes, MAX_NODES))
    found = scheduler.tree(wanted + 1)
    nodes = [_node(node) for node in found[:wanted]]
    lower = scheduler.lower_pages(MAX_LOWER_PAGES)
    runs = lower_runs(lower, {node.page_hash: node.node_id for node in nodes}, page_size)
    room = wanted - len(nodes)
    is_cut = len(found) > wanted or len(runs) > room or len(lower) == MAX_LOWER_PAGES
    return api.TreeReply(query_id=query_id, nodes=(*nodes, *runs[:room]), truncated=is_cut)


def lower_runs(
    pages: Sequence[LowerPage], ends: Mapping[bytes, int], page_size: int
) -> list[api.TreeNode]:
    """The pages as nodes with ids below -1. `ends`: nodes above them, by their last page.

    The head of a chain comes before what follows it.
    """
    by_hash = {page.page_hash: page for page in pages}
    children: dict[bytes, list[LowerPage]] = {}
    for page in pages:
        children.setdefault(page.parent_hash, []).append(page)
    heads = [(page, ends.get(page.parent_hash, ROOT)) for page in pages
             if page.parent_hash not in by_hash]  # fmt: skip
    nodes: list[api.TreeNode] = []
    while heads:
        head, parent_id = heads.pop(0)
        run = _run_from(head, children)
        node_id = ROOT - 1 - len(nodes)
        followers = children.get(run[-1].page_hash, [])
        heads += [(follower, node_id) for follower in followers]
        nodes.append(
            api.TreeNode(
                node_id=node_id,
                parent_id=parent_id,
                num_tokens=len(run) * page_size,
                num_pages=len(run),
                num_children=len(followers),
                num_users=0,
                last_used_ms=0,
                page_hash=run[-1].page_hash,
                first_token_ids=b"",
                num_l1_pages=0,
                num_l2_pages=len(run) if head.in_l2 else 0,
                num_l3_pages=len(run) if head.in_l3 else 0,
            )
        )
    return nodes


def _run_from(head: LowerPage, children: Mapping[bytes, Sequence[LowerPage]]) -> list[LowerPage]:
    run = [head]
    while True:
        followers = children.get(run[-1].page_hash, ())
        if len(followers) != 1:
            return run
        follower = followers[0]
        if (follower.in_l2, follower.in_l3) != (head.in_l2, head.in_l3):
            return run
        run.append(follower)


def _node(node: TreeNode) -> api.TreeNode:
    return api.TreeNode(
        node_id=node.node_id,
        parent_id=node.parent_id,
        num_tokens=node.num_tokens,
        num_pages=node.num_pages,
        num_children=node.num_children,
        num_users=node.num_users,
        last_used_ms=node.last_used_ms,
        page_hash=node.page_hash,
        first_token_ids=pack_ids(node.first_token_ids),
        num_l1_pages=node.num_pages,
        num_l2_pages=node.num_l2_pages,
        num_l3_pages=node.num_l3_pages,
    )
