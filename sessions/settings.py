# SPDX-License-Identifier: Apache-2.0
"""What a client fixes when it creates a session, and may later change in part.

Does not know: HTTP bodies (the API validates those and builds these values), model internals.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from sessions.durations import MAX_DURATION_MS, parse_duration
from sessions.errors import SettingError

ON_CONFLICT: Final = ("reject", "queue", "interrupt")
ON_DISCONNECT: Final = ("continue", "cancel")
ON_OVERFLOW: Final = ("error", "compact", "truncate_oldest")
REASONING_HISTORY: Final = ("keep", "drop_before_last_user")
TIERS: Final = ("l1", "l2", "l3")

# What may change after creation; the rest is part of the history's identity.
MUTABLE: Final = (
    "instructions",
    "tools",
    "tool_choice",
    "hold",
    "reasoning",
    "context",
    "on_conflict",
    "on_disconnect",
    "priority",
    "expires_after_ms",
)
# Changing one of these rewrites the head of the history, so the session must be idle.
HEAD_SETTINGS: Final = ("instructions", "tools", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTimes:
    """How long KV is wished to stay in each tier after the last use; a preference, no promise."""

    l1_ms: int = 30_000
    l2_ms: int = 3_600_000
    l3_ms: int = 86_400_000

    @classmethod
    def parse(
        cls, raw: object, now: HoldTimes | None = None, *, path: str = "cache.hold"
    ) -> HoldTimes:
        """From `{"l1": "30s", "l2": "60m", "l3": "24h"}`; a tier left out stays as it is in `now`,
        or gets its default.
        """
        if not isinstance(raw, dict):
            raise SettingError(f"{path}: expected an object, got {raw!r}", param=path)
        times: dict[str, int] = {}
        for tier, text in raw.items():
            if tier not in TIERS:
                raise SettingError(f"{path}.{tier}: unknown tier (l1, l2, l3)", param=path)
            times[f"{tier}_ms"] = parse_duration(text, path=f"{path}.{tier}")
        return replace(now or cls(), **times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPolicy:
    effort: str | None = None
    history: str = "keep"  # one of REASONING_HISTORY


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPolicy:
    """max_tokens None: the model's limit. Fractions are of that limit."""

    max_tokens: int | None = None
    on_overflow: str = "error"
    compact_at: float = 0.9
    compact_to: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """`tools` keep the key order the client sent: it is part of the rendered prefix."""

    instructions: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    reasoning: ReasoningPolicy = field(default_factory=ReasoningPolicy)
    hold: HoldTimes = field(default_factory=HoldTimes)
    lease: dict[str, Any] | None = None
    context: ContextPolicy = field(default_factory=ContextPolicy)
    on_conflict: str = "reject"
    on_disconnect: str = "continue"
    priority: int = 0
    expires_after_ms: int = 7 * 86_400_000
    strict_model: bool = False
    template_policy: str = ""  # the rendering policy, named by whoever renders

    def validate(self) -> None:
        """Raise `SettingError` for the first value out of range, naming its wire path."""
        _one_of("on_conflict", self.on_conflict, ON_CONFLICT)
        _one_of("on_disconnect", self.on_disconnect, ON_DISCONNECT)
        _one_of("reasoning.history", self.reasoning.history, REASONING_HISTORY)
        _one_of("context.on_overflow", self.context.on_overflow, ON_OVERFLOW)
        max_tokens = self.context.max_tokens
        if max_tokens is not None and not 1 <= max_tokens < 2**31:
            _fail("context.max_tokens", max_tokens, "at least 1, of 32 bits")
        if not 0.0 < self.context.compact_at <= 1.0:
            _fail("context.compact_at", self.context.compact_at, "above 0, at most 1")
        if not 0.0 < self.context.compact_to < self.context.compact_at:
            _fail("context.compact_to", self.context.compact_to, "above 0, below compact_at")
        if not 1 <= self.expires_after_ms <= MAX_DURATION_MS:
            _fail("expires_after", f"{self.expires_after_ms} ms", "a positive duration")
        for tier in TIERS:
            hold_ms = getattr(self.hold, f"{tier}_ms")
            if not 0 <= hold_ms <= MAX_DURATION_MS:
                _fail(f"cache.hold.{tier}", f"{hold_ms} ms", "a duration")
        if not -(2**31) <= self.priority < 2**31:
            _fail("priority", self.priority, "a number of 32 bits")

    def changed(self, **changes: Any) -> SessionSettings:
        """A validated copy with mutable settings replaced."""
        for name in changes:
            if name not in MUTABLE:
                raise SettingError(f"{name}: fixed when the session was created", param=name)
        settings = replace(self, **changes)
        settings.validate()
        return settings


def _one_of(path: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _fail(path, repr(value), f"one of {', '.join(allowed)}")


def _fail(path: str, value: object, wanted: str) -> None:
    raise SettingError(f"{path}: expected {wanted}, got {value}", param=path)
