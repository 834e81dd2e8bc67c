# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a history: messages with texts that can be found again in what was rendered.

Does not know: templates, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.control_safety import strings_in
from engine.text.errors import TemplateRenderError

Message = Mapping[str, Any]

# Placeholder texts: letters only, so that no template reads anything into them.
USER_MARK = "Qplaceholderuserq"
ASSISTANT_MARK = "Qplaceholderassistantq"
CALL_ID = "call00000"  # nine letters and digits: some templates insist
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "qprobetoolq",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def unused_mark(mark: str, payload: Sequence[Any]) -> str:
    """The mark, lengthened until no string of a client holds it."""
    strings = list(strings_in(payload))
    while any(mark in text for text in strings):
        mark += "q"
    return mark


def behind(text: str, mark: str) -> str:
    """What follows the mark. Raises TemplateRenderError where it was not rendered."""
    _, found, rest = text.partition(mark)
    if not found:
        raise TemplateRenderError(
            "messages: the chat template leaves out the text of a message, so new messages "
            "cannot be rendered behind a history"
        )
    return rest


def placeholder_call(new_messages: Sequence[Message], mark: str) -> Message:
    """An assistant turn whose calls are those the new tool results answer."""
    results = [message for message in new_messages if message.get("role") == "tool"]
    calls = [
        {
            "id": result.get("tool_call_id", CALL_ID),
            "type": "function",
            "function": {"name": result.get("name", "f"), "arguments": {"a": mark}},
        }
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object, for templates that print them through tojson."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
