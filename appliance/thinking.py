# SPDX-License-Identifier: Apache-2.0
"""`reasoning.effort` as the variables that a model's chat template knows for it.

Does not know: sessions, which template it is.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from appliance.errors import ApiError

EFFORTS: Final = ("none", "minimal", "low", "medium", "high")
SWITCHES: Final = ("enable_thinking", "thinking")  # on or off
LEVEL: Final = "reasoning_effort"
LEVELS: Final = ("low", "medium", "high")  # what templates with a level know


def thinking_options(effort: str | None, variables: Set[str]) -> dict[str, Any]:
    """Return what to render with, so that the model thinks as much as is asked.

    Args:
        variables: names that the template takes from outside.

    Raises: ApiError invalid_value for an effort nobody knows, unsupported_parameter where the
    template has no variable for it.
    """
    if effort is None:
        return {}
    path = "reasoning.effort"
    if effort not in EFFORTS:
        allowed = ", ".join(EFFORTS)
        raise ApiError("invalid_value", f"{path}: expected one of {allowed}, got {effort!r}", path)
    options: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in variables}
    if LEVEL in variables:
        if effort == "none" and not options:
            raise ApiError(
                "unsupported_parameter",
                f"{path}: 'none': this model always reasons (supported: {', '.join(LEVELS)})",
                path,
            )
        options[LEVEL] = effort if effort in LEVELS else LEVELS[0]
    if not options:
        raise ApiError(
            "unsupported_parameter",
            f"{path}: the chat template of this model has no switch for reasoning",
            path,
        )
    return options
