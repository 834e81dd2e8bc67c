# SPDX-License-Identifier: Apache-2.0
"""Routes that show implicit sessions: what stateless requests shared, and where they branched.

Does not know: how requests are told apart.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from appliance.api.context import Caller, Context, known_query_only

router = APIRouter(
    prefix="/v1/implicit_sessions", tags=["sessions"], dependencies=[Depends(known_query_only)]
)


@router.get("")
async def list_implicit_sessions(context: Context, caller: Caller) -> Any:
    """List the conversations of stateless clients, by the names they gave; last used first."""
    found = context.services.implicit_sessions.list(caller)
    return {"object": "list", "data": [session.as_wire() for session in found]}


@router.get("/{name:path}")
async def get_implicit_session(name: str, context: Context, caller: Caller) -> Any:
    """Return one of them with its last requests: what of each was known, recalled and cached."""
    session = context.services.implicit_sessions.get(caller, name)
    return {**session.as_wire(), "recent": [asked.as_wire() for asked in session.recent]}
