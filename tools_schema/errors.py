# SPDX-License-Identifier: Apache-2.0
"""Owns the errors of this room. Does not know: HTTP codes, logging.

Tree::

    ToolSchemaError(ValueError)
      InvalidSchemaError       code invalid_schema       a schema is wrong or over a cap
      InvalidToolChoiceError   code invalid_tool_choice  tool_choice and its companions
      UnknownFormatError       code unknown_tool_format  no format of that name
      ReasoningUnsupportedError  code reasoning_unsupported  the format has no reasoning tags
"""

from __future__ import annotations

import json

_SHOWN_CHARS = 120


def shown(value: object) -> str:
    """A short, one-line rendering of a client's value for an error message."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


class ToolSchemaError(ValueError):
    """Root of the room's errors: names the field's path, the value and what is allowed."""

    code = "tool_schema_error"

    def __init__(
        self, *, param: str, message: str, value: object = None, allowed: str = "", hint: str = ""
    ) -> None:
        text = f"{param}: {message}"
        if value is not None:
            text += f"; got {shown(value)}"
        if allowed:
            text += f"; allowed: {allowed}"
        if hint:
            text += f"; hint: {hint}"
        super().__init__(text)
        self.param = param
        self.value = value
        self.allowed = allowed
        self.hint = hint


class InvalidSchemaError(ToolSchemaError):
    code = "invalid_schema"


class InvalidToolChoiceError(ToolSchemaError):
    code = "invalid_tool_choice"


class UnknownFormatError(ToolSchemaError):
    code = "unknown_tool_format"


class ReasoningUnsupportedError(ToolSchemaError):
    code = "reasoning_unsupported"
