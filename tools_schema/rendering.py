# SPDX-License-Identifier: Apache-2.0
"""Owns the text of tools, calls and results for models whose chat template renders none.

Text comes in pieces, so that the format's own (`FormatText`), which may be control tokens of the
model, stays apart from a client's, which never is one. Does not know: chat templates, token ids.
Byte-stable: equal input, equal output; the client's key order and the model's argument bytes are
kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools_schema.formats.base import HeaderBody, JsonBody, ParamStyle, ToolFormat
from tools_schema.tool_spec import ToolSet
from tools_schema.validation import parse_json

Pieces = tuple[str, ...]


class FormatText(str):
    """Text of a format; every other piece is a client's, or a model's."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A call as history holds it; `arguments` is JSON text, written as it is."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultText:
    call_id: str
    name: str
    output: str


def system_pieces(tool_format: ToolFormat, toolset: ToolSet, instructions: str = "") -> Pieces:
    """The system text that declares the tools, the client's instructions beside them."""
    if not len(toolset):
        return (instructions,) if instructions else ()
    specs = [json.dumps(tool.as_chat(), ensure_ascii=False) for tool in toolset]
    tools = "\n".join(specs) if tool_format.tools_one_per_line else f"[{', '.join(specs)}]"
    template = tool_format.system_template or "{instructions}{tools}"
    # Instructions go where the family's own prompts have them: before the tools, or after.
    before, after = template.split("{instructions}", 1)
    if instructions:
        instructions = f"\n\n{instructions}" if before else f"{instructions}\n\n"
    pieces = [*_fill(before, {"tools": tools}), instructions, *_fill(after, {"tools": tools})]
    return tuple(piece for piece in pieces if piece)


def call_pieces(tool_format: ToolFormat, calls: Sequence[CallText]) -> Pieces:
    """The calls as the model would have written them."""
    if not calls:
        return ()
    pieces: list[str] = [FormatText(tool_format.lead + tool_format.section_begin)]
    if tool_format.calls_as_list:
        pieces.append("[")
    for index, call in enumerate(calls):
        if index:
            pieces.append(FormatText(tool_format.separator))
        pieces += _call_pieces(tool_format, call, index)
    if tool_format.calls_as_list:
        pieces.append("]")
    pieces.append(FormatText(tool_format.section_end))
    return tuple(piece for piece in pieces if piece)


def result_pieces(tool_format: ToolFormat, results: Sequence[ResultText]) -> tuple[str, Pieces]:
    """(role, text) of the message that hands results back, in the calls' order."""
    pieces: list[str] = []
    for result in results:
        names = {"name": result.name, "call_id": result.call_id}
        if pieces:
            pieces.append(FormatText(tool_format.result_separator))
        pieces += _fill(tool_format.result_begin, names)
        pieces += [result.output, FormatText(tool_format.result_end)]
    return tool_format.result_role, tuple(piece for piece in pieces if piece)


def render_system(tool_format: ToolFormat, toolset: ToolSet, instructions: str = "") -> str:
    """`system_pieces` as one text."""
    return "".join(system_pieces(tool_format, toolset, instructions))


def render_calls(tool_format: ToolFormat, calls: Sequence[CallText]) -> str:
    """`call_pieces` as one text."""
    return "".join(call_pieces(tool_format, calls))


def render_results(tool_format: ToolFormat, results: Sequence[ResultText]) -> tuple[str, str]:
    """`result_pieces` as one text."""
    role, pieces = result_pieces(tool_format, results)
    return role, "".join(pieces)


def _fill(template: str, values: Mapping[str, str]) -> list[str]:
    """A text of the format with a client's values in it, where the values have a place."""
    names = "|".join(map(re.escape, values))
    parts = re.split("\\{(" + names + ")\\}", template)
    return [values[part] if index % 2 else FormatText(part) for index, part in enumerate(parts)]


def _call_pieces(tool_format: ToolFormat, call: CallText, index: int) -> list[str]:
    body = tool_format.body
    arguments = call.arguments.strip() or "{}"
    begin, end = FormatText(tool_format.call_begin), FormatText(tool_format.call_end)
    if isinstance(body, JsonBody):
        inner = f'{{"{body.name_key}": {json.dumps(call.name)}, "{body.arguments_key}": {arguments}'
        if body.id_key is not None:
            inner += f', "{body.id_key}": {json.dumps(call.call_id)}'
        return [begin, inner + "}", end]
    if body.params is None:
        return [begin, *_header_pieces(body, call, index), arguments, end]
    params = [
        piece
        for key, value in parse_json(arguments).items()
        for piece in _param_pieces(body.params, key, value)
    ]
    return [begin, *_header_pieces(body, call, index), *params, end]


def _header_pieces(body: HeaderBody, call: CallText, index: int) -> list[str]:
    before, mark = FormatText(body.before_name), FormatText(body.id_mark)
    after = FormatText(body.after_name)
    if not body.id_mark:
        return [before, call.name, after]
    if not body.id_has_name:
        return [before, call.name, mark, call.call_id, after]
    # An id of the family's own is written as it was; one of ours cannot be, so the place counts.
    head = body.before_name + call.name + body.id_mark
    if re.fullmatch(re.escape(head) + body.id_pattern, call.call_id):
        return [before, call.name, mark, call.call_id[len(head) :], after]
    return [before, call.name, mark, str(index), after]


def _param_pieces(style: ParamStyle, key: str, value: Any) -> list[str]:
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    mark = "" if style.type_mark is None else style.type_mark + ("true" if is_text else "false")
    return [
        FormatText(style.begin),
        key,
        FormatText(mark + style.after_key),
        text,
        FormatText(style.end),
    ]
