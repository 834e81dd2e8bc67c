# SPDX-License-Identifier: Apache-2.0
"""Routes for those who watch the appliance: alive, ready, metrics, version.

Does not know: what the metrics mean.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from appliance.api.context import Context
from appliance.cli_options import VERSION
from engine.errors import EngineUnavailableError

router = APIRouter(tags=["operations"])

STATS_WAIT_S = 1.0


@router.get("/health")
async def health(context: Context) -> Any:
    """Say that this process is alive; `degraded` while turns make no progress."""
    stalled = context.watchdog.stalled
    return {
        "status": "degraded" if stalled else "ok",
        "engine_ready": context.services.client.is_ready,
        "stalled_turns": stalled,
    }


@router.get("/ready")
async def ready(context: Context) -> Any:
    """Say whether a turn would be served now: 200, or 503 with what is missing.

    A tier that is not up costs time and no turn: it is a warning.
    """
    engine_ready = context.services.client.is_ready
    store = await context.services.store.health()
    is_ready = engine_ready and store.ok and not context.turns.is_draining
    body = {
        "ready": is_ready,
        "engine": "ready" if engine_ready else "starting",
        "store": {"kind": store.kind, "ok": store.ok, "detail": store.detail},
        "warnings": [*store.warnings, *(await _tier_warnings(context) if engine_ready else ())],
        "draining": context.turns.is_draining,
    }
    return JSONResponse(body, status_code=200 if is_ready else 503)


async def _tier_warnings(context: Context) -> list[str]:
    """Name the tiers that are not up, and why; empty where the engine does not answer in time."""
    try:
        tiers = await context.services.client.tiers(timeout_s=STATS_WAIT_S)
    except EngineUnavailableError:
        return []
    return [
        f"tier {tier.tier}: {tier.kind} {tier.state}" + (f": {tier.reason}" if tier.reason else "")
        for tier in tiers
        if tier.state not in ("up", "off")
    ]


@router.get("/metrics")
async def metrics(context: Context) -> Response:
    """Return every series in Prometheus' text format, the engine's own included."""
    services = context.services
    is_up = services.client.is_ready
    services.metrics.engine_up.set(1.0 if is_up else 0.0)
    if is_up:
        try:
            stats = await services.client.stats(timeout_s=STATS_WAIT_S)
            services.metrics.engine_stats.stats = stats
            services.metrics.tiers.statuses = await services.client.tiers(timeout_s=STATS_WAIT_S)
        except EngineUnavailableError:
            services.metrics.engine_up.set(0.0)
    return Response(services.metrics.render(), media_type="text/plain; version=0.0.4")


@router.get("/version")
async def version() -> Any:
    """Return the version of Moorage."""
    return {"version": VERSION}
