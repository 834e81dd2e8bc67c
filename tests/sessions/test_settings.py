# SPDX-License-Identifier: Apache-2.0
"""Session settings have the documented defaults and refuse values out of range."""

from __future__ import annotations

from typing import Any

import pytest

from sessions.errors import SettingError
from sessions.settings import ContextPolicy, HoldTimes, ReasoningPolicy, SessionSettings


def test_defaults_are_the_documented_ones() -> None:
    settings = SessionSettings()
    settings.validate()
    assert settings.hold == HoldTimes(l1_ms=30_000, l2_ms=3_600_000, l3_ms=86_400_000)
    assert (settings.on_conflict, settings.on_disconnect) == ("reject", "continue")
    assert settings.reasoning.history == "keep"
    assert settings.context == ContextPolicy(on_overflow="error", compact_at=0.9, compact_to=0.6)
    assert settings.expires_after_ms == 7 * 24 * 3600 * 1000


def test_hold_times_parse_and_keep_defaults() -> None:
    hold = HoldTimes.parse({"l1": "5s", "l3": "2d"})
    assert hold == HoldTimes(l1_ms=5_000, l2_ms=3_600_000, l3_ms=172_800_000)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({"l4": "1s"}, "cache.hold"),
        ({"l1": 5}, "cache.hold.l1"),
        ("30s", "cache.hold"),
    ],
)
def test_bad_hold_times_are_refused(raw: object, param: str) -> None:
    with pytest.raises(SettingError) as caught:
        HoldTimes.parse(raw)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"on_conflict": "wait"}, "on_conflict"),
        ({"on_disconnect": "stop"}, "on_disconnect"),
        ({"reasoning": ReasoningPolicy(history="drop")}, "reasoning.history"),
        ({"context": ContextPolicy(on_overflow="trim")}, "context.on_overflow"),
        ({"context": ContextPolicy(max_tokens=0)}, "context.max_tokens"),
        ({"context": ContextPolicy(compact_at=1.5)}, "context.compact_at"),
        ({"context": ContextPolicy(compact_at=0.5, compact_to=0.5)}, "context.compact_to"),
        ({"expires_after_ms": 0}, "expires_after"),
    ],
)
def test_values_out_of_range_are_refused_with_their_path(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(SettingError) as caught:
        SessionSettings(**fields).validate()
    assert caught.value.param == param


def test_only_mutable_settings_change() -> None:
    changed = SessionSettings().changed(priority=2, on_conflict="queue")
    assert (changed.priority, changed.on_conflict) == (2, "queue")
    thinks = SessionSettings().changed(reasoning=ReasoningPolicy(history="drop_before_last_user"))
    assert thinks.reasoning.history == "drop_before_last_user"
    with pytest.raises(SettingError, match="strict_model: fixed"):
        SessionSettings().changed(strict_model=True)
    with pytest.raises(SettingError, match="on_conflict"):
        SessionSettings().changed(on_conflict="never")
