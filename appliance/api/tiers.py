# SPDX-License-Identifier: Apache-2.0
"""Routes for the admin CLI about the KV tiers: how they are, drained, checked.

Does not know: how pages move, what the CLI prints.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from appliance.api.context import Context, admin_only, known_query_only

router = APIRouter(
    prefix="/admin", tags=["admin"], dependencies=[Depends(admin_only), Depends(known_query_only)]
)


@router.get("/tiers")
async def tiers(context: Context) -> Any:
    """Return state, size and counters of L1, L2 and L3."""
    statuses = await context.services.client.tiers()
    return {
        "object": "list",
        "data": [
            {
                "tier": status.tier,
                "kind": status.kind,
                "state": status.state,
                "reason": status.reason,
                "used_bytes": status.used_bytes,
                "capacity_bytes": status.capacity_bytes,
                "num_pages": status.num_pages,
                "counters": status.counters,
            }
            for status in statuses
        ],
    }


@router.post("/tiers/drain")
async def drain(
    context: Context, timeout_s: Annotated[float, Query(ge=0.0, le=600.0)] = 10.0
) -> Any:
    """Finish the write-backs and stores under way, and make the store keep what it has."""
    reply = await context.services.client.drain_tiers(timeout_s=timeout_s)
    return {
        "num_pages": reply.num_pages,
        "num_lost": reply.num_lost,
        "num_pending": reply.num_pending,
        "is_flushed": reply.is_flushed,
    }


@router.post("/cache/verify")
async def verify(
    context: Context, max_pages: Annotated[int, Query(ge=0, le=1 << 20)] = 4096
) -> Any:
    """Read pages of L2 and L3 back and check every byte of them."""
    reply = await context.services.client.verify_tiers(max_pages=max_pages)
    return {"checked": reply.checked, "bad": reply.bad}
