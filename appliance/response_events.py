# SPDX-License-Identifier: Apache-2.0
"""Parse events of one answer -> typed items and the Responses deltas that stream them.

Ids of items and calls follow from the turn's id and the position, so an answer that is replayed
after a crash has the ids its readers saw. Does not know: tokens, numbering, transport.

Source: the event and item shapes of OpenAI's Responses API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sessions.items import (
    FunctionCall,
    Item,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    item_to_wire,
)
from tools_schema import events as parsed
from tools_schema.tool_spec import ToolSet
from tools_schema.validation import validate_arguments

WireEvent = tuple[str, dict[str, Any]]

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_DIGITS = 10  # of a ULID


def derived_id(prefix: str, turn_id: str, index: int) -> str:
    """Return the id of part `index` of a turn: it sorts with the turn, and is always the same."""
    time_part = turn_id.partition("_")[2][:_TIME_DIGITS].rjust(_TIME_DIGITS, "0")
    digest = hashlib.sha256(f"{prefix}/{turn_id}/{index}".encode()).digest()
    value = int.from_bytes(digest[:10], "big")
    digits = [_BASE32[(value >> shift) & 31] for shift in range(75, -1, -5)]
    return f"{prefix}_{time_part}{''.join(digits)}"


@dataclass(slots=True)
class _OpenItem:
    """The output item that is being written."""

    kind: str  # message | reasoning | function_call
    item_id: str
    output_index: int
    call: parsed.ToolCallStart | None = None
    chunks: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.chunks)


@dataclass(slots=True)
class ResponseEvents:
    """One answer. `items` holds the finished items in order."""

    turn_id: str
    toolset: ToolSet
    id_prefixes: Mapping[str, str] = field(default_factory=dict)  # by kind of item; else `item`
    items: list[Item] = field(default_factory=list)
    invalid_calls: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0
    _open: _OpenItem | None = None
    _num_items: int = 0

    def take(self, events: Iterable[parsed.Event]) -> list[WireEvent]:
        """Return the wire events of these parse events."""
        out: list[WireEvent] = []
        for event in events:
            match event:
                case parsed.TextDelta():
                    self._text("message", event.text, out)
                case parsed.ReasoningDelta():
                    self._text("reasoning", event.text, out)
                case parsed.ToolCallStart():
                    self._call_start(event, out)
                case parsed.ToolCallArgs():
                    self._call_args(event, out)
                case parsed.ToolCallEnd():
                    self._call_end(event, out)
                case parsed.ParseProblem():
                    self._problem(event, out)
        return out

    def finish(self, status: str = "completed") -> list[WireEvent]:
        """Close what is open as `status`; a call that has no end is left out of the items."""
        out: list[WireEvent] = []
        self._close(out, status=status)
        return out

    def _text(self, kind: str, text: str, out: list[WireEvent]) -> None:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._close(out, status="completed")
            self._begin(kind, out)
        opened = self._open
        assert opened is not None
        opened.chunks.append(text)
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        out.append(
            (f"response.{name}.delta", {**_where(opened), "content_index": 0, "delta": text})
        )

    def _item_id(self, kind: str) -> str:
        return derived_id(self.id_prefixes.get(kind, "item"), self.turn_id, self._num_items)

    def _begin(self, kind: str, out: list[WireEvent]) -> None:
        item_id = self._item_id(kind)
        self._open = _OpenItem(kind, item_id, self._num_items)
        self._num_items += 1
        item: dict[str, Any] = {"type": kind, "id": item_id, "content": [], "status": "in_progress"}
        if kind == "message":
            item["role"] = "assistant"
        out.append(("response.output_item.added", _indexed(self._open, item)))
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            out.append(
                (
                    "response.content_part.added",
                    {**_where(self._open), "content_index": 0, "part": part},
                )
            )

    def _call_start(self, event: parsed.ToolCallStart, out: list[WireEvent]) -> None:
        self._close(out, status="completed")
        item_id = self._item_id("function_call")
        self._open = _OpenItem("function_call", item_id, self._num_items, event)
        self._num_items += 1
        item = {
            "type": "function_call",
            "id": item_id,
            "call_id": event.call_id,
            "name": event.name,
            "arguments": "",
            "status": "in_progress",
        }
        out.append(("response.output_item.added", _indexed(self._open, item)))

    def _call_args(self, event: parsed.ToolCallArgs, out: list[WireEvent]) -> None:
        assert self._open is not None and self._open.kind == "function_call"
        self._open.chunks.append(event.delta)
        out.append(
            (
                "response.function_call_arguments.delta",
                {**_where(self._open), "delta": event.delta},
            )
        )

    def _call_end(self, event: parsed.ToolCallEnd, out: list[WireEvent]) -> None:
        opened = self._open
        assert opened is not None
        item = FunctionCall(
            id=opened.item_id,
            call_id=event.call_id,
            name=event.name,
            arguments=event.arguments,
        )
        self.items.append(item)
        self.num_calls += 1
        self._open = None
        out.append(
            (
                "response.function_call_arguments.done",
                {**_where(opened), "name": event.name, "arguments": event.arguments},
            )
        )
        done = _indexed(opened, item_wire(item))
        problems = validate_arguments(self.toolset, event.name, event.arguments)
        if problems:
            found = [{"path": problem.path, "message": problem.message} for problem in problems]
            self.invalid_calls.append({"call_id": event.call_id, "problems": found})
            done["x_invalid_arguments"] = found
        out.append(("response.output_item.done", done))

    def _problem(self, event: parsed.ParseProblem, out: list[WireEvent]) -> None:
        self.problems.append({"code": event.code, "message": event.message})
        if event.index is not None and self._open is not None:
            self._close(out, status="incomplete")

    def _close(self, out: list[WireEvent], *, status: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.kind == "function_call":
            self._close_unfinished_call(opened, out)
            return
        text = opened.text
        where = {**_where(opened), "content_index": 0}
        item: Item
        if opened.kind == "message":
            item = Message(
                id=opened.item_id, role="assistant", content=(OutputText(text=text),), status=status
            )
            part = {"type": "output_text", "text": text, "annotations": []}
            out.append(("response.output_text.done", {**where, "text": text}))
            out.append(("response.content_part.done", {**where, "part": part}))
        else:
            item = Reasoning(id=opened.item_id, content=(ReasoningText(text=text),), status=status)
            out.append(("response.reasoning_text.done", {**where, "text": text}))
        self.items.append(item)
        out.append(("response.output_item.done", _indexed(opened, item_wire(item))))

    def _close_unfinished_call(self, opened: _OpenItem, out: list[WireEvent]) -> None:
        assert opened.call is not None
        item = {
            "type": "function_call",
            "id": opened.item_id,
            "call_id": opened.call.call_id,
            "name": opened.call.name,
            "arguments": opened.text,
            "status": "incomplete",
        }
        out.append(("response.output_item.done", _indexed(opened, item)))


def item_wire(item: Item) -> dict[str, Any]:
    """Return an item as the API shows it."""
    wire = item_to_wire(item)
    for part in wire.get("content") or ():
        if part.get("type") == "output_text":
            part.setdefault("annotations", [])
    return wire


def _where(opened: _OpenItem) -> dict[str, Any]:
    return {"item_id": opened.item_id, "output_index": opened.output_index}


def _indexed(opened: _OpenItem, item: dict[str, Any]) -> dict[str, Any]:
    return {"output_index": opened.output_index, "item": item}
