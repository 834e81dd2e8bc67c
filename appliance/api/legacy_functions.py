# SPDX-License-Identifier: Apache-2.0
"""Chat completions' `functions` and `function_call`, what `tools` were called before.

A request with them is read as one with tools, at most one call an answer; its answer spells calls
the old way. Does not know: rendering, how text is generated.

Source: the deprecated fields of OpenAI's Chat Completions API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.api.wire import ChatRequest
from appliance.errors import ApiError
from tools_schema import events as parsed
from tools_schema.tool_choice import ToolChoice, parse_tool_choice
from tools_schema.tool_spec import ToolSet, parse_tools

Json = dict[str, Any]
FINISH_REASON = "function_call"


def is_legacy(body: ChatRequest) -> bool:
    """Whether a request speaks of functions. Raises: ApiError where it speaks of tools, too."""
    found = next((n for n in ("functions", "function_call") if getattr(body, n) is not None), None)
    if found is not None and (body.tools or body.tool_choice is not None):
        raise ApiError("invalid_value", f"{found}: cannot be had with tools", found)
    return found is not None


def functions_of(body: ChatRequest) -> tuple[ToolSet, ToolChoice]:
    """The functions of a request, and which of them may be called.

    Raises: ApiError, InvalidSchemaError naming the field.
    """
    toolset = parse_tools(body.functions or [], "responses", param="functions")
    wanted = body.function_call
    if isinstance(wanted, dict):
        name = wanted.get("name")
        if name not in toolset:
            known = ", ".join(toolset.names) or "none"
            raise ApiError(
                "invalid_tool_choice",
                f"function_call.name: names no function of this request; got {name!r:.80}; "
                f"allowed: {known}",
                "function_call.name",
            )
        choice: Any = {"type": "function", "function": {"name": name}}
    elif wanted in (None, "auto", "none"):
        choice = wanted if toolset.names else None
    else:
        raise ApiError(
            "invalid_value",
            f"function_call: must be none, auto or an object with a name; got {wanted!r:.80}",
            "function_call",
        )
    return toolset, parse_tool_choice(choice, toolset, False, body.min_tool_calls, dialect="chat")


def with_tool_calls(messages: Sequence[Any]) -> list[Any]:
    """Messages with `function_call` and the role `function` as those of tools.

    Such a call has no id: its result is the next message of that role. Raises: ApiError.
    """
    shaped: list[Any] = []
    open_id: str | None = None
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        call = message.get("function_call") if isinstance(message, Mapping) else None
        if call is not None:
            open_id = f"call_function_{index}"
            message = _with_call(message, call, open_id, path)
        elif isinstance(message, Mapping) and message.get("role") == "function":
            if open_id is None:
                raise ApiError(
                    "invalid_value", f"{path}.role: no function_call lies before it", f"{path}.role"
                )
            message = {**message, "role": "tool", "tool_call_id": open_id}
            open_id = None
        shaped.append(message)
    return shaped


def _with_call(message: Mapping[str, Any], call: Any, call_id: str, path: str) -> Json:
    for name, value in (("role", message.get("role")), ("tool_calls", message.get("tool_calls"))):
        if (name == "role" and value != "assistant") or (name == "tool_calls" and value):
            where = f"{path}.function_call"
            raise ApiError("invalid_value", f"{where}: not with {name} {value!r:.80}", where)
    for name in ("name", "arguments"):
        if not isinstance(call, Mapping) or not isinstance(call.get(name), str):
            where = f"{path}.function_call.{name}"
            raise ApiError("invalid_type", f"{where}: must be a string", where)
    rest = {name: value for name, value in message.items() if name != "function_call"}
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {**rest, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def deltas_of(event: parsed.Event) -> list[Json] | None:
    """The deltas of an event of a call, the first of its answer alone; None: of no call."""
    match event:
        case parsed.ToolCallStart():
            delta = {"function_call": {"name": event.name, "arguments": ""}}
        case parsed.ToolCallArgs():
            delta = {"function_call": {"arguments": event.delta}}
        case _:
            return None
    return [] if event.index else [delta]
