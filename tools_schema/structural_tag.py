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

from tools_schema.errors import InvalidSchemaError, ReasoningUnsupportedError
from tools_schema.formats.base import HeaderBody, JsonBody, ToolFormat
from tools_schema.grammar_schema import Loss, LoweredSchema, lower_schema
from tools_schema.schema_check import check_schema
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet, ToolSpec

Reasoning = Literal["off", "auto", "on"]
Node = dict[str, Any]

MAX_WHITESPACE = 2  # unbounded, a model can loop on it for ever
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
    builder = _Builder(tool_format, loosen)
    if tool_format.reasoning is None and reasoning == "on":
        raise ReasoningUnsupportedError(
            param="reasoning",
            message=f"the model's format {tool_format.name} has no reasoning",
            value=reasoning,
            allowed='"off"',
        )
    tools = list(toolset.restrict(choice.names)) if choice.kind != "none" else []
    answer = builder.answer(response_format, has_tools=len(toolset) > 0, may_call=bool(tools))
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


class _Builder:
    """Builds the nodes of one turn's grammar and gathers its fallbacks."""

    def __init__(self, tool_format: ToolFormat, loosen: frozenset[str]) -> None:
        self._format = tool_format
        self._loosen = loosen
        self.fallbacks: list[Fallback] = []

    # -- text ------------------------------------------------------------------------------

    def answer(
        self, response_format: ResponseFormat | None, *, has_tools: bool, may_call: bool
    ) -> Node | None:
        """What a turn without calls says; None: anything."""
        if response_format is not None:
            return self._schema_node(RESPONSE_FORMAT, response_format.schema())
        return _text(self._text_excludes()) if has_tools or may_call else None

    def _text_excludes(self) -> list[str]:
        """Markers that free text must not spell: a call would be read out of it."""
        fmt = self._format
        excludes = [fmt.open_marker, fmt.call_begin.strip(), fmt.optional_prefix, *fmt.dropped]
        if fmt.reasoning is not None:
            excludes += [fmt.reasoning.begin.strip(), fmt.reasoning.end.strip()]
        return list(dict.fromkeys(marker for marker in excludes if marker))

    # -- calls -----------------------------------------------------------------------------

    def turn(self, tools: list[ToolSpec], choice: ToolChoice, answer: Node | None) -> Node:
        fmt = self._format
        one = _any_of([self._call(tool) for tool in tools])
        calls = self._calls(one, choice)
        if choice.is_forced:
            return _sequence([_const(fmt.lead + fmt.section_begin), calls, _const(fmt.section_end)])
        if fmt.is_bare or (answer is not None and answer["type"] != "any_text"):
            return self._either(calls, answer)
        return self._triggered(calls)

    def _either(self, calls: Node, answer: Node | None) -> Node:
        """Calls from the first byte on, or an answer that cannot be taken for one."""
        fmt = self._format
        calls = _sequence([_const(fmt.lead + fmt.section_begin), calls, _const(fmt.section_end)])
        if answer is None or answer["type"] == "any_text":
            # A call starts with a brace, so text does not; leading blanks would hide one.
            first = {"type": "regex", "pattern": r"[^{\s]"}
            answer = {
                "type": "optional",
                "content": _sequence([first, _text(self._text_excludes())]),
            }
        return _any_of([calls, answer])

    def _triggered(self, calls: Node) -> Node:
        """Free text until the marker; from there on calls."""
        fmt = self._format
        excludes = self._text_excludes()
        trigger = fmt.section_begin or fmt.call_begin
        marker = trigger.rstrip()
        layout = trigger[len(marker) :]
        rest = [calls, _const(fmt.section_end)]
        if fmt.section_begin:
            rest.insert(0, _const(layout))
        else:
            rest = [_strip_const(calls, marker), _const(fmt.section_end)]
        node = _sequence(rest)
        if fmt.allows_empty_list:
            none = _sequence([_const("[]" + fmt.section_end), _text(excludes)])
            node = _any_of([node, none])
        return {
            "type": "dispatch",
            "rules": [[marker, node]],
            "loop": False,
            "excludes": [e for e in excludes if e != marker],
        }

    def _calls(self, one: Node, choice: ToolChoice) -> Node:
        """`one`, then as many more as the choice wants and allows."""
        fmt = self._format
        low = max(choice.min_calls, 1) - 1
        high = -1 if choice.max_calls is None else choice.max_calls - 1
        parts = [one]
        if high != 0:
            more = _sequence([_const(fmt.separator), one])
            parts.append({"type": "repeat", "min": low, "max": high, "content": more})
        if fmt.calls_as_list:
            parts = [_const("["), *parts, _const("]")]
        return _sequence(parts)

    def _call(self, tool: ToolSpec) -> Node:
        fmt = self._format
        body = fmt.body
        if isinstance(body, JsonBody):
            begin = f'{{"{body.name_key}": {json.dumps(tool.name)}, "{body.arguments_key}": '
            parts = [_const(fmt.call_begin + begin), self._arguments(tool, body)]
            if body.id_key is not None:
                parts += [_const(f', "{body.id_key}": "'), _regex(body.id_pattern), _const('"')]
            return _sequence([*parts, _const("}" + fmt.call_end)])
        begin = fmt.call_begin + body.before_name + tool.name
        if body.id_mark:
            parts = [_const(begin + body.id_mark), _regex(body.id_pattern), _const(body.after_name)]
        else:
            parts = [_const(begin + body.after_name)]
        return _sequence([*parts, self._arguments(tool, body), _const(fmt.call_end)])

    def _arguments(self, tool: ToolSpec, body: JsonBody | HeaderBody) -> Node:
        style = "json"
        if isinstance(body, HeaderBody) and body.params is not None:
            style = body.params.grammar_style
        # `strict: false` is no licence for arguments like 5: the schema is held all the same.
        return self._schema_node(tool.name, tool.schema(), style)

    def _schema_node(self, owner: str, schema: dict[str, Any] | bool, style: str = "json") -> Node:
        if owner in self._loosen:
            lowered = LoweredSchema(
                {"type": "object"}, (Loss("", "the grammar could not be compiled in its budget"),)
            )
        else:
            lowered = lower_schema(schema, must_be_object=owner != RESPONSE_FORMAT)
        self.fallbacks += [Fallback(owner, loss.reason, loss.path) for loss in lowered.losses]
        if style != "json" and lowered.schema == {"type": "object", "properties": {}}:
            return _const("")  # the style's own rule for it admits nothing but blanks
        node: Node = {
            "type": "json_schema",
            "json_schema": lowered.schema,
            "max_whitespace_cnt": MAX_WHITESPACE,
        }
        if style != "json":
            node["style"] = style
        return node

    # -- reasoning -------------------------------------------------------------------------

    def with_reasoning(
        self, turn: Node | None, reasoning: Reasoning, budget: int | None
    ) -> Node | None:
        tags = self._format.reasoning
        if tags is None or reasoning == "off":
            return turn
        if turn is None and budget is None:
            return None
        thought: Node = _text([tags.begin.strip(), tags.end.strip()])
        if budget is not None:
            thought["max_tokens"] = budget
        rest = turn if turn is not None else {"type": "any_text"}
        closed = [thought, _const(tags.end + tags.layout_after_end), rest]
        if reasoning == "on":
            return _sequence(closed)
        opened = _sequence([_const(tags.begin + tags.layout_after_begin), *closed])
        return _any_of([opened, rest])


def _text(excludes: list[str]) -> Node:
    return {"type": "any_text", "excludes": excludes} if excludes else {"type": "any_text"}


def _const(value: str) -> Node:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def _any_of(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}


def _sequence(nodes: list[Node]) -> Node:
    """Neighbouring constants joined, empty ones dropped, sequences flattened."""
    joined: list[Node] = []
    for node in nodes:
        for part in node["elements"] if node["type"] == "sequence" else [node]:
            if part["type"] == "const_string" and joined and joined[-1]["type"] == "const_string":
                joined[-1] = _const(joined[-1]["value"] + part["value"])
            else:
                joined.append(part)
    joined = [n for n in joined if n["type"] != "const_string" or n["value"]]
    if not joined:
        return _const("")
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def _strip_const(node: Node, prefix: str) -> Node:
    """The node without the constant text that it starts with."""
    if node["type"] == "const_string":
        return _const(node["value"].removeprefix(prefix))
    if node["type"] == "or":
        return _any_of([_strip_const(n, prefix) for n in node["elements"]])
    first, *rest = node["elements"]
    return _sequence([_strip_const(first, prefix), *rest])
