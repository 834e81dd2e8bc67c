# SPDX-License-Identifier: Apache-2.0
"""Tool sets, calls and turns that the tests of `tools_schema` share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from tools_schema.events import (
    Event,
    ParseProblem,
    ReasoningDelta,
    TextDelta,
    ToolCallArgs,
    ToolCallEnd,
    ToolCallStart,
)
from tools_schema.formats.base import ToolFormat
from tools_schema.rendering import CallText, render_calls
from tools_schema.stream_parser import StreamParser
from tools_schema.tool_choice import ToolChoice, parse_tool_choice
from tools_schema.tool_spec import ToolSet, parse_tools

RAW_TOOLS: list[dict[str, Any]] = [
    {
        "name": "list_dir",
        "description": "List a directory",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["path"],
        },
    },
    {
        "name": "set_flags",
        "parameters": {
            "type": "object",
            "properties": {
                "flags": {"type": "array", "items": {"enum": ["a", "b"]}},
                "level": {"type": ["integer", "null"]},
                "options": {
                    "type": "object",
                    "properties": {"deep": {"type": "boolean"}},
                    "required": ["deep"],
                    "additionalProperties": False,
                },
            },
            "required": ["flags", "options"],
            "additionalProperties": False,
        },
    },
    {"name": "get_time", "description": "The time"},
]
TOOLS = parse_tools(RAW_TOOLS)
AUTO = parse_tool_choice("auto", TOOLS)

# Texts that look like markup of some family inside a JSON string.
NASTY = 'a "q" \\ </tool_call> {"x": [1} <think> \n\t line\u2028 caf\u00e9 \U0001f600 ]'

LIST = CallText(name="list_dir", arguments='{"path": "src", "depth": 2}', call_id="aB3dE6gH9")
FLAGS = CallText(
    name="set_flags",
    arguments='{"flags": ["a", "b"], "level": null, "options": {"deep": true}}',
    call_id="bB3dE6gH9",
)
TIME = CallText(name="get_time", arguments="{}", call_id="cB3dE6gH9")


def list_call(arguments: str) -> CallText:
    return CallText(name="list_dir", arguments=arguments, call_id="dB3dE6gH9")


def call_ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"call_{next(counter)}"


def parser_for(
    tool_format: ToolFormat,
    toolset: ToolSet = TOOLS,
    choice: ToolChoice = AUTO,
    *,
    reasoning_open: bool = False,
) -> StreamParser:
    return StreamParser(
        tool_format,
        toolset,
        choice,
        reasoning_open=reasoning_open,
        call_id_factory=call_ids(),
    )


def parse(
    tool_format: ToolFormat,
    chunks: Iterable[bytes] | str,
    *,
    reason: str = "stop",
    toolset: ToolSet = TOOLS,
    choice: ToolChoice = AUTO,
    reasoning_open: bool = False,
) -> list[Event]:
    """All events of a turn, neighbouring deltas joined."""
    parser = parser_for(tool_format, toolset, choice, reasoning_open=reasoning_open)
    events: list[Event] = []
    for chunk in [chunks.encode()] if isinstance(chunks, str) else chunks:
        events += parser.feed(chunk)
    events += parser.finish(reason)
    return joined(events)


def joined(events: Iterable[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case (TextDelta(a), TextDelta(b)):
                out[-1] = TextDelta(a + b)
            case (ReasoningDelta(a), ReasoningDelta(b)):
                out[-1] = ReasoningDelta(a + b)
            case (ToolCallArgs(i, a), ToolCallArgs(j, b)) if i == j:
                out[-1] = ToolCallArgs(i, a + b)
            case _:
                out.append(event)
    return out


def text_of(events: Iterable[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def reasoning_of(events: Iterable[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ReasoningDelta))


def calls_of(events: Iterable[Event]) -> list[tuple[str, str]]:
    """(name, arguments) of each complete call."""
    return [(e.name, e.arguments) for e in events if isinstance(e, ToolCallEnd)]


def problems_of(events: Iterable[Event]) -> list[str]:
    return [e.code for e in events if isinstance(e, ParseProblem)]


def check_event_rules(events: list[Event]) -> None:
    """What `tools_schema.events` promises of every stream of events."""
    started: list[int] = []
    ended: set[int] = set()
    deltas: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(started), "indexes are dense"
            started.append(event.index)
        elif isinstance(event, ToolCallArgs):
            assert event.index == started[-1] and event.index not in ended
            deltas[event.index] = deltas.get(event.index, "") + event.delta
        elif isinstance(event, ToolCallEnd):
            assert event.index == started[-1] and event.index not in ended
            assert event.arguments == deltas[event.index]
            ended.add(event.index)
    ids = [e.call_id for e in events if isinstance(e, ToolCallStart)]
    assert len(set(ids)) == len(ids)


def turn_text(tool_format: ToolFormat, text: str, calls: list[CallText]) -> str:
    """A turn as the family's model writes it."""
    if not calls:
        return tool_format.text_begin + text
    if text and tool_format.preamble is not None:
        text = text.join(tool_format.preamble)
    return text + render_calls(tool_format, calls)
