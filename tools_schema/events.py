# SPDX-License-Identifier: Apache-2.0
"""Owns the events a stream parser emits. Does not know: SSE, dialects, formats.

For one call index: exactly one `ToolCallStart`, then `ToolCallArgs`, then at most one
`ToolCallEnd` whose `arguments` is the concatenation of the deltas. A call without its
`ToolCallEnd` is not a call: it was cut short or malformed, and a `ParseProblem` says which.
Indexes are dense and start at 0.
"""

from __future__ import annotations

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
