# SPDX-License-Identifier: Apache-2.0
"""What the admin may see of the cache: the radix tree, narrowed, and who has taken how much of it.

Does not know: HTTP, how it is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from appliance.cost_meter import CostMeter
from appliance.services import Services
from appliance.session_views import copies_wire, cost_wire
from engine.api import TreeNode
from engine.errors import EngineError
from sessions.errors import SessionError
from sessions.residency import HASH_BYTES, TierCost
from sessions.store import ListQuery
from sessions.token_codec import decode_ids

MAX_SESSIONS = 200  # newest ones that are looked at


async def tree_view(
    services: Services,
    max_nodes: int,
    *,
    depth: int | None = None,
    session_id: str | None = None,
    tenant: str | None = None,
) -> dict[str, Any]:
    """Return the tree's nodes: down to a depth, on a session's path, of a tenant's sessions.

    Raises: SessionNotFound; EngineUnavailableError.
    """
    reply = await services.client.tree(max_nodes)
    nodes = list(reply.nodes)
    if session_id is not None or tenant is not None:
        nodes = on_paths(nodes, await _page_names(services, session_id, tenant))
    if depth is not None:
        depths = depths_of(nodes)
        nodes = [node for node in nodes if depths[node.node_id] < depth]
    return {
        "object": "cache.tree",
        "truncated": reply.truncated,
        "nodes": [_node_wire(services, node) for node in nodes],
    }


def on_paths(nodes: Sequence[TreeNode], page_names: set[bytes]) -> list[TreeNode]:
    """The nodes that end with one of these pages, and all above them."""
    by_id = {node.node_id: node for node in nodes}
    kept: set[int] = set()
    for node in nodes:
        at: TreeNode | None = node if node.page_hash in page_names else None
        while at is not None and at.node_id not in kept:
            kept.add(at.node_id)
            at = by_id.get(at.parent_id)
    return [node for node in nodes if node.node_id in kept]


def depths_of(nodes: Sequence[TreeNode]) -> dict[int, int]:
    """How many of these nodes lie above each."""
    parents = {node.node_id: node.parent_id for node in nodes}
    depths: dict[int, int] = {}
    for node_id in parents:
        path = [node_id]
        while (parent := parents[path[-1]]) in parents and path[-1] not in depths:
            path.append(parent)
        base = depths.get(path[-1], 0)
        for distance, at in enumerate(reversed(path)):
            depths[at] = base + distance
    return depths


async def cost_rows(services: Services, meter: CostMeter) -> list[dict[str, Any]]:
    """Byte-seconds of the newest sessions, and how many tokens each tier has a copy of."""
    page = await services.store.list_sessions(ListQuery(limit=MAX_SESSIONS))
    rows: list[dict[str, Any]] = []
    for session in page.sessions:
        rows.append(
            {
                "session_id": session.id,
                "tenant": session.tenant,
                "status": session.status,
                "tokens_total": session.num_tokens,
                "copies": copies_wire(meter.copies(session.id)),
                "cost": cost_wire(meter.cost_of(session)),
            }
        )
    return rows


async def locate(services: Services, rows: Iterable[dict[str, Any]]) -> None:
    """Put into rows where a turn would find each token, as the session's own cache view says."""
    for row in rows:
        try:
            session = await services.store.get(row["session_id"])
            token_ids = await services.store.read_tokens(session)
            salt = services.salt_of(session.tenant)
            hit = await services.client.query_prefix(token_ids, salt=salt, timeout_s=2.0)
            row["resident"] = {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3}
        except (EngineError, SessionError):  # no engine, or the session went meanwhile
            row["resident"] = None


def tenant_rows(
    rows: Iterable[Mapping[str, Any]], gone: Mapping[str, TierCost]
) -> list[dict[str, Any]]:
    """The same by tenant, closed sessions included."""
    by_tenant: dict[str, dict[str, Any]] = {
        tenant: {"tenant": tenant, "sessions": 0, "tokens_total": 0, "cost": cost_wire(cost)}
        for tenant, cost in gone.items()
    }
    for row in rows:
        fresh = {"tenant": row["tenant"], "sessions": 0, "tokens_total": 0}
        total = by_tenant.setdefault(row["tenant"], {**fresh, "cost": cost_wire(TierCost())})
        total["sessions"] += 1
        total["tokens_total"] += row["tokens_total"]
        for name, value in row["cost"].items():
            total["cost"][name] = round(total["cost"][name] + value, 1)
    return list(by_tenant.values())


async def _page_names(services: Services, session_id: str | None, tenant: str | None) -> set[bytes]:
    if session_id is not None:
        sessions = (await services.store.get(session_id, tenant=tenant),)
    else:
        query = ListQuery(tenant=tenant, limit=MAX_SESSIONS)
        sessions = (await services.store.list_sessions(query)).sessions  # type: ignore[assignment]
    names: set[bytes] = set()
    for session in sessions:
        hashes = (await services.store.read_log(session)).page_hashes
        names.update(
            hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)
        )
    return names


def _node_wire(services: Services, node: TreeNode) -> dict[str, Any]:
    text = services.assets.tokenizer.decode(decode_ids(node.first_token_ids), with_control=True)
    return {
        "node_id": node.node_id,
        "parent_id": node.parent_id,
        "num_tokens": node.num_tokens,
        "num_pages": node.num_pages,
        "tiers": {
            "l1": node.num_l1_pages,
            "l2": node.num_l2_pages,
            "l3": node.num_l3_pages,
        },
        "num_children": node.num_children,
        "num_users": node.num_users,
        "last_used_ms": node.last_used_ms,
        "page_hash": node.page_hash.hex(),
        "text": text,
    }
