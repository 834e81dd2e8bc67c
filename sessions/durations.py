# SPDX-License-Identifier: Apache-2.0
"""Durations as clients write them: "30s", "60m", "24h", "7d".

Does not know: clocks, nor what the durations are for.
"""

from __future__ import annotations

import re

from sessions.errors import SettingError

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
MAX_DURATION_MS = 999_999_999 * _UNIT_MS["d"]  # the longest that can be written
_DURATION = re.compile(r"(\d{1,9})(ms|s|m|h|d)\Z")


def parse_duration(raw: object, *, path: str) -> int:
    """Return a duration such as "30s", "60m", "24h" or "7d" in milliseconds.

    Raises `SettingError` naming the path.
    """
    match = _DURATION.match(raw) if isinstance(raw, str) else None
    if match is None:
        raise SettingError(
            f'{path}: expected a duration such as "30s", "60m", "24h" or "7d", got {raw!r}',
            param=path,
        )
    return int(match.group(1)) * _UNIT_MS[match.group(2)]


def format_duration(duration_ms: int) -> str:
    """The shortest exact text that `parse_duration` reads back."""
    for unit in ("d", "h", "m", "s"):
        if duration_ms and duration_ms % _UNIT_MS[unit] == 0:
            return f"{duration_ms // _UNIT_MS[unit]}{unit}"
    return f"{duration_ms}ms"
