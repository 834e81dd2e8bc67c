# SPDX-License-Identifier: Apache-2.0
"""Owns the grammar of arguments written as tagged parameters, from a lowered schema.

Does not know: tools, turns. Strings are raw text, everything else is JSON; the parser tells them
apart by type, so what it would read differently is not written, or is reported. No value can
hold its own end marker: these families have no escape for it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable
from typing import Any

from tools_schema.formats.base import ParamStyle
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
)
from tools_schema.json_types import json_types
from tools_schema.schema_merge import Schema
from tools_schema.validation import parse_json

Lose = Callable[[str, str], None]

_KEY_CHARS = string.ascii_letters + string.digits + "_.$-"
# Without a bound: in xgrammar 0.2.8 one of 64 costs 0.6 s (129k tokens), one of none 0.01 s.
_KEY = r"[A-Za-z0-9_.$-]+"
_SYNTAX = "[](){}|*+?.^$"  # outside a class of characters


class ParamGrammar:
    """Writes one tool's parameters in one style."""

    def __init__(self, style: ParamStyle, schema: Schema, lose: Lose) -> None:
        self._style = style
        self._defs: dict[str, Schema] = schema.get("$defs", {})
        self._lose = lose
        self._end = style.end.strip()
        self._anything = text([self._end])

    def arguments(self, schema: Schema) -> Node:
        """All parameters of a call."""
        node = self._follow(schema)
        if "anyOf" in node:
            return any_of([self.arguments(branch) for branch in node["anyOf"]])
        if "enum" in node:
            return any_of([self._listed_object(value) for value in node["enum"]])
        parts = []
        required = node.get("required", [])
        for key, value in node.get("properties", {}).items():
            part = self._param(const(key), value, key)
            parts.append(part if key in required else optional(part))
        if {"minProperties", "maxProperties"} & set(node):
            self._lose("", "the number of parameters is not held")
        return sequence([*parts, *self._undeclared(node)])

    def _undeclared(self, node: Schema) -> list[Node]:
        declared = node.get("properties", {})
        if "patternProperties" in node and declared:
            [value] = node["patternProperties"].values()
            return [repeat(self._param(regex(_other_key(declared)), _schema(value), "*"), 0, None)]
        if "patternProperties" in node:
            self._lose("", "the pattern of the keys is not held in tagged parameters")
            [value] = node["patternProperties"].values()
        else:
            value = node.get("additionalProperties", "properties" not in node)
        if value is False:
            return []
        return [repeat(self._param(regex(_KEY), _schema(value), "*"), 0, None)]

    def _listed_object(self, value: dict[str, Any]) -> Node:
        return sequence([self._param(const(k), {"enum": [v]}, k) for k, v in value.items()])

    def _param(self, key: Node, schema: Schema, path: str) -> Node:
        """One parameter; with a type mark each kind of value has a spelling of its own."""
        style = self._style
        texts, values = self._split(schema, path)
        branches = []
        if style.type_mark is None:
            if self._anything in texts:
                values = []  # any text is written already, JSON or not
            if texts:
                values = [self._bounded(value) for value in values]
            found = [*texts, *values]
            return sequence(
                [const(style.begin), key, const(style.after_key), any_of(found), const(style.end)]
            )
        for mark, nodes in (("true", texts), ("false", values)):
            if nodes:
                begin = const(style.type_mark + mark + style.after_key)
                branches.append(sequence([begin, any_of(nodes), const(style.end)]))
        return sequence([const(style.begin), key, any_of(branches)])

    # -- values ----------------------------------------------------------------------------

    def _split(self, schema: Schema, path: str) -> tuple[list[Node], list[Node]]:
        """What of a schema is raw text, and what is JSON."""
        node = self._follow(schema)
        if not node:
            return [self._anything], [self._json({"not_a_string": True})]
        if "anyOf" in node:
            return self._split_union(node["anyOf"], path)
        if "enum" in node:
            return self._split_enum(node["enum"], path)
        if node.get("type") == "string":
            return [self._text(node, path)], []
        return [], [self._json(node)]

    def _split_union(self, branches: list[Schema], path: str) -> tuple[list[Node], list[Node]]:
        texts: list[Node] = []
        values: list[Node] = []
        is_plain = True
        for branch in branches:
            more_texts, more_values = self._split(branch, path)
            texts += more_texts
            values += more_values
            followed = self._follow(branch)
            is_plain &= followed.get("type") == "string" or set(followed) == {"type"}
        if texts and values and not is_plain and self._style.type_mark is None:
            self._lose(path, "text and JSON cannot be told apart in tagged parameters")
        return texts, values

    def _split_enum(self, listed: list[Any], path: str) -> tuple[list[Node], list[Node]]:
        types = frozenset().union(*(json_types(value) for value in listed))
        texts = [v for v in listed if isinstance(v, str) and self._reads_as_text(v, types, listed)]
        values = [v for v in listed if not isinstance(v, str)]
        if not texts and not values:
            self._lose(path, "no listed value can be written in tagged parameters")
            return [self._anything], []
        spelled = [const(json.dumps(value, ensure_ascii=False)) for value in values]
        return [const(value) for value in texts], spelled

    def _reads_as_text(self, value: str, types: frozenset[str], listed: list[Any]) -> bool:
        """Whether the parser gives back this string, or another listed value."""
        if self._end in value:
            return False
        if self._style.type_mark is not None or types == {"string"}:
            return True
        try:
            parsed = parse_json(value)
        except ValueError:
            return True
        return not json_types(parsed) & types or parsed in listed

    def _text(self, node: Schema, path: str) -> Node:
        if "pattern" in node:
            if _never_writes(node["pattern"], self._end[0]):
                return regex(node["pattern"])
            self._lose(path, "the pattern is not held in tagged parameters")
            return self._anything
        low, high = node.get("minLength", 0), node.get("maxLength")
        if high is not None:
            return regex(f"{self._any_char(high)}{{{low},{high}}}")
        if low > 1:
            self._lose(path, "minLength over 1 is not held in tagged parameters")
        rest = text([self._end])
        # One character that cannot begin the end marker makes the text at least that long.
        return sequence([regex(f"[^{_in_class(self._end[0])}]"), rest]) if low else rest

    def _any_char(self, most: int) -> str:
        """A character of so short a text that no end marker comes about in it or at its end.

        Bounded characters are cheap; bounded text that excludes a marker costs seconds (129k).
        """
        first = self._end[0]
        is_safe = len(self._end) > most and first not in self._end[1:]
        return r"[^\x00]" if is_safe else rf"[^\x00{_in_class(first)}]"

    def _json(self, node: Schema) -> Node:
        if node == {"not_a_string": True}:
            kinds = ("object", "array", "number", "boolean", "null")
            node = {"anyOf": [{"type": kind} for kind in kinds]}
        used = _definitions(node, self._defs)
        return json_value({**node, "$defs": used} if used else node)

    def _bounded(self, value: Node) -> Node:
        """JSON beside text: the parser reads both up to the end marker."""
        return {**value, "excludes": [self._end]} if value["type"] == "json_schema" else value

    def _follow(self, schema: Schema) -> Schema:
        """The schema itself, its references taken out at the top."""
        for _ in range(len(self._defs) + 1):
            if "$ref" not in schema:
                break
            schema = self._defs[schema["$ref"].rpartition("/")[2]]
        return schema


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[" else char


def _other_key(declared: Iterable[str]) -> str:
    """A key that begins with another letter than every declared one."""
    taken = {key[0] for key in declared if key}
    first = "".join(c for c in _KEY_CHARS if c not in taken)
    return f"[{first}][{_KEY_CHARS}]*"


def _schema(value: Any) -> Schema:
    """`true` as the schema that it stands for."""
    return {} if value is True else dict(value)


def _never_writes(pattern: str, char: str) -> bool:
    """Whether a rewritten pattern plainly matches no text with `char` in it."""
    in_class, index = False, 0
    while index < len(pattern):
        this, after = pattern[index], pattern[index + 1 : index + 2]
        if this == "\\":
            if after in ("D", "W", "S", char):
                return False
            index += 2
            continue
        is_literal = this not in ("]" if in_class else _SYNTAX)
        if (this == char and is_literal) or (this == "." and not in_class):
            return False
        if this == "[" and after == "^" and not in_class:
            return False
        if in_class and this == "-" and pattern[index - 1] <= char <= after:
            return False
        in_class = this == "[" or (in_class and this != "]")
        index += 1
    return True


def _definitions(node: Any, defs: dict[str, Schema]) -> dict[str, Schema]:
    """The definitions that `node` needs, directly or not."""
    used: dict[str, Schema] = {}
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name in defs and name not in used:
                used[name] = defs[name]
                stack.append(defs[name])
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)
    return used
