# SPDX-License-Identifier: Apache-2.0
"""Messages of OpenAI's chat dialect, checked, with their content as text.

Does not know: HTTP, rendering, how an answer is spelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.api.omitted_parts import OmittedParts
from appliance.errors import ApiError

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# What an assistant's message may hold that no prompt here can say.
UNREADABLE = ("audio",)


def chat_messages(raw: Sequence[Any], omitted: OmittedParts | None = None) -> list[dict[str, Any]]:
    """Check chat messages and return them with their content as text.

    Args:
        omitted: takes the parts of tool results that are no text; without it they are refused.

    Raises: ApiError naming the field.
    """
    if not raw:
        raise ApiError("invalid_value", "messages: at least one message is needed", "messages")
    return [_message(message, f"messages[{index}]", omitted) for index, message in enumerate(raw)]


def content_text(content: Any, path: str, omitted: OmittedParts | None = None) -> str:
    """Return the text of a message's content.

    Raises: ApiError where it is anything else and `omitted` does not take it.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ApiError("invalid_type", f"{path}: must be a string or a list of parts", path)
    return "".join(
        _part_text(part, f"{path}[{index}]", omitted) for index, part in enumerate(content)
    )


def _message(message: Any, path: str, omitted: OmittedParts | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError("invalid_type", f"{path}: must be an object", path)
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(
            "invalid_value",
            f"{path}.role: must be one of {', '.join(ROLES)}; got {role!r}",
            f"{path}.role",
        )
    if role == "assistant":
        return _assistant(message, path)
    if "content" not in message:
        raise ApiError("missing_field", f"{path}.content: required", f"{path}.content")
    text = content_text(message["content"], f"{path}.content", omitted if role == "tool" else None)
    shaped: dict[str, Any] = {"role": role, "content": text}
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            where = f"{path}.tool_call_id"
            raise ApiError("missing_field", f"{where}: must be a string; got {call_id!r}", where)
        shaped["tool_call_id"] = call_id
    return shaped


def _assistant(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    for name in UNREADABLE:
        if message.get(name) is not None:
            where = f"{path}.{name}"
            raise ApiError("unsupported_parameter", f"{where}: not supported", where)
    field = "content" if message.get("content") is not None else "refusal"
    shaped: dict[str, Any] = {
        "role": "assistant",
        "content": content_text(message.get(field), f"{path}.{field}"),
    }
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str):
        shaped["reasoning_content"] = thought
    if message.get("tool_calls"):
        shaped["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    return shaped


def _part_text(part: Any, path: str, omitted: OmittedParts | None) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        if omitted is not None and isinstance(kind, str):
            return omitted.placeholder(kind, path)
        raise ApiError(
            "unsupported_parameter", f"{path}.type: only text is supported; got {kind!r}", path
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ApiError("invalid_type", f"{path}.text: must be a string", f"{path}.text")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError("invalid_type", f"{path}: must be a list", path)
    shaped = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError("invalid_type", f"{where}.function: must have a name", where)
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            where = f"{where}.function.arguments"
            raise ApiError("invalid_type", f"{where}: must be JSON text", where)
        shaped.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments or "{}"},
            }
        )
    return shaped
