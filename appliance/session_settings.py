# SPDX-License-Identifier: Apache-2.0
"""Bodies of the session API -> the settings of the session room.

Does not know: stores, rendering.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from appliance.api.wire_sessions import (
    LeaseWish,
    SessionCreate,
    SessionUpdate,
)
from appliance.errors import ApiError
from sessions.durations import parse_duration
from sessions.leases import parse_ttl
from sessions.settings import HoldTimes, SessionSettings


def new_settings(body: SessionCreate, default_expiry_ms: int) -> SessionSettings:
    """Return the settings of a session that is being created. Raises SettingError."""
    lease = body.cache.lease if body.cache is not None else None
    if lease is not None:
        parse_ttl(lease.ttl, path="cache.lease.ttl")
    changes = {"expires_after_ms": default_expiry_ms, **changed_settings(body, SessionSettings())}
    return SessionSettings(
        **changes,
        lease=lease.model_dump() if lease is not None else None,
        strict_model=body.strict_model,
        template_policy="append",
    )


def changed_settings(body: SessionCreate | SessionUpdate, now: SessionSettings) -> dict[str, Any]:
    """Return the settings this body sets, as the session room names them.

    What it leaves out stays as it is in `now`, inside `reasoning`, `context` and `cache.hold` too.
    Raises SettingError.
    """
    changes: dict[str, Any] = {}
    for name in ("tool_choice", "on_conflict", "on_disconnect", "priority"):
        if getattr(body, name) is not None:
            changes[name] = getattr(body, name)
    if "instructions" in body.model_fields_set:  # null takes them away
        changes["instructions"] = body.instructions
    if body.tools is not None:
        changes["tools"] = tuple(body.tools)
    if isinstance(body, SessionUpdate) and body.cache is not None and body.cache.lease is not None:
        raise ApiError(
            "unsupported_parameter",
            "cache.lease: taken when the session is created; later, POST .../leases",
            "cache.lease",
        )
    if body.cache is not None and body.cache.hold is not None:
        changes["hold"] = HoldTimes.parse(body.cache.hold, now.hold)
    if body.reasoning is not None:
        changes["reasoning"] = replace(
            now.reasoning, **body.reasoning.model_dump(exclude_unset=True)
        )
    if body.context is not None:
        changes["context"] = replace(now.context, **body.context.model_dump(exclude_unset=True))
    if body.expires_after is not None:
        changes["expires_after_ms"] = parse_duration(body.expires_after, path="expires_after")
    return changes


def check_context(settings: SessionSettings, limit: int) -> None:
    """Raise ApiError for a session that wants to hold more tokens than the model can."""
    wanted = settings.context.max_tokens
    if wanted is not None and wanted > limit:
        raise ApiError(
            "invalid_setting",
            f"context.max_tokens: {wanted} is more than the {limit} tokens that the model holds",
            "context.max_tokens",
        )


def fitting(settings: SessionSettings, limit: int) -> SessionSettings:
    """The settings of a session from elsewhere, with the context that there is room for here."""
    wanted = settings.context.max_tokens
    if wanted is None or wanted <= limit:
        return settings
    return replace(settings, context=replace(settings.context, max_tokens=limit))


def check_imported(settings: SessionSettings) -> None:
    """Raise ApiError or SettingError for settings of an imported session that cannot be."""
    if settings.lease is not None:
        try:
            wish = LeaseWish.model_validate(settings.lease)
        except ValidationError as error:
            raise ApiError("invalid_import", f"body: cache.lease: {error}", "body") from error
        parse_ttl(wish.ttl, path="cache.lease.ttl")
