# SPDX-License-Identifier: Apache-2.0
"""The items and tools that clients send, as types, for the OpenAPI document.

`sessions.items` and `tools_schema` parse what comes. Does not know: parsing, rendering.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from appliance.api.answers import RefusalPart, TextPart


class InputMessage(TypedDict):
    """`type` may be left out where there is a `role`."""

    type: NotRequired[Literal["message"]]
    id: NotRequired[str]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | RefusalPart]


class InputToolOutput(TypedDict):
    type: Literal["function_call_output"]
    id: NotRequired[str]
    call_id: str
    output: str | list[TextPart]
    status: NotRequired[Literal["completed", "incomplete", "failed", "interrupted"]]


class InputToolCall(TypedDict):
    type: Literal["function_call"]
    id: NotRequired[str]
    call_id: str
    name: str
    arguments: str


class InputReasoning(TypedDict):
    type: Literal["reasoning"]
    id: NotRequired[str]
    content: list[TextPart]


InputItem = InputMessage | InputToolOutput | InputToolCall | InputReasoning


class Tool(TypedDict):
    """A function in the Responses shape; Chat Completions' nested shape is taken too."""

    type: Literal["function"]
    name: str
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]
