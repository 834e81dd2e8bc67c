# SPDX-License-Identifier: Apache-2.0
"""Owns how freely the model may call tools in one turn. Does not know: grammars, formats, HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tools_schema.errors import InvalidToolChoiceError
from tools_schema.tool_spec import ToolSet

Kind = Literal["none", "auto", "required", "named", "allowed"]
Dialect = Literal["auto", "responses", "chat", "anthropic"]

# Of one turn. A model that repeats itself would else call until its output has no room left; the
# most that OpenAI's API takes of tools is 128 too.
MAX_CALLS = 128
_MODE_NAMES: tuple[Kind, ...] = ("none", "auto", "required")
_MODES = '"none", "auto", "required" or an object that names tools'


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`names`: the tools that may be called (all of the set's where the client named none).

    `min_calls` 0: text instead of calls is allowed. Behind `max_calls` the turn ends.
    `allowed` is `auto` or `required` (by `min_calls`) over a part of the set.
    """

    kind: Kind
    names: tuple[str, ...] = ()
    parallel: bool = True
    min_calls: int = 0
    max_calls: int = MAX_CALLS

    @property
    def is_forced(self) -> bool:
        """A call must come: no text instead."""
        return self.min_calls > 0


NO_TOOLS = ToolChoice(kind="none", parallel=False, max_calls=0)


def parse_tool_choice(
    raw: object,
    toolset: ToolSet,
    parallel_tool_calls: object = None,
    min_tool_calls: object = None,
    *,
    max_tool_calls: object = None,
    dialect: Dialect = "auto",
    param: str = "tool_choice",
) -> ToolChoice:
    """`tool_choice` and its companions as a client sent them.

    None means `auto` where there are tools and `none` where there are not. All dialects' object
    shapes are read: `{"type": "function", "name"}` / `{"type": "function", "function": {"name"}}`,
    `{"type": "allowed_tools", "mode", "tools"}` (flat or nested), Anthropic's `auto` / `any` /
    `tool` / `none` with `disable_parallel_tool_use`.

    Raises:
        InvalidToolChoiceError: naming the field, its value and what is allowed.
    """
    mode, names, parallel = _read(raw, toolset, dialect, param)
    if parallel_tool_calls is not None:
        parallel = _boolean(parallel_tool_calls, "parallel_tool_calls")
    if mode == "none" or not len(toolset):
        _refuse_without_tools(mode, min_tool_calls, param)
        return NO_TOOLS
    forced = mode in ("required", "named")
    kind: Kind = "allowed" if names and mode in ("auto", "required") else mode
    low = max(_count(min_tool_calls, "min_tool_calls", 0), int(forced))
    if kind == "auto" and low:
        kind = "required"
    high = MAX_CALLS if max_tool_calls is None else _count(max_tool_calls, "max_tool_calls", 1)
    if mode == "named" and max_tool_calls is None:
        high = max(low, 1)  # a named tool is called once, where no count is asked for
    if not parallel:
        high = 1
    if high < max(low, 1):
        raise InvalidToolChoiceError(
            param="min_tool_calls",
            message=f"more than the {high} call(s) of this turn",
            value=low,
            allowed="parallel_tool_calls true" if not parallel else "at most max_tool_calls",
        )
    return ToolChoice(
        kind=kind,
        names=names or toolset.names,
        parallel=parallel,
        min_calls=low,
        max_calls=high,
    )


def _refuse_without_tools(mode: Kind, min_tool_calls: object, param: str) -> None:
    if mode in ("required", "named"):
        raise InvalidToolChoiceError(
            param=param, message="there are no tools", value=mode, allowed='"none", "auto"'
        )
    if _count(min_tool_calls, "min_tool_calls", 0) > 0:
        raise InvalidToolChoiceError(
            param="min_tool_calls",
            message="no tool may be called in this turn",
            value=min_tool_calls,
            allowed="0",
        )


def _read(
    raw: object, toolset: ToolSet, dialect: Dialect, param: str
) -> tuple[Kind, tuple[str, ...], bool]:
    if raw is None:
        return ("auto" if len(toolset) else "none"), (), True
    if isinstance(raw, str):
        return _mode(raw, param, any_is_required=dialect in ("auto", "anthropic")), (), True
    if not isinstance(raw, dict):
        raise InvalidToolChoiceError(
            param=param, message="not a tool choice", value=raw, allowed=_MODES
        )
    kind = raw.get("type")
    parallel = not _boolean(
        raw.get("disable_parallel_tool_use", False), f"{param}.disable_parallel_tool_use"
    )
    if kind in ("function", "tool"):
        return "named", (_name_of(raw, toolset, param),), parallel
    if kind == "allowed_tools":
        mode, names = _allowed(raw, toolset, param)
        return mode, names, parallel
    if isinstance(kind, str) and kind in ("auto", "any", "none", "required"):
        return _mode(kind, f"{param}.type", any_is_required=True), (), parallel
    raise InvalidToolChoiceError(
        param=f"{param}.type",
        message="unknown kind of tool choice",
        value=kind,
        allowed='"function", "tool", "allowed_tools", "auto", "any", "none"',
    )


def _mode(raw: str, param: str, *, any_is_required: bool) -> Kind:
    if raw == "any" and any_is_required:
        return "required"
    for mode in _MODE_NAMES:
        if raw == mode:
            return mode
    raise InvalidToolChoiceError(
        param=param, message="unknown tool choice", value=raw, allowed=_MODES
    )


def _name_of(raw: dict[str, Any], toolset: ToolSet, param: str) -> str:
    inner = raw.get("function")
    body = inner if isinstance(inner, dict) else raw
    path = f"{param}.function.name" if isinstance(inner, dict) else f"{param}.name"
    name = body.get("name")
    if not isinstance(name, str) or name not in toolset:
        raise InvalidToolChoiceError(
            param=path,
            message="names no tool of this request",
            value=name,
            allowed=", ".join(toolset.names) or "no tool: there are none",
        )
    return name


def _allowed(raw: dict[str, Any], toolset: ToolSet, param: str) -> tuple[Kind, tuple[str, ...]]:
    inner = raw.get("allowed_tools")
    body, path = (inner, f"{param}.allowed_tools") if isinstance(inner, dict) else (raw, param)
    mode: Kind = body.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidToolChoiceError(
            param=f"{path}.mode", message="unknown mode", value=mode, allowed='"auto", "required"'
        )
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidToolChoiceError(
            param=f"{path}.tools", message="no tools", value=tools, allowed="a list of tools"
        )
    named = []
    for index, item in enumerate(tools):
        if not isinstance(item, dict):
            raise InvalidToolChoiceError(
                param=f"{path}.tools[{index}]",
                message="not a tool",
                value=item,
                allowed="an object",
            )
        named.append(_name_of(item, toolset, f"{path}.tools[{index}]"))
    return mode, tuple(name for name in toolset.names if name in named)


def _boolean(raw: object, param: str) -> bool:
    if not isinstance(raw, bool):
        raise InvalidToolChoiceError(
            param=param, message="not a boolean", value=raw, allowed="true, false"
        )
    return raw


def _count(raw: object, param: str, least: int) -> int:
    if raw is None:
        return least
    if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= MAX_CALLS:
        raise InvalidToolChoiceError(
            param=param, message="not a count", value=raw, allowed=f"{least} to {MAX_CALLS}"
        )
    return raw
