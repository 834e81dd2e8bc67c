# SPDX-License-Identifier: Apache-2.0
"""Open tool calls: which calls of a history still wait for an output.

Does not know: tool schemas, nor who runs a tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sessions.errors import UnknownCallId, UnresolvedToolCalls
from sessions.ids import new_id
from sessions.items import FunctionCall, FunctionCallOutput, Item


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A tool call the history still waits for."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialOutput:
    """What a tool that still runs has put out so far; no part of the history yet."""

    call_id: str
    text: str


def resolve_calls(
    open_calls: Sequence[OpenCall], items: Iterable[Item], *, path: str = "input"
) -> tuple[OpenCall, ...]:
    """The open calls after these items. Raises `UnknownCallId` for an output of another call."""
    calls = {call.call_id: call for call in open_calls}
    for index, item in enumerate(items):
        if isinstance(item, FunctionCall):
            calls[item.call_id] = OpenCall(call_id=item.call_id, name=item.name)
        elif isinstance(item, FunctionCallOutput) and calls.pop(item.call_id, None) is None:
            param = f"{path}[{index}].call_id"
            raise UnknownCallId(item.call_id, param=param, open_call_ids=tuple(calls))
    return tuple(calls.values())


def open_calls_of(items: Iterable[Item]) -> tuple[OpenCall, ...]:
    """The open calls of a whole history.

    Lenient where `resolve_calls` is strict: a compaction may keep an output whose call went.
    """
    calls: dict[str, OpenCall] = {}
    for item in items:
        if isinstance(item, FunctionCall):
            calls[item.call_id] = OpenCall(call_id=item.call_id, name=item.name)
        elif isinstance(item, FunctionCallOutput):
            calls.pop(item.call_id, None)
    return tuple(calls.values())


def close_calls(
    open_calls: Sequence[OpenCall],
    items: Sequence[Item],
    *,
    auto_close_calls: bool = False,
    allow_open_calls: bool = False,
    partial_outputs: Sequence[PartialOutput] = (),
    path: str = "input",
) -> tuple[Item, ...]:
    """Check new items against the open calls; see `Session.prepare_input`."""
    remaining = resolve_calls(open_calls, items, path=path)
    older = tuple(call for call in remaining if call in open_calls)
    blocking = older if allow_open_calls else remaining
    outputs_only = all(isinstance(item, FunctionCallOutput) for item in items)
    if not blocking or (allow_open_calls and outputs_only):
        return tuple(items)
    if not auto_close_calls:
        raise UnresolvedToolCalls([call.call_id for call in blocking], param=path)
    newer = tuple(call for call in blocking if call not in older)
    texts = {partial.call_id: partial.text for partial in partial_outputs}
    closed = {call: _interrupted(call, texts.get(call.call_id, "")) for call in blocking}
    return (*(closed[call] for call in older), *items, *(closed[call] for call in newer))


def _interrupted(call: OpenCall, text: str) -> FunctionCallOutput:
    return FunctionCallOutput(
        id=new_id("item"), call_id=call.call_id, output=text, status="interrupted"
    )
