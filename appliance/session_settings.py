# SPDX-License-Identifier: Apache-2.0
"""Bodies of the session API -> the settings of the session room; and what is refused for now.

Does not know: stores, rendering.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from appliance.api.wire_sessions import (
    CacheBody,
    ContextBody,
    ItemsAppend,
    LeaseWish,
    SessionCreate,
    SessionUpdate,
)
from appliance.errors import ApiError
from sessions.durations import parse_duration
from sessions.settings import ContextPolicy, HoldTimes, ReasoningPolicy, SessionSettings


def new_settings(body: SessionCreate, default_expiry_ms: int) -> SessionSettings:
    """Return the settings of a session that is being created. Raises SettingError."""
    reasoning = body.reasoning
    lease = body.cache.lease if body.cache is not None else None
    if lease is not None:
        parse_duration(lease.ttl, path="cache.lease.ttl")
    changes = {"expires_after_ms": default_expiry_ms, **changed_settings(body)}
    return SessionSettings(
        **changes,
        reasoning=ReasoningPolicy(
            effort=reasoning.effort if reasoning else None,
            history=reasoning.history if reasoning else "keep",
        ),
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
    if body.cache is not None:
        changes.update(_cache_changes(body.cache))
    if body.context is not None:
        changes["context"] = _context_policy(body.context)
    if body.expires_after is not None:
        changes["expires_after_ms"] = parse_duration(body.expires_after, path="expires_after")
    return changes


def refuse_unsupported(body: SessionCreate | SessionUpdate | ItemsAppend) -> None:
    """Raise ApiError for a value of the contract that this server cannot honour yet."""
    refused: list[tuple[str, Any, Any]] = []
    if isinstance(body, ItemsAppend):
        refused += [
            ("partial", body.partial, (False,)),
            ("final", body.final, (False,)),
            ("call_id", body.call_id, (None,)),
        ]
    else:
        if body.cache is not None:
            tier = body.cache.lease.tier if body.cache.lease is not None else "l1"
            refused.append(("cache.lease.tier", tier, ("l1",)))
            if isinstance(body, SessionUpdate):
                refused.append(("cache.lease", body.cache.lease, (None,)))
        if body.context is not None:
            refused.append(("context.on_overflow", body.context.on_overflow, ("error",)))
    if isinstance(body, SessionCreate) and body.reasoning is not None:
        refused.append(("reasoning.effort", body.reasoning.effort, (None,)))
        refused.append(("reasoning.history", body.reasoning.history, ("keep",)))
    for path, value, allowed in refused:
        if value not in allowed:
            raise ApiError(
                "unsupported_parameter",
                f"{path}: {value!r} is not supported yet (supported: {allowed[-1]!r})",
                path,
            )


def refuse_unsupported_settings(settings: SessionSettings) -> None:
    """Raise ApiError for settings of an imported session that this server cannot honour yet."""
    refused = [
        ("context.on_overflow", settings.context.on_overflow, "error"),
        ("reasoning.effort", settings.reasoning.effort, None),
        ("reasoning.history", settings.reasoning.history, "keep"),
    ]
    for path, value, allowed in refused:
        if value != allowed:
            raise ApiError(
                "unsupported_parameter",
                f"body: {path}: {value!r} is not supported yet (supported: {allowed!r})",
                path,
            )
    if settings.lease is not None:
        try:
            wish = LeaseWish.model_validate(settings.lease)
        except ValidationError as error:
            raise ApiError("invalid_import", f"body: cache.lease: {error}", "body") from error
        parse_duration(wish.ttl, path="cache.lease.ttl")


def _cache_changes(cache: CacheBody) -> dict[str, Any]:
    return {} if cache.hold is None else {"hold": HoldTimes.parse(cache.hold)}


def _context_policy(context: ContextBody) -> ContextPolicy:
    return ContextPolicy(
        max_tokens=context.max_tokens,
        on_overflow=context.on_overflow,
        compact_at=context.compact_at,
        compact_to=context.compact_to,
    )
