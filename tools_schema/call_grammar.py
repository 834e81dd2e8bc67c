# SPDX-License-Identifier: Apache-2.0
"""Owns the grammar of the calls of a turn, and notes where it is looser than their schemas.

Does not know: the text and the reasoning around them, control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools_schema.errors import InvalidSchemaError
from tools_schema.formats.base import HeaderBody, JsonBody, ToolFormat
from tools_schema.grammar_nodes import (
    Node,
    any_of,
    const,
    json_value,
    regex,
    repeat,
    sequence,
)
from tools_schema.grammar_schema import Loss, LoweredSchema, lower_schema
from tools_schema.param_grammar import ParamGrammar
from tools_schema.response_format import RESPONSE_FORMAT, ResponseFormat
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSpec


@dataclass(frozen=True, slots=True)
class Fallback:
    """The grammar is looser than this tool's schema (`tool` may be `response_format`)."""

    tool: str
    reason: str
    path: str = ""


class CallGrammar:
    """Builds the calls of one turn and gathers their fallbacks.

    Args:
        loosen: tools (or `response_format`) for whom any object must do.
    """

    def __init__(self, tool_format: ToolFormat, loosen: frozenset[str]) -> None:
        self._format = tool_format
        self._loosen = loosen
        self.fallbacks: list[Fallback] = []

    def response(self, response_format: ResponseFormat) -> Node:
        """What a turn's text must be.

        Raises: InvalidSchemaError for a pattern that the grammar engine refused: no looser one
        would be what was asked for.
        """
        if response_format.kind == "choice":
            return any_of([const(choice) for choice in response_format.choices])
        if response_format.kind == "regex":
            if RESPONSE_FORMAT in self._loosen:
                raise InvalidSchemaError(
                    param="structured_outputs.regex",
                    message="the grammar engine cannot hold this pattern",
                    value=response_format.pattern,
                    allowed="no lookaround, back references or Unicode classes",
                )
            return regex(response_format.pattern)
        return json_value(self._lower(RESPONSE_FORMAT, response_format.schema()).schema)

    def calls(self, tools: Sequence[ToolSpec], choice: ToolChoice) -> Node:
        """One call, then as many more as the choice wants and the family allows."""
        fmt = self._format
        one = any_of([self._call(tool) for tool in tools])
        most = choice.max_calls if fmt.max_calls is None else min(choice.max_calls, fmt.max_calls)
        parts = [one]
        if most > 1:
            more = sequence([const(fmt.separator), one])
            parts.append(repeat(more, max(choice.min_calls, 1) - 1, most - 1))
        if fmt.calls_as_list:
            parts = [const("["), *parts, const("]")]
        return sequence(parts)

    def _call(self, tool: ToolSpec) -> Node:
        fmt = self._format
        body = fmt.body
        if isinstance(body, JsonBody):
            begin = f'{{"{body.name_key}": {json.dumps(tool.name)}, "{body.arguments_key}": '
            parts = [const(fmt.call_begin + begin), self._arguments(tool, body)]
            if body.id_key is not None:
                parts += [const(f', "{body.id_key}": "'), regex(body.id_pattern), const('"')]
            return sequence([*parts, const("}" + fmt.call_end)])
        begin = fmt.call_begin + body.before_name + tool.name
        if body.id_mark:
            parts = [const(begin + body.id_mark), regex(body.id_pattern), const(body.after_name)]
        else:
            parts = [const(begin + body.after_name)]
        return sequence([*parts, self._arguments(tool, body), const(fmt.call_end)])

    def _arguments(self, tool: ToolSpec, body: JsonBody | HeaderBody) -> Node:
        # `strict: false` is no licence for arguments like 5: the schema is held all the same.
        lowered = self._lower(tool.name, tool.schema())
        if isinstance(body, JsonBody) or body.params is None:
            return json_value(lowered.schema)

        def lose(path: str, reason: str) -> None:
            self._fall_back(tool.name, Loss(path, reason))

        return ParamGrammar(body.params, lowered.schema, lose).arguments(lowered.schema)

    def _lower(self, owner: str, schema: dict[str, Any] | bool) -> LoweredSchema:
        if owner in self._loosen:
            loss = Loss("", "the grammar could not be compiled in its budget")
            lowered = LoweredSchema({"type": "object"}, (loss,))
        else:
            lowered = lower_schema(schema, must_be_object=owner != RESPONSE_FORMAT)
        for loss in lowered.losses:
            self._fall_back(owner, loss)
        return lowered

    def _fall_back(self, owner: str, loss: Loss) -> None:
        fallback = Fallback(owner, loss.reason, loss.path)
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
