# SPDX-License-Identifier: Apache-2.0
"""Durations parse to milliseconds and print back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.durations import format_duration, parse_duration
from sessions.errors import SettingError


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("250ms", 250), ("30s", 30_000), ("60m", 3_600_000), ("24h", 86_400_000), ("7d", 604_800_000)],
)
def test_units_are_milliseconds_to_days(text: str, duration_ms: int) -> None:
    assert parse_duration(text, path="x") == duration_ms


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=999_999_999))
def test_printed_durations_read_back(duration_ms: int) -> None:
    assert parse_duration(format_duration(duration_ms), path="x") == duration_ms


@pytest.mark.parametrize("raw", ["", "5", "s", "-1s", "1.5h", "5 s", "5S", "5s\n", 5, None, ["5s"]])
def test_anything_else_is_refused_with_its_path(raw: object) -> None:
    with pytest.raises(SettingError) as caught:
        parse_duration(raw, path="cache.hold.l1")
    assert caught.value.param == "cache.hold.l1"
    assert caught.value.code == "invalid_setting"
