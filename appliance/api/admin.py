# SPDX-License-Identifier: Apache-2.0
"""Routes for the admin CLI: the radix tree, who holds how much, the engine's counters.

Does not know: how the CLI prints them.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from appliance.api.context import Context, admin_only
from sessions.store import ListQuery
from sessions.token_codec import decode_ids

router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(admin_only)])

MAX_TOP_SESSIONS = 200


@router.get("/cache/tree")
async def cache_tree(
    context: Context, max_nodes: Annotated[int, Query(ge=1, le=10_000)] = 256
) -> Any:
    """Return a bounded snapshot of the engine's radix tree."""
    services = context.services
    reply = await services.client.tree(max_nodes)
    tokenizer = services.assets.tokenizer
    return {
        "object": "cache.tree",
        "truncated": reply.truncated,
        "nodes": [
            {
                "node_id": node.node_id,
                "parent_id": node.parent_id,
                "num_tokens": node.num_tokens,
                "num_pages": node.num_pages,
                "num_children": node.num_children,
                "num_users": node.num_users,
                "last_used_ms": node.last_used_ms,
                "page_hash": node.page_hash.hex(),
                "text": tokenizer.decode(decode_ids(node.first_token_ids), with_control=True),
            }
            for node in reply.nodes
        ],
    }


@router.get("/cache/top")
async def cache_top(
    context: Context, limit: Annotated[int, Query(ge=1, le=MAX_TOP_SESSIONS)] = 20
) -> Any:
    """Return the sessions with the most tokens resident, the recently made ones looked at."""
    services = context.services
    page = await services.store.list_sessions(ListQuery(limit=MAX_TOP_SESSIONS))
    rows: list[dict[str, Any]] = []
    for session in page.sessions:
        token_ids = await services.store.read_tokens(session)
        hit = await services.client.query_prefix(token_ids, salt=services.salt_of(session.tenant))
        rows.append(
            {
                "session_id": session.id,
                "tenant": session.tenant,
                "status": session.status,
                "tokens_total": session.num_tokens,
                "resident": {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3},
            }
        )
    rows.sort(key=lambda row: -sum(row["resident"].values()))
    return {"object": "list", "data": rows[:limit], "has_more": len(rows) > limit}


@router.get("/leases")
async def leases(context: Context) -> Any:
    """Return the live leases of every session."""
    return await context.leases.list_all()


@router.get("/engine/stats")
async def engine_stats(context: Context) -> Any:
    """Return the engine's counters and gauges."""
    hello = context.services.client.hello
    return {
        "instance_id": hello.instance_id if hello is not None else None,
        "stats": await context.services.client.stats(),
    }
