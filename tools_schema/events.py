# SPDX-License-Identifier: Apache-2.0
"""Owns the events a stream parser emits. Does not know: SSE, dialects, formats.

For one call index: exactly one `ToolCallStart`, then `ToolCallArgs`, then at most one
`ToolCallEnd` whose `arguments` is the concatenation of the deltas. A call without its
`ToolCallEnd` is not a call: it was cut short or malformed, and a `ParseProblem` says which.
Indexes are dense and start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """`model_id` is the id the model itself wrote, in the families that write one."""

    index: int
    call_id: str
    name: str
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArgs:
    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete; `arguments` is its JSON text exactly as sampled."""

    index: int
    call_id: str
    name: str
    arguments: str
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class ParseProblem:
    """Something written in tool markup that is no call.

    code: `malformed_call`, `unknown_tool` (both: the text went out as content, unless the call
    had started), `truncated_call` (generation ended inside it). `index` is set if it had started.
    """

    code: str
    message: str
    index: int | None = None
    raw: str = ""


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArgs | ToolCallEnd | ParseProblem
DELTAS = (TextDelta, ReasoningDelta, ToolCallArgs)


def joined(deltas: Sequence[Event]) -> Event:
    """Return neighbouring deltas of one kind as one; an event alone is itself."""
    first = deltas[0]
    if len(deltas) > 1:
        match first:
            case ToolCallArgs():
                text = "".join(event.delta for event in deltas if isinstance(event, ToolCallArgs))
                return ToolCallArgs(first.index, text)
            case TextDelta():
                return TextDelta("".join(e.text for e in deltas if isinstance(e, TextDelta)))
            case ReasoningDelta():
                text = "".join(e.text for e in deltas if isinstance(e, ReasoningDelta))
                return ReasoningDelta(text)
    return first


class EventBuffer:
    """Events on their way out; neighbouring deltas of one kind become one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArgs) and isinstance(last, ToolCallArgs):
            self._events[-1] = ToolCallArgs(event.index, last.delta + event.delta)
        else:
            self._events.append(event)

    def take(self) -> list[Event]:
        """What was added since the last time."""
        events, self._events = self._events, []
        return events
