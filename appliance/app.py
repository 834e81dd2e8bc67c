# SPDX-License-Identifier: Apache-2.0
"""create_app: the ASGI application with its routers, its error answers and its life.

Does not know: processes, sockets, how any route does its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from appliance.api import (
    admin,
    chat,
    completions,
    dashboard,
    health,
    history,
    implicit_sessions,
    messages,
    models,
    responses,
    sessions,
    stored_responses,
    tiers,
    turns,
)
from appliance.api.body_errors import as_body_error
from appliance.api.context import ApiContext
from appliance.body_text import BodyRefused
from appliance.cli_options import VERSION
from appliance.compaction import Compactor
from appliance.cost_meter import CostMeter
from appliance.errors import ApiError, as_api_error, error_body_for, error_headers
from appliance.history_room import HistoryRoom
from appliance.holds import HoldKeeper
from appliance.leases import LeaseService
from appliance.middleware import RequestFrame
from appliance.parking import Parking
from appliance.prefill import Prefiller
from appliance.services import Services
from appliance.session_history import SessionHistory
from appliance.session_items import ItemService
from appliance.session_service import SessionService
from appliance.session_views import SessionViews
from appliance.signals import SignalService
from appliance.tier_facts import TierWatch
from appliance.turn_takeover import TurnTakeover
from appliance.turn_watchdog import TurnWatchdog
from appliance.turns import TurnService
from engine.errors import EngineError, EngineUnavailableError
from sessions.errors import SessionError
from sessions.ttl import Sweeper
from tools_schema.errors import ToolSchemaError

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0
WAIT_FOR_ENGINE_S = 60.0
SWEEP_JOURNALS_EVERY_S = 5.0
# A request tries them in this order: turns are what most are about.
ROUTERS = tuple(
    module.router
    for module in (
        turns,
        history,
        sessions,
        implicit_sessions,
        chat,
        completions,
        responses,
        stored_responses,
        messages,
        models,
        health,
        dashboard,
        admin,
        tiers,
    )
)


def create_app(services: Services) -> FastAPI:
    """Return the application; it connects when it starts and lets go when it ends."""
    prefiller = Prefiller(services)
    room = HistoryRoom(services, Compactor(services, prefiller))
    turn_service = TurnService(services, room)
    leases, tiers = LeaseService(services), TierWatch(services.client)
    meter = CostMeter(services, tiers)
    turn_service.runner.ending.settle_cost = meter.settled
    context = ApiContext(
        services,
        turn_service,
        SessionService(services, turn_service),
        ItemService(services, prefiller, room),
        SessionViews(services, meter),
        SessionHistory(services),
        leases,
        prefiller,
        room,
        SignalService(services, tiers),
        Parking(services, leases, tiers, prefiller),
        HoldKeeper(services),
        meter,
        TurnWatchdog(services, turn_service.runner),
        TurnTakeover(services, turn_service),
    )
    app = FastAPI(
        title="Moorage",
        version=VERSION,
        lifespan=lambda app: _life(context),
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere into this origin
        redoc_url=None,
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    _add_error_answers(app)
    server = services.config.server
    if server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "X-Request-Id",
                "X-Turn-Id",
                "X-Session-Id",
                "Request-Id",
                "Retry-After",
            ],
        )
    app.add_middleware(
        RequestFrame,
        metrics=services.metrics,
        max_body_bytes=server.max_body_mb << 20,
        origins=server.cors_origins,
    )
    return app


@contextlib.asynccontextmanager
async def _life(context: ApiContext) -> AsyncIterator[None]:
    services = context.services
    try:
        await services.store.open()
    except SessionError as error:
        logger.error("session store: %s", error)
        raise
    await services.client.start()
    await context.takeover.recover()
    sweepers = [
        asyncio.create_task(context.takeover.run()),
        asyncio.create_task(context.turns.remote.run()),
        asyncio.create_task(context.meter.run()),
        asyncio.create_task(context.watchdog.run()),
        asyncio.create_task(_assert_leases(context)),
        asyncio.create_task(_sweep_forever(services)),
        asyncio.create_task(_sweep_journals_forever(services)),
    ]
    try:
        yield
    finally:
        services.hub.close()
        for sweeper in sweepers:
            sweeper.cancel()
        await context.turns.drain(services.config.server.drain_s)
        await services.background.close()
        await context.room.close()
        await context.signals.close()
        await context.holds.close()
        await context.leases.close()
        await context.prefiller.close()
        await services.client.close()
        await services.store.close()


async def _assert_leases(context: ApiContext) -> None:
    """Once there is an engine to ask: the first one may take minutes to load, and its coming is no
    restart. Those that come after it are asked as they come."""
    client = context.services.client
    while client.hello is None:
        with contextlib.suppress(EngineUnavailableError):
            await client.wait_ready(WAIT_FOR_ENGINE_S)
    try:
        await context.leases.assert_all()
    except SessionError as error:
        logger.warning("leases not asserted: %s", error)


async def _sweep_journals_forever(services: Services) -> None:
    """Keep ended turns out of memory, and old journals off the disk."""
    while True:
        services.journals.sweep()
        services.journals.sweep_files()
        await asyncio.sleep(SWEEP_JOURNALS_EVERY_S)


async def _sweep_forever(services: Services) -> None:
    """Expire idle sessions, forget old keys."""
    retention_ms = services.config.sessions.expired_retention_ms
    sweeper = Sweeper(services.store, services.store.clock_ms, retention_ms=retention_ms)
    while True:
        try:
            await sweeper.sweep()
        except SessionError as error:
            logger.warning("sweep: %s", error)
        await asyncio.sleep(SWEEP_EVERY_S)


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def on_body_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(request, as_body_error(error.errors(), _body_model(request)))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if isinstance(error, BodyRefused):
            return _answer(request, ApiError(error.code, message))
        if isinstance(error.__cause__, RecursionError):
            return _answer(request, ApiError("invalid_json", "the body is nested too deep"))
        known = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
        code = known.get(error.status_code, "invalid_request")
        if code != "method_not_allowed":
            return _answer(request, ApiError(code, message))
        methods = ", ".join(_methods_of(request))  # RFC 9110, 15.5.6: to be said
        answer = _answer(request, ApiError(code, f"{message} (allowed: {methods})"))
        answer.headers["Allow"] = methods
        return answer

    for kind in (ApiError, SessionError, EngineError, ToolSchemaError):
        app.add_exception_handler(kind, _on_room_error)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("internal error in %s %s", request.method, request.url.path, exc_info=error)
        return _answer(request, as_api_error(error))


def _routes_at(request: Request) -> Iterator[APIRoute]:
    """Routes of this request's path, whatever their method."""
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE:
            yield route


def _methods_of(request: Request) -> list[str]:
    return sorted({method for route in _routes_at(request) for method in route.methods or ()})


def _body_model(request: Request) -> object:
    """What the body of this request is read as; None where there is no one model."""
    for route in _routes_at(request):
        if request.method in (route.methods or ()) and route.body_field is not None:
            return route.body_field.field_info.annotation
    return None


async def _on_room_error(request: Request, error: Exception) -> JSONResponse:
    api_error = as_api_error(error)
    if api_error.code == "internal_error":
        logger.error("internal error in %s", request.url.path, exc_info=error)
    return _answer(request, api_error)


def _answer(request: Request, error: ApiError) -> JSONResponse:
    body = error_body_for(request.url.path, error)
    return JSONResponse(body, status_code=error.status, headers=error_headers(error))
