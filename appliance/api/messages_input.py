# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages -> chat messages with text content.

Cache markers are dropped: they move from turn to turn, and the prompt must not. Does not know:
HTTP, rendering, how an answer is spelled.

Source: the shapes of Anthropic's Messages API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.api.conversation import ChatMessage
from appliance.api.dialect import log_ignored_once
from appliance.api.omitted_parts import OmittedParts
from appliance.errors import ApiError

ROLES = ("user", "assistant", "system")
# Changes with every request of some clients: it must not stand in front of a prompt.
BILLING_HEADER = "x-anthropic-billing-header:"
BLOCK_SEPARATOR = "\n\n"


def chat_messages_of(
    system: Any, messages: Sequence[Any], omitted: OmittedParts | None = None
) -> list[ChatMessage]:
    """Check a conversation and return it as chat messages.

    Args:
        omitted: takes what is no text in tool results, and beside them; without it that is refused.

    Raises: ApiError naming the field.
    """
    if not messages:
        raise ApiError("invalid_value", "messages: at least one message is needed", "messages")
    chat: list[ChatMessage] = []
    text = _system_text(system)
    if text:
        chat.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        chat += _message(message, f"messages[{index}]", omitted)
    return chat


def _system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return _without_billing([system or ""])
    return _without_billing(_texts(system, "system"))


def _without_billing(texts: Sequence[str]) -> str:
    kept = []
    for text in texts:
        if text.startswith(BILLING_HEADER):
            log_ignored_once("system block", BILLING_HEADER)
            _, _, text = text.partition("\n")
        if text:
            kept.append(text)
    return BLOCK_SEPARATOR.join(kept)


def _message(message: Any, path: str, omitted: OmittedParts | None) -> list[ChatMessage]:
    if not isinstance(message, Mapping):
        raise ApiError("invalid_type", f"{path}: must be an object", path)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        where = f"{path}.role"
        raise ApiError(
            "invalid_value", f"{where}: must be one of {', '.join(ROLES)}; got {role!r}", where
        )
    where = f"{path}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_assistant(_blocks(content, where), where)]
    if role == "system":
        return [{"role": role, "content": BLOCK_SEPARATOR.join(_texts(content, where))}]
    return _user(_blocks(content, where), where, omitted)


def _user(
    blocks: Sequence[Mapping[str, Any]], path: str, omitted: OmittedParts | None
) -> list[ChatMessage]:
    """Tool results become messages of their own, in the order in which they stand."""
    chat: list[ChatMessage] = []
    texts: list[str] = []
    if not any(block.get("type") == "tool_result" for block in blocks):
        omitted = None  # what stands beside a result was put there by the tool
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block.get("type") != "tool_result":
            texts.append(_text(block, where, omitted))
            continue
        if texts:
            chat.append({"role": "user", "content": BLOCK_SEPARATOR.join(texts)})
            texts = []
        chat.append(_tool_result(block, where, omitted))
    if texts or not chat:
        chat.append({"role": "user", "content": BLOCK_SEPARATOR.join(texts)})
    return chat


def _tool_result(block: Mapping[str, Any], path: str, omitted: OmittedParts | None) -> ChatMessage:
    call_id = _string(block, "tool_use_id", path)
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        text = "\n".join(_texts(content, f"{path}.content", omitted))
    if block.get("is_error") and not text:
        text = "error"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                log_ignored_once("content block", "redacted_thinking")
            case "tool_use":
                calls.append(_tool_use(block, where))
            case _:
                texts.append(_text(block, where))
    message: ChatMessage = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, Mapping):
        raise ApiError("invalid_type", f"{path}.input: must be an object", f"{path}.input")
    name = _string(block, "name", path)
    return {
        "id": _string(block, "id", path),
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _texts(content: Any, path: str, omitted: OmittedParts | None = None) -> list[str]:
    blocks = _blocks(content, path)
    return [_text(block, f"{path}[{index}]", omitted) for index, block in enumerate(blocks)]


def _blocks(content: Any, path: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(content, list):
        raise ApiError("invalid_type", f"{path}: must be a string or a list of blocks", path)
    for index, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise ApiError("invalid_type", f"{path}[{index}]: must be an object", path)
    return content


def _text(block: Mapping[str, Any], path: str, omitted: OmittedParts | None = None) -> str:
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text", path)
    if kind == "search_result":
        return _titled(block, _texts(block.get("content"), f"{path}.content"))
    if kind == "document":
        found = _document(block, path)
        if found is not None:
            return found
    if omitted is not None and isinstance(kind, str):
        return omitted.placeholder(kind, path)
    raise ApiError(
        "unsupported_parameter",
        f"{path}.type: a block of type {kind!r} cannot stand here; only text is supported",
        f"{path}.type",
    )


def _document(block: Mapping[str, Any], path: str) -> str | None:
    """The text of a document that is text; None for pages of images."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "text":
        return _titled(block, [_string(source, "data", f"{path}.source")])
    if isinstance(source, Mapping) and kind == "content":
        content = source.get("content")
        texts = [content] if isinstance(content, str) else _texts(content, f"{path}.source.content")
        return _titled(block, texts)
    return None


def _titled(block: Mapping[str, Any], texts: Sequence[str]) -> str:
    title = block.get("title")
    return "\n".join([title, *texts] if isinstance(title, str) and title else texts)


def _string(block: Mapping[str, Any], key: str, path: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        where = f"{path}.{key}"
        code = "missing_field" if value is None else "invalid_type"
        raise ApiError(code, f"{where}: must be a string", where)
    return value
