# SPDX-License-Identifier: Apache-2.0
"""Typed items of a session and their strict parser.

Does not know: chat templates, tokens, HTTP. Text is kept exactly as it came (a tool call's
`arguments` is the sampled string, never re-serialised).

Source: the item shapes of OpenAI's Responses API; `compaction` is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from sessions.errors import ItemError
from sessions.ids import new_id

ROLES: Final = ("system", "developer", "user", "assistant")
ITEM_STATUSES: Final = ("completed", "incomplete")
OUTPUT_STATUSES: Final = ("completed", "incomplete", "failed", "interrupted")


class InputText(msgspec.Struct, frozen=True, tag="input_text", kw_only=True):
    """Text a client wrote."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text", kw_only=True):
    """Text the model wrote."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal", kw_only=True):
    refusal: str


ContentPart = InputText | OutputText | Refusal


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", kw_only=True):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text", kw_only=True):
    text: str


class Message(msgspec.Struct, frozen=True, tag="message", kw_only=True):
    """What someone said. Content given as a string became one part."""

    id: str
    role: str  # one of ROLES
    content: tuple[ContentPart, ...]
    status: str = "completed"

    @property
    def text(self) -> str:
        """All its text, joined."""
        return "".join(p.refusal if isinstance(p, Refusal) else p.text for p in self.content)


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning", kw_only=True):
    id: str
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[SummaryText, ...] = ()
    status: str = "completed"

    @property
    def text(self) -> str:
        """All its reasoning text, joined."""
        return "".join(part.text for part in self.content)


class FunctionCall(msgspec.Struct, frozen=True, tag="function_call", kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str  # exactly as sampled
    status: str = "completed"


class FunctionCallOutput(msgspec.Struct, frozen=True, tag="function_call_output", kw_only=True):
    """A tool's result. `interrupted`: nobody ran the tool to its end."""

    id: str
    call_id: str
    output: str | tuple[InputText, ...]
    status: str = "completed"  # one of OUTPUT_STATUSES

    @property
    def text(self) -> str:
        """The output as one string."""
        if isinstance(self.output, str):
            return self.output
        return "".join(part.text for part in self.output)


class Compaction(msgspec.Struct, frozen=True, tag="compaction", kw_only=True):
    """Stands for older items: their summary, and how many it replaced."""

    id: str
    summary: str
    num_replaced: int = 0


Item = Message | Reasoning | FunctionCall | FunctionCallOutput | Compaction


def item_to_wire(item: Item) -> dict[str, Any]:
    """The item as JSON-able builtins, `type` first."""
    wire: dict[str, Any] = msgspec.to_builtins(item)
    return wire


def parse_items(raw: object, *, path: str = "input") -> tuple[Item, ...]:
    """Parse decoded JSON (a list of items, or a string: one user message) into items.

    An item without an `id` gets one. Raises `ItemError` naming the field's path, as in
    `input[3].content[0].text`.
    """
    if isinstance(raw, str):
        content = (InputText(text=_text(raw, path)),)
        return (Message(id=new_id("item"), role="user", content=content),)
    items = tuple(
        _parse_item(entry, f"{path}[{index}]") for index, entry in enumerate(_list(raw, path))
    )
    seen: set[str] = set()
    for index, item in enumerate(items):
        if item.id in seen:
            _fail_type(f"{path}[{index}].id", f"{item.id!r} (used twice)", "an id of its own")
        seen.add(item.id)
    return items


def _parse_item(raw: object, path: str) -> Item:
    entry = _object(raw, path)
    kind = entry.get("type")
    if kind is None and "role" in entry:
        kind = "message"  # the short form {role, content}
    if kind is None:
        _fail_type(f"{path}.type", "nothing", f"one of {', '.join(_ITEM_PARSERS)}")
    if not isinstance(kind, str):
        _fail_type(f"{path}.type", kind, "a string")
    parser = _ITEM_PARSERS.get(kind)
    if parser is None:
        raise ItemError(
            "unknown_item_type",
            f"{path}.type: {kind!r} is not one of {', '.join(_ITEM_PARSERS)}",
            param=f"{path}.type",
        )
    return parser(entry, path)


def _parse_message(entry: Mapping[str, Any], path: str) -> Message:
    _allow(entry, path, ("type", "id", "role", "content", "status"))
    role = _choice(entry, path, "role", ROLES)
    return Message(
        id=_id(entry, path),
        role=role,
        content=_parse_content(_required(entry, path, "content"), f"{path}.content", role),
        status=_choice(entry, path, "status", ITEM_STATUSES, "completed"),
    )


def _parse_content(raw: object, path: str, role: str) -> tuple[ContentPart, ...]:
    if isinstance(raw, str):
        text = _text(raw, path)
        return (OutputText(text=text),) if role == "assistant" else (InputText(text=text),)
    return tuple(
        _parse_part(entry, f"{path}[{index}]") for index, entry in enumerate(_list(raw, path))
    )


def _parse_part(raw: object, path: str) -> ContentPart:
    entry = _object(raw, path)
    kind = _part_kind(entry, path, ("input_text", "output_text", "text", "refusal"))
    if kind == "refusal":
        _allow(entry, path, ("type", "refusal"))
        return Refusal(refusal=_string(entry, path, "refusal"))
    if kind == "output_text":
        # Replies carry two more lists, empty, beside the text; a client may send them back.
        empty = [key for key in ("annotations", "logprobs") if entry.get(key) == []]
        _allow(entry, path, ("type", "text", *empty))
        return OutputText(text=_string(entry, path, "text"))
    _allow(entry, path, ("type", "text"))
    return InputText(text=_string(entry, path, "text"))


def _parse_reasoning(entry: Mapping[str, Any], path: str) -> Reasoning:
    _allow(entry, path, ("type", "id", "content", "summary", "status"))
    return Reasoning(
        id=_id(entry, path),
        content=tuple(
            ReasoningText(text=text) for text in _texts(entry, path, "content", "reasoning_text")
        ),
        summary=tuple(
            SummaryText(text=text) for text in _texts(entry, path, "summary", "summary_text")
        ),
        status=_choice(entry, path, "status", ITEM_STATUSES, "completed"),
    )


def _texts(entry: Mapping[str, Any], path: str, key: str, kind: str) -> list[str]:
    raw = entry.get(key)
    if raw is None:
        return []
    texts = []
    for index, part in enumerate(_list(raw, f"{path}.{key}")):
        at = f"{path}.{key}[{index}]"
        part_entry = _object(part, at)
        _part_kind(part_entry, at, (kind,))
        _allow(part_entry, at, ("type", "text"))
        texts.append(_string(part_entry, at, "text"))
    return texts


def _parse_call(entry: Mapping[str, Any], path: str) -> FunctionCall:
    _allow(entry, path, ("type", "id", "call_id", "name", "arguments", "status"))
    return FunctionCall(
        id=_id(entry, path),
        call_id=_name(entry, path, "call_id"),
        name=_name(entry, path, "name"),
        arguments=_string(entry, path, "arguments"),
        status=_choice(entry, path, "status", ITEM_STATUSES, "completed"),
    )


def _parse_output(entry: Mapping[str, Any], path: str) -> FunctionCallOutput:
    _allow(entry, path, ("type", "id", "call_id", "output", "status"))
    raw = _required(entry, path, "output")
    output: str | tuple[InputText, ...]
    if isinstance(raw, str):
        output = _text(raw, f"{path}.output")
    else:
        parts = []
        for index, part in enumerate(_list(raw, f"{path}.output", "a string or a list")):
            at = f"{path}.output[{index}]"
            part_entry = _object(part, at)
            _part_kind(part_entry, at, ("input_text", "text"))
            _allow(part_entry, at, ("type", "text"))
            parts.append(InputText(text=_string(part_entry, at, "text")))
        output = tuple(parts)
    return FunctionCallOutput(
        id=_id(entry, path),
        call_id=_name(entry, path, "call_id"),
        output=output,
        status=_choice(entry, path, "status", OUTPUT_STATUSES, "completed"),
    )


def _parse_compaction(entry: Mapping[str, Any], path: str) -> Compaction:
    _allow(entry, path, ("type", "id", "summary", "num_replaced"))
    num_replaced = entry.get("num_replaced", 0)
    if not isinstance(num_replaced, int) or isinstance(num_replaced, bool) or num_replaced < 0:
        _fail_type(f"{path}.num_replaced", num_replaced, "an integer >= 0")
    return Compaction(
        id=_id(entry, path), summary=_string(entry, path, "summary"), num_replaced=num_replaced
    )


_ITEM_PARSERS: Final[dict[str, Callable[[Mapping[str, Any], str], Item]]] = {
    "message": _parse_message,
    "reasoning": _parse_reasoning,
    "function_call": _parse_call,
    "function_call_output": _parse_output,
    "compaction": _parse_compaction,
}


def _part_kind(entry: Mapping[str, Any], path: str, allowed: Sequence[str]) -> str:
    kind = _required(entry, path, "type")
    if not isinstance(kind, str):
        _fail_type(f"{path}.type", kind, "a string")
    if kind not in allowed:
        raise ItemError(
            "unknown_item_type",
            f"{path}.type: {kind!r} is not one of {', '.join(allowed)}",
            param=f"{path}.type",
        )
    return kind


def _allow(entry: Mapping[str, Any], path: str, keys: Sequence[str]) -> None:
    for key in entry:
        if key not in keys:
            raise ItemError(
                "unknown_field",
                f"{path}.{key}: unknown field (known here: {', '.join(keys)})",
                param=f"{path}.{key}",
            )


def _required(entry: Mapping[str, Any], path: str, key: str) -> Any:
    if key not in entry:
        _fail_type(f"{path}.{key}", "nothing", "a value (the field is required)")
    return entry[key]


def _string(entry: Mapping[str, Any], path: str, key: str) -> str:
    return _text(_required(entry, path, key), f"{path}.{key}")


def _name(entry: Mapping[str, Any], path: str, key: str) -> str:
    text = _string(entry, path, key)
    if not text or len(text) > 256:
        _fail_type(f"{path}.{key}", f"{len(text)} characters", "1 to 256 characters")
    return text


def _id(entry: Mapping[str, Any], path: str) -> str:
    if entry.get("id") is None:
        return new_id("item")
    return _name(entry, path, "id")


def _choice(
    entry: Mapping[str, Any], path: str, key: str, allowed: Sequence[str], default: str = ""
) -> str:
    if default and entry.get(key) is None:
        return default
    value = _required(entry, path, key)
    if value not in allowed:
        _fail_type(f"{path}.{key}", value, f"one of {', '.join(allowed)}")
    return str(value)


def _text(raw: object, path: str) -> str:
    if not isinstance(raw, str):
        _fail_type(path, raw, "a string")
    try:
        raw.encode()
    except UnicodeEncodeError:
        _fail_type(path, "a lone surrogate", "text that UTF-8 can hold")
    return raw


def _list(raw: object, path: str, wanted: str = "a list") -> Sequence[object]:
    if not isinstance(raw, list | tuple):
        _fail_type(path, raw, wanted)
    return raw


def _object(raw: object, path: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        _fail_type(path, raw, "an object")
    return raw


def _fail_type(path: str, value: object, wanted: str) -> NoReturn:
    shown = value if isinstance(value, str) else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise ItemError("invalid_type", f"{path}: expected {wanted}, got {shown}", param=path)
