# SPDX-License-Identifier: Apache-2.0
"""Owns the grammar of one turn: (tools, choice, format, reasoning) -> structural-tag text.

Does not know: the grammar engine (it writes the JSON dialect of xgrammar 0.2.8 structural tags
and never imports it), tokens, streams. Order of a turn: reasoning, text, calls; once calls have
begun only calls follow, so the turn ends with the last of them.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tools_schema.errors import (
    InvalidSchemaError,
    InvalidToolChoiceError,
    ReasoningUnsupportedError,
)
from tools_schema.formats.base import HeaderBody, JsonBody, ToolFormat
from tools_schema.grammar_nodes import (
    Node,
    any_of,
    const,
    json_value,
    optional,
    regex,
    repeat,
    sequence,
    text,
    without_prefix,
)
from tools_schema.grammar_schema import Loss, LoweredSchema, lower_schema
from tools_schema.param_grammar import ParamGrammar
from tools_schema.schema_check import check_schema
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet, ToolSpec

Reasoning = Literal["off", "auto", "on"]
_CACHED_PLANS = 256
RESPONSE_FORMAT = "response_format"


@dataclass(frozen=True, slots=True)
class Fallback:
    """The grammar is looser than this tool's schema (`tool` may be `response_format`)."""

    tool: str
    reason: str
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarPlan:
    """`text` None: nothing to constrain. `kind` is a kind of `engine.api.GrammarSpec`."""

    text: str | None
    kind: str = "structural_tag"
    fallbacks: tuple[Fallback, ...] = ()
    min_calls: int = 0


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the turn's text must be. `schema_text`: JSON; empty for any object."""

    kind: Literal["json_object", "json_schema"]
    schema_text: str = ""

    def schema(self) -> dict[str, Any] | bool:
        loaded: dict[str, Any] | bool = json.loads(self.schema_text or '{"type":"object"}')
        return loaded


def parse_response_format(raw: object, param: str = "response_format") -> ResponseFormat | None:
    """`response_format` (chat) or `text.format` (responses). None and `text` constrain nothing.

    Raises:
        InvalidSchemaError: naming the field, its value and what is allowed.
    """
    if raw is None:
        return None
    kind = raw.get("type") if isinstance(raw, dict) else raw
    if not isinstance(raw, dict) or kind not in ("text", "json_object", "json_schema"):
        raise InvalidSchemaError(
            param=f"{param}.type" if isinstance(raw, dict) else param,
            message="unknown response format",
            value=kind,
            allowed='"text", "json_object", "json_schema"',
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json_object")
    inner = raw.get("json_schema")
    path = f"{param}.json_schema.schema" if isinstance(inner, dict) else f"{param}.schema"
    body = inner if isinstance(inner, dict) else raw
    if "schema" not in body:
        raise InvalidSchemaError(param=path, message="missing", allowed="a JSON Schema")
    return ResponseFormat("json_schema", json.dumps(check_schema(body["schema"], path)))


def build_structural_tag(
    toolset: ToolSet,
    choice: ToolChoice,
    tool_format: ToolFormat,
    *,
    reasoning: Reasoning = "off",
    response_format: ResponseFormat | None = None,
    reasoning_budget: int | None = None,
    loosen: Set[str] = frozenset(),
) -> GrammarPlan:
    """The grammar of a turn, and where it is looser than what the client asked for.

    Args:
        reasoning: `on` where the rendered prompt ends inside open reasoning, `auto` where the
            model may open it itself, `off` where it may not.
        reasoning_budget: at most so many tokens of reasoning.
        loosen: tools (or `response_format`) whose schema the grammar engine refused or could not
            compile in time: any object is accepted, and the plan says so.

    Raises:
        ReasoningUnsupportedError: the format has no reasoning tags and `reasoning` is `on`.
        InvalidToolChoiceError: more calls are wanted than the family can write in one turn.
    """
    return _build_cached(
        toolset,
        choice,
        tool_format,
        reasoning,
        response_format,
        reasoning_budget,
        frozenset(loosen),
    )


@lru_cache(maxsize=_CACHED_PLANS)
def _build_cached(
    toolset: ToolSet,
    choice: ToolChoice,
    tool_format: ToolFormat,
    reasoning: Reasoning,
    response_format: ResponseFormat | None,
    reasoning_budget: int | None,
    loosen: frozenset[str],
) -> GrammarPlan:
    _check_abilities(tool_format, choice, reasoning)
    builder = _Builder(tool_format, loosen)
    tools = list(toolset.restrict(choice.names)) if choice.kind != "none" else []
    answer = builder.answer(response_format, has_tools=len(toolset) > 0)
    turn = builder.turn(tools, choice, answer) if tools else answer
    turn = builder.with_reasoning(turn, reasoning, reasoning_budget)
    if turn is None:
        return GrammarPlan(text=None)
    tag = {"type": "structural_tag", "format": turn}
    return GrammarPlan(
        text=json.dumps(tag, ensure_ascii=False, separators=(",", ":")),
        fallbacks=tuple(builder.fallbacks),
        min_calls=choice.min_calls,
    )


def _check_abilities(tool_format: ToolFormat, choice: ToolChoice, reasoning: Reasoning) -> None:
    if tool_format.reasoning is None and reasoning == "on":
        raise ReasoningUnsupportedError(
            param="reasoning",
            message=f"the model's format {tool_format.name} has no reasoning",
            value=reasoning,
            allowed='"off"',
        )
    if tool_format.max_calls is not None and choice.min_calls > tool_format.max_calls:
        raise InvalidToolChoiceError(
            param="min_tool_calls",
            message=f"the model's format {tool_format.name} has no parallel calls",
            value=choice.min_calls,
            allowed=f"at most {tool_format.max_calls}",
        )


class _Builder:
    """Builds the nodes of one turn's grammar and gathers its fallbacks."""

    def __init__(self, tool_format: ToolFormat, loosen: frozenset[str]) -> None:
        self._format = tool_format
        self._loosen = loosen
        self.fallbacks: list[Fallback] = []

    # -- text ------------------------------------------------------------------------------

    def answer(self, response_format: ResponseFormat | None, *, has_tools: bool) -> Node | None:
        """What a turn without calls says; None: anything."""
        begin = const(self._format.text_begin)
        if response_format is not None:
            lowered = self._lower(RESPONSE_FORMAT, response_format.schema())
            return sequence([begin, json_value(lowered.schema)])
        return sequence([begin, self._free_text()]) if has_tools else None

    def _free_text(self) -> Node:
        """Text that spells no marker: a call would be read out of it."""
        return text(self._text_excludes())

    def _text_excludes(self) -> list[str]:
        fmt = self._format
        excludes = [fmt.open_marker, fmt.call_marker, fmt.also_call_begin, fmt.optional_prefix]
        excludes += [fmt.text_begin, *(fmt.preamble or ()), *fmt.dropped]
        # Their ends too: alone in a text they mean nothing, and clients would see markup.
        excludes += [fmt.section_end.strip(), fmt.call_end.strip()]
        if fmt.reasoning is not None:
            excludes += [fmt.reasoning.begin.strip(), fmt.reasoning.end.strip()]
        return list(dict.fromkeys(marker for marker in excludes if len(marker) > 1))

    # -- calls -----------------------------------------------------------------------------

    def turn(self, tools: list[ToolSpec], choice: ToolChoice, answer: Node | None) -> Node:
        fmt = self._format
        calls = self._calls(any_of([self._call(tool) for tool in tools]), choice)
        whole = sequence([const(fmt.lead + fmt.section_begin), calls, const(fmt.section_end)])
        if fmt.preamble is not None:
            begin, end = fmt.preamble
            said = sequence([const(begin), self._free_text(), const(end)])
            whole = sequence([optional(said), whole])
        if choice.is_forced:
            return whole
        if fmt.is_bare:
            return any_of([whole, self._not_a_call() if _is_free(answer) else answer or text()])
        if _is_free(answer):
            return self._triggered(calls)
        return any_of([whole, answer or text()])

    def _not_a_call(self) -> Node:
        """A bare call starts with a brace, so text does not; leading blanks would hide one."""
        return optional(sequence([regex(r"[^{\s]"), self._free_text()]))

    def _triggered(self, calls: Node) -> Node:
        """Free text until the marker; from there on calls."""
        fmt = self._format
        marker = fmt.open_marker
        if fmt.section_begin:
            layout = fmt.section_begin.partition(marker)[2]
            rest = sequence([const(layout), calls, const(fmt.section_end)])
        else:
            rest = without_prefix(calls, marker)
        if fmt.allows_empty_list:
            none = sequence([const("[]" + fmt.section_end), self._free_text()])
            rest = any_of([rest, none])
        return {
            "type": "dispatch",
            "rules": [[marker, rest]],
            "loop": False,
            "excludes": [e for e in self._text_excludes() if e != marker],
        }

    def _calls(self, one: Node, choice: ToolChoice) -> Node:
        """`one`, then as many more as the choice wants and the family allows."""
        fmt = self._format
        caps = [cap for cap in (choice.max_calls, fmt.max_calls) if cap is not None]
        parts = [one]
        if min(caps, default=2) > 1:
            more = sequence([const(fmt.separator), one])
            most = min(caps) - 1 if caps else None
            parts.append(repeat(more, max(choice.min_calls, 1) - 1, most))
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

    # -- reasoning -------------------------------------------------------------------------

    def with_reasoning(
        self, turn: Node | None, reasoning: Reasoning, budget: int | None
    ) -> Node | None:
        """The turn behind its reasoning: open already (`on`), or opened by the model or not."""
        tags = self._format.reasoning
        if tags is None or reasoning == "off":
            return turn
        if turn is None and budget is None:
            return None
        thought = text([tags.begin.strip(), tags.end.strip()], max_tokens=budget)
        rest = turn if turn is not None else text()
        closed = [thought, const(tags.end + tags.layout_after_end), rest]
        if reasoning == "on":
            return sequence(closed)
        return any_of([sequence([const(tags.begin + tags.layout_after_begin), *closed]), rest])


def _is_free(answer: Node | None) -> bool:
    """Whether any text is an answer."""
    return answer is None or answer["type"] == "any_text"
