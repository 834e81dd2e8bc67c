# SPDX-License-Identifier: Apache-2.0
"""Owns the text of tools, calls and results for models whose chat template renders none.

Does not know: chat templates, token ids, control tokens. Byte-stable: equal input, equal output;
the client's key order and the model's argument bytes are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools_schema.formats.base import HeaderBody, JsonBody, ParamStyle, ToolFormat
from tools_schema.tool_spec import ToolSet
from tools_schema.validation import parse_json


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


def render_system(tool_format: ToolFormat, toolset: ToolSet, instructions: str = "") -> str:
    """The system text that declares the tools, the client's instructions beside them."""
    if not len(toolset):
        return instructions
    specs = [json.dumps(tool.as_chat(), ensure_ascii=False) for tool in toolset]
    tools = "\n".join(specs) if tool_format.tools_one_per_line else f"[{', '.join(specs)}]"
    template = tool_format.system_template or "{instructions}{tools}"
    # Instructions go where the family's own prompts have them: before the tools, or after.
    before, after = template.split("{instructions}", 1)
    if instructions:
        instructions = f"\n\n{instructions}" if before else f"{instructions}\n\n"
    return (before + "\0" + after).replace("{tools}", tools).replace("\0", instructions, 1)


def render_calls(tool_format: ToolFormat, calls: Sequence[CallText]) -> str:
    """The calls as the model would have written them."""
    if not calls:
        return ""
    texts = [_render_call(tool_format, call, index) for index, call in enumerate(calls)]
    inner = tool_format.separator.join(texts)
    if tool_format.calls_as_list:
        inner = f"[{inner}]"
    return tool_format.lead + tool_format.section_begin + inner + tool_format.section_end


def render_results(tool_format: ToolFormat, results: Sequence[ResultText]) -> tuple[str, str]:
    """(role, text) of the message that hands results back, in the calls' order."""
    texts = [
        f"{_fill(tool_format.result_begin, r)}{r.output}{tool_format.result_end}" for r in results
    ]
    return tool_format.result_role, tool_format.result_separator.join(texts)


def _fill(text: str, result: ResultText) -> str:
    return text.replace("{name}", result.name).replace("{call_id}", result.call_id)


def _render_call(tool_format: ToolFormat, call: CallText, index: int) -> str:
    body = tool_format.body
    arguments = call.arguments.strip() or "{}"
    if isinstance(body, JsonBody):
        inner = f'{{"{body.name_key}": {json.dumps(call.name)}, "{body.arguments_key}": {arguments}'
        if body.id_key is not None:
            inner += f', "{body.id_key}": {json.dumps(call.call_id)}'
        inner += "}"
    else:
        inner = _render_header(body, call, index) + _render_arguments(body, arguments)
    return tool_format.call_begin + inner + tool_format.call_end


def _render_header(body: HeaderBody, call: CallText, index: int) -> str:
    head = body.before_name + call.name
    if not body.id_mark:
        return head + body.after_name
    if not body.id_has_name:
        return head + body.id_mark + call.call_id + body.after_name
    # An id of the family's own is written as it was; one of ours cannot be, so the place counts.
    is_own = re.fullmatch(re.escape(head + body.id_mark) + body.id_pattern, call.call_id)
    return (call.call_id if is_own else f"{head}{body.id_mark}{index}") + body.after_name


def _render_arguments(body: HeaderBody, arguments: str) -> str:
    if body.params is None:
        return arguments
    style = body.params
    return "".join(_render_param(style, k, v) for k, v in parse_json(arguments).items())


def _render_param(style: ParamStyle, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    mark = "" if style.type_mark is None else style.type_mark + ("true" if is_text else "false")
    return f"{style.begin}{key}{mark}{style.after_key}{text}{style.end}"
