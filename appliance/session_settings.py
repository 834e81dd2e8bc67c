# SPDX-License-Identifier: Apache-2.0
"""Bodies of the session API -> the settings of the session room.

Does not know: stores, rendering.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from appliance.api.wire_sessions import (
    ContextBody,
    LeaseWish,
    SessionCreate,
    SessionUpdate,
)
from appliance.errors import ApiError
from sessions.durations import parse_duration
from sessions.leases import parse_ttl
from sessions.settings import ContextPolicy, HoldTimes, ReasoningPolicy, SessionSettings


def new_settings(body: SessionCreate, default_expiry_ms: int) -> SessionSettings:
    """Return the settings of a session that is being created. Raises SettingError."""
    lease = body.cache.lease if body.cache is not None else None
    if lease is not None:
        parse_ttl(lease.ttl, path="cache.lease.ttl")
    changes = {"expires_after_ms": default_expiry_ms, **changed_settings(body)}
    return SessionSettings(
        **changes,
        lease=lease.model_dump() if lease is not None else None,
        strict_model=body.strict_model,
        template_policy="append",
    )


def changed_settings(body: SessionCreate | SessionUpdate) -> dict[str, Any]:
    """Return the settings this body sets, as the session room names them. Raises SettingError."""
    changes: dict[str, Any] = {}
    for name in ("instructions", "tool_choice", "on_conflict", "on_disconnect", "priority"):
        if getattr(body, name) is not None:
            changes[name] = getattr(body, name)
    if body.tools is not None:
        changes["tools"] = tuple(body.tools)
    if isinstance(body, SessionUpdate) and body.cache is not None and body.cache.lease is not None:
        raise ApiError(
            "unsupported_parameter",
            "cache.lease: taken when the session is created; later, POST .../leases",
            "cache.lease",
        )
    if body.cache is not None and body.cache.hold is not None:
        changes["hold"] = HoldTimes.parse(body.cache.hold)
    if body.reasoning is not None:
        changes["reasoning"] = ReasoningPolicy(
            effort=body.reasoning.effort, history=body.reasoning.history
        )
    if body.context is not None:
        changes["context"] = _context_policy(body.context)
    if body.expires_after is not None:
        changes["expires_after_ms"] = parse_duration(body.expires_after, path="expires_after")
    return changes


def check_imported(settings: SessionSettings) -> None:
    """Raise ApiError or SettingError for settings of an imported session that cannot be."""
    if settings.lease is not None:
        try:
            wish = LeaseWish.model_validate(settings.lease)
        except ValidationError as error:
            raise ApiError("invalid_import", f"body: cache.lease: {error}", "body") from error
        parse_ttl(wish.ttl, path="cache.lease.ttl")


def _context_policy(context: ContextBody) -> ContextPolicy:
    return ContextPolicy(
        max_tokens=context.max_tokens,
        on_overflow=context.on_overflow,
        compact_at=context.compact_at,
        compact_to=context.compact_to,
    )
