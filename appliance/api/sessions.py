# SPDX-License-Identifier: Apache-2.0
"""Routes of sessions: create, look, change, fork, append, close.

Does not know: how any of it is done.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from appliance.api.context import METADATA_FILTER, Caller, Context, known_query_only
from appliance.api.json_body import JsonRoute
from appliance.api.wire_sessions import ForkCreate, ItemsAppend, SessionCreate, SessionUpdate
from appliance.errors import ApiError
from sessions.ids import is_id
from sessions.store import ListQuery

router = APIRouter(
    prefix="/v1/sessions",
    tags=["sessions"],
    dependencies=[Depends(known_query_only)],
    route_class=JsonRoute,
)

Limit = Annotated[int, Query(ge=1, le=1000)]


@router.post("")
async def create_session(body: SessionCreate, context: Context, caller: Caller) -> Any:
    """Create a session; its instructions, tools and initial items are rendered once, now."""
    return await context.sessions.create(caller, body)


@router.get("")
async def list_sessions(
    request: Request,
    context: Context,
    caller: Caller,
    after: str | None = None,
    limit: Limit = 20,
    status: str | None = None,
    parent_session_id: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Any:
    """List sessions, newest first; `metadata[key]=value` narrows the list."""
    found = ((METADATA_FILTER.fullmatch(k), v) for k, v in request.query_params.items())
    metadata = {match.group(1): value for match, value in found if match is not None}
    if after is not None and not is_id(after, "sess"):
        raise ApiError("invalid_value", f"after: {after!r} is no id of a session", "after")
    query = ListQuery(
        tenant=caller,
        after=after,
        limit=limit,
        status=status,
        parent_session_id=parent_session_id,
        metadata=metadata,
        ascending=order == "asc",
    )
    return await context.sessions.list(query)


@router.get("/{session_id}")
async def get_session(session_id: str, context: Context, caller: Caller) -> Any:
    """Return a session."""
    return await context.sessions.get(caller, session_id)


@router.post("/{session_id}")
async def update_session(
    session_id: str, body: SessionUpdate, context: Context, caller: Caller
) -> Any:
    """Change mutable fields; new instructions or tools only between turns."""
    return await context.sessions.update(caller, session_id, body)


@router.delete("/{session_id}")
async def close_session(
    session_id: str,
    context: Context,
    caller: Caller,
    cache: Literal["release", "decay"] = "release",
) -> Any:
    """Close a session: its transcript is deleted, its unshared KV released or left to decay."""
    await context.sessions.close(caller, session_id, release=cache == "release")
    return {"id": session_id, "object": "session", "deleted": True}


@router.post("/{session_id}/items")
async def append_items(session_id: str, body: ItemsAppend, context: Context, caller: Caller) -> Any:
    """Append items without generating."""
    return await context.items.append(caller, session_id, body)


@router.get("/{session_id}/items")
async def list_items(
    session_id: str,
    context: Context,
    caller: Caller,
    after: str | None = None,
    limit: Limit = 100,
    order: Literal["asc", "desc"] = "asc",
) -> Any:
    """Return the transcript, page by page, oldest first."""
    return await context.views.items(
        caller, session_id, after=after, limit=limit, newest_first=order == "desc"
    )


@router.get("/{session_id}/tokens")
async def list_tokens(session_id: str, context: Context, caller: Caller) -> Any:
    """Return the exact token ids of the history."""
    return await context.views.tokens(caller, session_id)


@router.post("/{session_id}/fork")
async def fork_session(session_id: str, body: ForkCreate, context: Context, caller: Caller) -> Any:
    """Fork at a turn, an item or the head into n sessions that share the history so far."""
    return await context.sessions.fork(caller, session_id, body)


@router.get("/{session_id}/cache")
async def session_cache(session_id: str, context: Context, caller: Caller) -> Any:
    """Return where the session's KV is, what its last turn reused, and why not more."""
    return await context.views.cache(caller, session_id)
