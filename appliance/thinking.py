# SPDX-License-Identifier: Apache-2.0
"""An effort of reasoning as the variables that a model's chat template knows for it.

Does not know: sessions, which template it is.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from appliance.errors import ApiError

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES: Final = ("enable_thinking", "thinking")  # on or off
LEVEL: Final = "reasoning_effort"
LEVELS: Final = ("low", "medium", "high")  # what templates with a level know


def check_effort(effort: str, path: str) -> None:
    """Raise ApiError invalid_value for an effort nobody knows."""
    if effort not in EFFORTS:
        allowed = ", ".join(EFFORTS)
        raise ApiError("invalid_value", f"{path}: expected one of {allowed}, got {effort!r}", path)


def thinking_options(
    effort: str | None, variables: Set[str], path: str = "reasoning.effort"
) -> dict[str, Any]:
    """Return what to render with, so that the model thinks as much as is asked.

    Args:
        variables: names that the template takes from outside.
        path: the field that asks.

    Raises: ApiError invalid_value for an effort nobody knows, unsupported_parameter where the
    template has no variable for it.
    """
    if effort is None:
        return {}
    check_effort(effort, path)
    options: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in variables}
    if LEVEL in variables:
        if effort == "none" and not options:
            raise ApiError(
                "unsupported_parameter",
                f"{path}: 'none': this model always reasons (supported: {', '.join(LEVELS)})",
                path,
            )
        options[LEVEL] = _nearest_level(effort)
    if not options:
        raise ApiError(
            "unsupported_parameter",
            f"{path}: the chat template of this model has no switch for reasoning",
            path,
        )
    return options


def _nearest_level(effort: str) -> str:
    if effort in LEVELS:
        return effort
    return LEVELS[0] if effort in ("none", "minimal") else LEVELS[-1]
