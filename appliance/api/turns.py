# SPDX-License-Identifier: Apache-2.0
"""Routes of turns: run, watch, replay, cancel.

Does not know: how a turn runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse

from appliance.api.context import (
    ApiContext,
    Caller,
    ClientGone,
    Context,
    known_query_only,
    or_client_gone,
)
from appliance.api.json_body import JsonRoute
from appliance.api.sse import cursor_of, event_stream
from appliance.api.wire_sessions import TurnCreate
from appliance.errors import STATUS_BY_CODE, ApiError, known_code
from appliance.middleware import RECEIVED_S
from appliance.turn_events import TurnEvents, terminal_frame
from appliance.turn_preparation import Ask
from appliance.turn_run import TERMINAL_EVENT, TurnRun
from appliance.turn_view import terminal_fields

router = APIRouter(
    prefix="/v1/sessions/{session_id}/turns",
    tags=["turns"],
    dependencies=[Depends(known_query_only)],
    route_class=JsonRoute,
)

MAX_KEY_LEN = 255


@router.post("", response_model=None)
async def create_turn(
    session_id: str,
    body: TurnCreate,
    request: Request,
    context: Context,
    caller: Caller,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Any:
    """Run a turn: append the input and generate. With `stream`, the events come as SSE."""
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= MAX_KEY_LEN:
        raise ApiError(
            "invalid_value", f"Idempotency-Key: 1 to {MAX_KEY_LEN} characters", "Idempotency-Key"
        )
    ask = Ask(
        tenant=caller,
        session_id=session_id,
        body=body,
        idempotency_key=idempotency_key,
        body_hash=body_hash(body),
        received_s=request.scope[RECEIVED_S],
    )
    turn_id = await context.turns.start(ask)
    run = context.turns.runner.find(turn_id, session_id)
    if await _cancels_on_disconnect(context, caller, session_id, run):
        context.turns.cancel_when_unread(session_id, turn_id)
    if body.stream:
        if run is not None:  # no need to ask the store, while the turn is on its way
            return _event_stream(context, run.events, 0)
        return await _stream(context, caller, session_id, turn_id, 0)
    try:
        turn = await or_client_gone(request, context.turns.reader.wait(caller, session_id, turn_id))
    except ClientGone:
        return JSONResponse({}, status_code=499)
    return _final_answer(turn)


@router.get("")
async def list_turns(session_id: str, context: Context, caller: Caller) -> Any:
    """Return the turns of the history, and the one that runs now."""
    return await context.views.turns(caller, session_id)


@router.get("/{turn_id}")
async def get_turn(session_id: str, turn_id: str, context: Context, caller: Caller) -> Any:
    """Return a turn: its status, or its items and usage once it has ended."""
    return await context.turns.reader.get(caller, session_id, turn_id)


@router.get("/{turn_id}/events", response_model=None)
async def turn_events(
    session_id: str,
    turn_id: str,
    request: Request,
    context: Context,
    caller: Caller,
    starting_after: int | None = None,
) -> Any:
    """Replay a turn's events above a sequence number, then follow it live."""
    events = await context.turns.reader.events(caller, session_id, turn_id)
    return _event_stream(context, events, cursor_of(request, starting_after))


@router.post("/{turn_id}/cancel")
async def cancel_turn(session_id: str, turn_id: str, context: Context, caller: Caller) -> Any:
    """Stop a turn and return it as it ended; on an ended turn nothing happens."""
    return await context.turns.cancel(caller, session_id, turn_id)


def body_hash(body: TurnCreate) -> str:
    """Return what two bodies share if they ask for the same turn (streamed or not)."""
    values = body.model_dump(exclude={"stream"}, exclude_unset=True)
    return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()


async def _cancels_on_disconnect(
    context: ApiContext, caller: str | None, session_id: str, run: TurnRun | None
) -> bool:
    if run is not None:
        return run.session.settings.on_disconnect == "cancel"
    session = await context.services.store.get(session_id, tenant=caller)
    return session.settings.on_disconnect == "cancel"


async def _stream(
    context: ApiContext, caller: str | None, session_id: str, turn_id: str, after: int
) -> Any:
    try:
        events = await context.turns.reader.events(caller, session_id, turn_id)
    except ApiError as error:
        if error.code != "events_expired":
            raise
        # An old Idempotency-Key: its turn is told by the one event that says it all.
        turn = await context.turns.reader.get(caller, session_id, turn_id)
        if turn["status"] not in TERMINAL_EVENT:
            raise
        frame = terminal_frame(TERMINAL_EVENT[turn["status"]], turn, terminal_fields(turn))
        return event_stream(_once(frame), context.services.config.server.heartbeat_s)
    return _event_stream(context, events, after)


def _event_stream(context: ApiContext, events: TurnEvents, after: int) -> Any:
    return event_stream(
        events.read(after),
        context.services.config.server.heartbeat_s,
        {"X-Turn-Id": events.turn_id},
        readers=context.services.metrics.stream_readers,
    )


async def _once(frame: bytes) -> AsyncIterator[bytes]:
    yield frame


def _final_answer(turn: dict[str, Any]) -> Any:
    """The turn; one that failed answers with its error's status and says which turn it was."""
    error = turn.get("error")
    if turn["status"] != "failed" or error is None:
        return turn
    status = STATUS_BY_CODE[known_code(error.get("code"))]
    return JSONResponse({"error": {**error, "turn_id": turn["id"]}}, status_code=status)
