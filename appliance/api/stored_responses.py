# SPDX-License-Identifier: Apache-2.0
"""Routes of stored responses: read, watch, cancel, delete.

Does not know: how a response is made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from appliance.api.context import ApiContext, Caller, Context
from appliance.api.sse import event_stream
from appliance.errors import ApiError
from appliance.response_store import StoredResponse
from appliance.services import DEFAULT_TENANT

router = APIRouter(prefix="/v1/responses", tags=["openai"])


@router.get("/{response_id}", response_model=None)
async def get_response(
    response_id: str,
    context: Context,
    caller: Caller,
    stream: bool = False,
    starting_after: int = -1,
) -> Any:
    """Return a stored response; with `stream`, the events of one that was put in the background."""
    stored = context.services.responses.get(caller or DEFAULT_TENANT, response_id)
    if not stream:
        return stored.wire
    if stored.log is None:
        message = "stream: only with `background` are events of a response kept"
        raise ApiError("unsupported_parameter", message, "stream")
    heartbeat_s = context.services.config.server.heartbeat_s
    return event_stream(stored.log.read(starting_after), heartbeat_s)


@router.get("/{response_id}/input_items", response_model=None)
async def list_input_items(
    response_id: str,
    context: Context,
    caller: Caller,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Any:
    """Return the items of a stored response's own input, the last first where not told else."""
    stored = context.services.responses.get(caller or DEFAULT_TENANT, response_id)
    items = stored.input_items if order == "asc" else stored.input_items[::-1]
    start = 0
    if after:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError("item_not_found", f"after: no item {after[:64]!r} here", "after")
        start = places[0] + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


@router.delete("/{response_id}", response_model=None)
async def delete_response(response_id: str, context: Context, caller: Caller) -> Any:
    """Forget a stored response; one that still runs for a reader goes on, else it is stopped."""
    stored = context.services.responses.delete(caller or DEFAULT_TENANT, response_id)
    if stored.log is not None:
        await _stop(context, stored)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, context: Context, caller: Caller) -> Any:
    """Stop a stored response that still runs; one that has ended is returned as it is."""
    stored = context.services.responses.get(caller or DEFAULT_TENANT, response_id)
    await _stop(context, stored)
    return stored.wire


async def _stop(context: ApiContext, stored: StoredResponse) -> None:
    if stored.is_running:
        stored.is_cancelled = True
        stored.wire = {**stored.wire, "status": "cancelled"}
        await context.services.client.abort(stored.id)
