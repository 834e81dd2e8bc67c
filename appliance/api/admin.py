# SPDX-License-Identifier: Apache-2.0
"""Routes for the admin CLI: the radix tree, who holds how much, the engine's counters.

Does not know: how the CLI prints them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from appliance.api.context import ApiContext, Context, admin_only, known_query_only
from appliance.api.wire_sessions import QuotaBody
from appliance.cache_views import MAX_SESSIONS, cost_rows, locate, tenant_rows, tree_view
from appliance.doctor import examine
from sessions.quota import effective_quota
from sessions.store import TenantQuota

router = APIRouter(
    prefix="/admin", tags=["admin"], dependencies=[Depends(admin_only), Depends(known_query_only)]
)


@router.get("/cache/tree")
async def cache_tree(
    context: Context,
    max_nodes: Annotated[int, Query(ge=1, le=10_000)] = 256,
    depth: Annotated[int | None, Query(ge=1)] = None,
    session_id: str | None = None,
    tenant: str | None = None,
) -> Any:
    """Return a bounded snapshot of the engine's radix tree, or a part of it."""
    return await tree_view(
        context.services, max_nodes, depth=depth, session_id=session_id, tenant=tenant
    )


@router.get("/cache/top")
async def cache_top(
    context: Context,
    by: Literal["session", "tenant"] = "session",
    limit: Annotated[int, Query(ge=1, le=MAX_SESSIONS)] = 20,
) -> Any:
    """Return who has taken the most KV byte-seconds, the recently made sessions looked at."""
    rows = await cost_rows(context.services, context.meter)
    if by == "tenant":
        rows = tenant_rows(rows, context.meter.cost_of_gone())
    rows.sort(key=lambda row: -sum(row["cost"].values()))
    data = rows[:limit]
    if by == "session":
        await locate(context.services, data)
    return {"object": "list", "data": data, "has_more": len(rows) > limit}


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


@router.get("/quotas/{tenant}")
async def get_quota(tenant: str, context: Context) -> Any:
    """Return a tenant's limits, and what it has used of them."""
    return await _quota_wire(context, tenant)


@router.put("/quotas/{tenant}")
async def set_quota(tenant: str, body: QuotaBody, context: Context) -> Any:
    """Give a tenant limits of its own: a number, 0 for none, null for those of all."""
    own = TenantQuota(max_sessions=body.max_sessions, max_tokens=body.max_tokens)
    await context.services.set_quota(tenant, None if own == TenantQuota() else own)
    return await _quota_wire(context, tenant)


@router.get("/doctor")
async def doctor(context: Context) -> Any:
    """Look the running appliance over: what is wrong, what is odd, what is as it should be."""
    return await examine(context.services, context.turns, context.watchdog)


async def _quota_wire(context: ApiContext, tenant: str) -> dict[str, Any]:
    services = context.services
    own = await services.store.get_quota(tenant) or TenantQuota()
    quota = effective_quota(services.config.sessions, own)
    usage = await services.store.tenant_usage(tenant)
    return {
        "object": "quota",
        "tenant": tenant,
        "max_sessions": quota.max_sessions,
        "max_tokens": quota.max_tokens,
        "is_own": {
            "max_sessions": own.max_sessions is not None,
            "max_tokens": own.max_tokens is not None,
        },
        "sessions": usage.num_sessions,
        "tokens": usage.num_tokens,
    }
