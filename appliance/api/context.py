# SPDX-License-Identifier: Apache-2.0
"""What a route works with: the services of its app, and who is calling.

Does not know: any route.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from appliance.cost_meter import CostMeter
from appliance.errors import ApiError
from appliance.history_room import HistoryRoom
from appliance.holds import HoldKeeper
from appliance.leases import LeaseService
from appliance.parking import Parking
from appliance.prefill import Prefiller
from appliance.services import DEFAULT_TENANT, Services
from appliance.session_history import SessionHistory
from appliance.session_items import ItemService
from appliance.session_service import SessionService
from appliance.session_views import SessionViews
from appliance.signals import SignalService
from appliance.turn_takeover import TurnTakeover
from appliance.turn_watchdog import TurnWatchdog
from appliance.turns import TurnService

T = TypeVar("T")
FILTERED_LIST = "/v1/sessions"
METADATA_FILTER = re.compile(r"metadata\[(.+)\]")


@dataclass(frozen=True, slots=True)
class ApiContext:
    """One per app."""

    services: Services
    turns: TurnService
    sessions: SessionService
    items: ItemService
    views: SessionViews
    history: SessionHistory
    leases: LeaseService
    prefiller: Prefiller
    room: HistoryRoom
    signals: SignalService
    parking: Parking
    holds: HoldKeeper
    meter: CostMeter
    watchdog: TurnWatchdog
    takeover: TurnTakeover


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


async def context_of(request: Request) -> ApiContext:
    """Return the app's context. As all dependencies here it is async: others cost a thread each."""
    context: ApiContext = request.app.state.context
    return context


async def caller_of(request: Request) -> str | None:
    """Return the caller's tenant; None is the admin, who may see every tenant.

    Raises: ApiError invalid_api_key.
    """
    services = (await context_of(request)).services
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if services.admin_key and hmac.compare_digest(key.encode(), services.admin_key.encode()):
        return None
    api_keys = services.config.server.api_keys
    if not api_keys:
        return DEFAULT_TENANT
    for known, tenant in api_keys.items():
        if hmac.compare_digest(key.encode(), known.encode()):
            return tenant
    raise ApiError("invalid_api_key", "no such API key; send Authorization: Bearer <key>")


async def admin_only(request: Request) -> None:
    """Raise ApiError unless the caller is the admin, or no keys are configured at all."""
    services = (await context_of(request)).services
    if await caller_of(request) is not None and services.config.server.api_keys:
        raise ApiError("invalid_api_key", "this endpoint is for the admin of the appliance")


async def known_query_only(request: Request) -> None:
    """Raise ApiError for a query parameter that its route does not know; none is ignored."""
    if not request.query_params:
        return
    route = request.scope["route"]
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        is_filter = route.path == FILTERED_LIST and METADATA_FILTER.fullmatch(name)
        if name not in known and not is_filter:
            allowed = f"known here: {', '.join(sorted(known))}" if known else "none is known here"
            raise ApiError("unknown_field", f"{name}: unknown query parameter; {allowed}", name)


Context = Annotated[ApiContext, Depends(context_of)]
Caller = Annotated[str | None, Depends(caller_of)]


async def or_client_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it where the client hangs up first. Raises: ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
