# SPDX-License-Identifier: Apache-2.0
"""Which conversation an agent says a request belongs to, and the header that says it back.

It is the name of an implicit session: side requests (titles, sub-agents) share it, so it decides
no prefix. Does not know: any dialect's body beyond the fields that carry a name.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from appliance.implicit_sessions import SessionName

SESSION_HEADER = "X-Session-Id"
PARENT_HEADER = "x-parent-session-id"
HEADERS = (
    "x-session-id",
    "x-session-affinity",
    "x-affinity",
    "session-id",
    "x-claude-code-session-id",
    "x-litellm-session-id",
)
_NAME = re.compile(r"[\x21-\x7e]{1,128}\Z")


def session_name(request: Request, body: BaseModel) -> SessionName:
    """Return what the client calls its conversation, and the one this is a part of."""
    parent = request.headers.get(PARENT_HEADER, "")
    return SessionName(name=_own_name(request, body), parent=parent if _NAME.match(parent) else "")


def _own_name(request: Request, body: BaseModel) -> str:
    extra = body.model_extra or {}
    found = [request.headers.get(name) for name in HEADERS]
    for name in (*found, extra.get("prompt_cache_key"), _user_session(extra.get("metadata"))):
        if isinstance(name, str) and _NAME.match(name):
            return name
    return ""


def session_headers(name: SessionName) -> dict[str, str]:
    """Return the response header that says the name back; none where there is none."""
    return {SESSION_HEADER: name.name} if name.name else {}


def _user_session(metadata: Any) -> Any:
    """`metadata.user_id` may be JSON with a `session_id`."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str) or not user_id.startswith("{"):
        return None
    try:
        user = json.loads(user_id)
    except ValueError:
        return None
    return user.get("session_id") if isinstance(user, dict) else None
