# SPDX-License-Identifier: Apache-2.0
"""Routes of a session beside its turns: rollback, export, import, leases, signals, live events.

Does not know: how any of it is done.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from appliance.api.context import Caller, Context, admin_only, known_query_only
from appliance.api.sse import event_stream
from appliance.api.wire_sessions import CompactCreate, LeaseCreate, Rollback, SignalCreate
from appliance.session_watch import watch_cache, watch_session

router = APIRouter(prefix="/v1", tags=["sessions"], dependencies=[Depends(known_query_only)])

JSON_LINES = "application/x-ndjson"


@router.post("/sessions/import")
async def import_session(request: Request, context: Context, caller: Caller) -> Any:
    """Make a new session from the lines that an export gave; new id, this tenant, same history."""
    return await context.history.import_(caller, await request.body())


@router.get("/sessions/{session_id}/export", response_class=StreamingResponse)
async def export_session(session_id: str, context: Context, caller: Caller) -> StreamingResponse:
    """Return the session as JSON lines: a header, one line a record, an end line."""
    lines = await context.history.export(caller, session_id)
    return StreamingResponse(lines, media_type=JSON_LINES)


@router.post("/sessions/{session_id}/rollback")
async def rollback_session(
    session_id: str, body: Rollback, context: Context, caller: Caller
) -> Any:
    """Go back to just behind a turn, an item or a revision: a new revision, the rest is gone."""
    return await context.history.rollback(caller, session_id, body)


@router.post("/sessions/{session_id}/compact")
async def compact_session(
    session_id: str, body: CompactCreate, context: Context, caller: Caller
) -> Any:
    """Put a summary, or items, in place of the older part; answers once that is done."""
    return await context.room.compact(caller, session_id, body)


@router.post("/sessions/{session_id}/suspend")
async def suspend_session(session_id: str, context: Context, caller: Caller) -> Any:
    """Flush the session's KV to the lowest tier and give up what lies above; a turn resumes it."""
    return await context.parking.suspend(caller, session_id)


@router.post("/sessions/{session_id}/resume")
async def resume_session(session_id: str, context: Context, caller: Caller) -> Any:
    """Bring the session's KV back to L1; says how many tokens were restored."""
    return await context.parking.resume(caller, session_id)


@router.post("/sessions/{session_id}/leases")
async def create_lease(session_id: str, body: LeaseCreate, context: Context, caller: Caller) -> Any:
    """Ask that a prefix of the history is evicted last; the answer says what was granted."""
    return await context.leases.create(caller, session_id, body)


@router.get("/sessions/{session_id}/leases")
async def list_leases(session_id: str, context: Context, caller: Caller) -> Any:
    """Return the live leases of a session."""
    return await context.leases.list(caller, session_id)


@router.delete("/sessions/{session_id}/leases/{lease_id}")
async def release_lease(session_id: str, lease_id: str, context: Context, caller: Caller) -> Any:
    """Let a lease go before its time."""
    await context.leases.release(caller, session_id, lease_id)
    return {"id": lease_id, "object": "lease", "deleted": True}


@router.post("/sessions/{session_id}/signals")
async def send_signal(session_id: str, body: SignalCreate, context: Context, caller: Caller) -> Any:
    """Say what goes on outside: a tool runs, the user types. The answer says what it changed."""
    return await context.signals.take(caller, session_id, body)


@router.get("/sessions/{session_id}/events", response_model=None)
async def session_events(session_id: str, context: Context, caller: Caller) -> Any:
    """Follow a session's life and residency as SSE, from now until it is closed."""
    frames = await watch_session(context.services, caller, session_id)
    return event_stream(frames, context.services.config.server.heartbeat_s)


@router.get("/cache/events", response_model=None, dependencies=[Depends(admin_only)])
async def cache_events(context: Context) -> Any:
    """Follow cache changes of every tenant as SSE; for the admin where keys are configured."""
    return event_stream(watch_cache(context.services), context.services.config.server.heartbeat_s)
