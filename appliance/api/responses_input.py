# SPDX-License-Identifier: Apache-2.0
"""Input items of the Responses dialect -> chat messages with text content.

An assistant's reasoning, text and calls that stand in a row become one message. Does not know:
HTTP, rendering, how an answer is spelled.

Source: the item shapes of OpenAI's Responses API.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from appliance.api.chat_input import ROLES, content_text
from appliance.api.conversation import ChatMessage
from appliance.api.dialect import log_ignored_once
from appliance.api.omitted_parts import OmittedParts
from appliance.errors import ApiError

# Items of tools that ran elsewhere: nothing in them is for this model.
SKIPPED_ITEMS = (
    "web_search_call",
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
)
REFERENCE = "item_reference"
ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
SEALED = "moorage.v1."  # reasoning that a client carries for a stateless conversation


def seal(text: str) -> str:
    """Pack reasoning as the opaque text of `encrypted_content`."""
    return SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the reasoning that `seal` packed; another server's is lost: ""."""
    if not sealed.startswith(SEALED):
        return ""
    try:
        return base64.urlsafe_b64decode(sealed[len(SEALED) :]).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def chat_messages_of(
    raw: str | Sequence[Any], omitted: OmittedParts | None = None
) -> list[ChatMessage]:
    """Check the input and return it as chat messages.

    Args:
        omitted: takes the parts of tool results that are no text; without it they are refused.

    Raises: ApiError naming the field.
    """
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    chat: list[ChatMessage] = []
    for index, item in enumerate(raw):
        path = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise ApiError("invalid_type", f"{path}: must be an object", path)
        _add(chat, item, path, omitted)
    return chat


def with_referenced(
    raw: str | Sequence[Any], find: Callable[[str], Mapping[str, Any] | None]
) -> str | Sequence[Any]:
    """The input with the stored items in place of `item_reference`s.

    Raises: ApiError item_not_found, missing_field.
    """
    if isinstance(raw, str):
        return raw
    return [_referenced(item, find, f"input[{index}]") for index, item in enumerate(raw)]


def _referenced(item: Any, find: Callable[[str], Mapping[str, Any] | None], path: str) -> Any:
    if not isinstance(item, Mapping) or item.get("type") != REFERENCE:
        return item
    item_id = _string(item, "id", path)
    found = find(item_id)
    if found is None:
        where = f"{path}.id"
        raise ApiError("item_not_found", f"{where}: no item {item_id[:64]!r} is stored here", where)
    return found


def input_items_of(raw: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return an input that was checked as items with ids, as they are listed."""
    given: Sequence[Any] = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
    return [_listed(item) for item in given]


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    fresh = f"{ITEM_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"
    listed = {**item, "type": kind, "id": item.get("id") or fresh}
    if kind == "message" and isinstance(item.get("content"), str):
        is_answer = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if is_answer:
            part = {"type": "output_text", "text": item["content"], "annotations": []}
        listed["content"] = [part]
    if kind == "message":
        listed.setdefault("status", "completed")
    return listed


def _add(
    chat: list[ChatMessage], item: Mapping[str, Any], path: str, omitted: OmittedParts | None
) -> None:
    kind = item.get("type", "message")
    match kind:
        case "message":
            _add_message(chat, item, path)
        case "reasoning":
            thought = _reasoning_text(item, path)
            if thought:
                message = _assistant(chat, is_new=True)
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case "function_call":
            _add_call(chat, item, path, _string(item, "arguments", path))
        case "custom_tool_call":
            arguments = {"input": _string(item, "input", path)}
            _add_call(chat, item, path, json.dumps(arguments, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            output = content_text(item.get("output"), f"{path}.output", omitted)
            call_id = _string(item, "call_id", path)
            chat.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case str() if kind in SKIPPED_ITEMS:
            log_ignored_once("input item of type", kind)
        case _:
            where = f"{path}.type"
            raise ApiError("unknown_item_type", f"{where}: {kind!r} is not supported", where)


def _add_message(chat: list[ChatMessage], item: Mapping[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in ROLES or role == "tool":
        where = f"{path}.role"
        allowed = ", ".join(name for name in ROLES if name != "tool")
        raise ApiError("invalid_value", f"{where}: must be one of {allowed}; got {role!r}", where)
    text = content_text(item.get("content"), f"{path}.content")
    if role == "assistant":
        _assistant(chat)["content"] += text
    else:
        chat.append({"role": role, "content": text})


def _add_call(chat: list[ChatMessage], item: Mapping[str, Any], path: str, arguments: str) -> None:
    call = {
        "id": _string(item, "call_id", path),
        "type": "function",
        "function": {"name": _string(item, "name", path), "arguments": arguments or "{}"},
    }
    _assistant(chat, takes_calls=True).setdefault("tool_calls", []).append(call)


def _assistant(
    chat: list[ChatMessage], *, is_new: bool = False, takes_calls: bool = False
) -> ChatMessage:
    """The assistant's message at the end, or a new one.

    Text behind calls, and reasoning behind either, starts a message of its own.
    """
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    if last is not None:
        is_spoken = "tool_calls" in last or (is_new and last["content"])
        if takes_calls or not is_spoken:
            return last
    chat.append({"role": "assistant", "content": ""})
    return chat[-1]


def _reasoning_text(item: Mapping[str, Any], path: str) -> str:
    sealed = item.get("encrypted_content")
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, (list, tuple)) and parts:
            for index, part in enumerate(parts):
                if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                    where = f"{path}.{key}[{index}].text"
                    raise ApiError("invalid_type", f"{where}: must be a string", where)
            if key == "content":
                return "".join(part["text"] for part in parts)
    return unseal(sealed) if isinstance(sealed, str) else ""


def _string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        where = f"{path}.{key}"
        code = "missing_field" if value is None else "invalid_type"
        raise ApiError(code, f"{where}: must be a string", where)
    return value
