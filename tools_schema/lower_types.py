# SPDX-License-Identifier: Apache-2.0
"""Owns lowering one flat schema (no references, no unions) type by type for the grammar.

Does not know: how schemas are flattened. Objects have their own file; here are the dispatch, enums,
strings, numbers and arrays. See `grammar_schema` for the rule that all of it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tools_schema.ecma_pattern import UnsupportedPatternError, rewrite_pattern
from tools_schema.lower_objects import OBJECT_KEYS, lower_object
from tools_schema.schema_merge import Schema, both, type_set

Descend = Callable[[Any, str], "Schema | None"]
Lose = Callable[[str, str], None]
IsValid = Callable[[Schema, Any], bool]

# A longer bound costs seconds of compile time per string; the validator checks it instead.
MAX_BOUNDED_LENGTH = 8
_MAX_LISTED = 256
_MAX_MULTIPLE = 1024
# Bounds for what has none: past them clients and validators lose digits, and without any a model
# can write digits (or e999) for ever.
_INT64 = 2**63 - 1
_LARGEST = 10.0**15
# Formats the grammar writes well. They only annotate: holding them is a courtesy.
_FORMATS = frozenset({"date", "time", "date-time", "uuid"})

_ARRAY_KEYS = frozenset(
    {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems"}
)
_STRING_KEYS = frozenset({"minLength", "maxLength", "pattern"})
_NUMBER_KEYS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_FAMILIES = {
    "object": OBJECT_KEYS,
    "array": _ARRAY_KEYS,
    "string": _STRING_KEYS,
    "number": _NUMBER_KEYS,
}
# Assertions that no rule of the grammar stands for: left to the validator.
_UNHELD = frozenset(
    {
        "not",
        "if",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contains",
        "uniqueItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
KNOWN_KEYWORDS = frozenset({"type", "enum", "format"}).union(
    {"const", "then", "else"}, _UNHELD, *_FAMILIES.values()
)


class GrammarTypes:
    def __init__(self, descend: Descend, lose: Lose, is_valid: IsValid) -> None:
        self._descend = descend
        self._lose = lose
        self._is_valid = is_valid

    def lower(self, schema: Schema, path: str) -> Schema | None:
        """The grammar's schema for a flat one; None where no value is valid."""
        for key in schema:
            if key in _UNHELD and not _says_nothing(key, schema):
                self._lose(path, f"{key} is not held")
        if "enum" in schema:
            return self._enum(schema, path)
        types = _types(schema)
        if types is None:
            return {}
        lowered = [self._one_type(name, schema, path) for name in types]
        found = [node for node in lowered if node is not None]
        if not found:
            return None
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _one_type(self, name: str, schema: Schema, path: str) -> Schema | None:
        if name == "object":
            return lower_object(schema, path, self._descend, self._lose, self._is_valid)
        if name == "array":
            return self._array(schema, path)
        if name == "string":
            return self._string(schema, path)
        if name in ("integer", "number"):
            return self._number(name, schema, path)
        return {"type": name}

    def _enum(self, schema: Schema, path: str) -> Schema | None:
        """The values that the other keywords admit: exact, as the validator itself decides."""
        rest = {key: value for key, value in schema.items() if key != "enum"}
        values = [v for v in schema["enum"] if not rest or self._is_valid(rest, v)]
        return {"enum": values} if values else None

    # -- strings ---------------------------------------------------------------------------

    def _string(self, schema: Schema, path: str) -> Schema | None:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if high is not None and high < low:
            return None
        if high == 0:
            return {"enum": [""]} if self._is_valid({**schema, "type": "string"}, "") else None
        node: Schema = {"type": "string"}
        if "pattern" in schema:
            try:
                rewritten = rewrite_pattern(schema["pattern"])
                node["pattern"] = rewritten.regex
                if not rewritten.is_exact:
                    self._lose(path, "repeat counts of the pattern are not held")
            except UnsupportedPatternError as error:
                self._lose(path, f"pattern is not held: {error}")
        is_free = "pattern" not in node
        if low:
            self._keep_length(node, "minLength", low, path, is_free=is_free)
        if high is not None:
            self._keep_length(node, "maxLength", high, path, is_free=is_free)
        if len(node) == 1 and schema.get("format") in _FORMATS:
            node["format"] = schema["format"]
        return node

    def _keep_length(
        self, node: Schema, key: str, length: float, path: str, *, is_free: bool
    ) -> None:
        if is_free and length <= MAX_BOUNDED_LENGTH:
            node[key] = int(length)
        else:
            reason = f"over {MAX_BOUNDED_LENGTH}" if is_free else "beside a pattern"
            self._lose(path, f"{key} is not held: {reason}")

    # -- numbers ---------------------------------------------------------------------------

    def _number(self, name: str, schema: Schema, path: str) -> Schema | None:
        step = schema.get("multipleOf")
        if step is not None and float(step).is_integer():
            name, step = "integer", int(step)  # its multiples are integers
        elif step is not None:
            self._lose(path, "multipleOf is not held for fractions")
            step = None
        if name == "integer":
            return self._integer(schema, step, path)
        low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
        if low > high or (low == high and (low_open or high_open)):
            return None
        if low == high:
            return {"enum": [low]}
        node: Schema = {"type": "number"}
        for key, open_key, value, is_open in (
            ("minimum", "exclusiveMinimum", low, low_open),
            ("maximum", "exclusiveMaximum", high, high_open),
        ):
            if math.isinf(value):
                value, is_open = math.copysign(_LARGEST, value), False
            if _is_plain(value):
                node[open_key if is_open else key] = value
            else:
                self._lose(path, "a bound of a number is not held: too large or too fine")
        return node

    def _integer(self, schema: Schema, step: int | None, path: str) -> Schema | None:
        low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
        first = -math.inf if math.isinf(low) else _above(low, is_open=low_open)
        last = math.inf if math.isinf(high) else -_above(-high, is_open=high_open)
        if first > last:
            return None
        if step is not None and not (math.isinf(first) and math.isinf(last)):
            return self._stepped(first, last, step, path)
        node: Schema = {"type": "integer"}
        if first > _INT64 or last < -_INT64:
            self._lose(path, "a bound of an integer is not held: past 64 bits")
            return node
        if step is not None and step <= _MAX_MULTIPLE:
            return {"type": "integer", "multipleOf": step}
        if step is not None:
            self._lose(path, f"multipleOf is not held: over {_MAX_MULTIPLE}")
        node["minimum"] = int(max(first, -_INT64))
        node["maximum"] = int(min(last, _INT64))
        return node

    def _stepped(self, first: float, last: float, step: int, path: str) -> Schema | None:
        """multipleOf inside bounds: listed where there are few."""
        if not math.isinf(first) and not math.isinf(last):
            start = -(-int(first) // step) * step
            if (int(last) - start) // step < _MAX_LISTED:
                values = list(range(start, int(last) + 1, step))
                return {"enum": values} if values else None
        rest = {"minimum": first, "maximum": last}
        self._lose(path, "multipleOf is not held beside bounds")
        return self._integer({k: v for k, v in rest.items() if not math.isinf(v)}, None, path)

    # -- arrays ----------------------------------------------------------------------------

    def _array(self, schema: Schema, path: str) -> Schema | None:
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):  # drafts before 2020-12
            prefix, rest = rest, schema.get("additionalItems", True)
        if "unevaluatedItems" in schema and "items" not in schema:
            rest = both(rest, schema["unevaluatedItems"])
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        nodes: list[Schema] = []
        for index, part in enumerate(prefix):
            node = self._descend(part, f"{path}[{index}]")
            if node is None:
                break  # the list must end before this one
            nodes.append(node)
        more = self._descend(rest, f"{path}[]") if len(nodes) == len(prefix) else None
        most = math.inf if high is None else int(high)
        if more is None:
            most = min(most, len(nodes))
        if low > most:
            return None
        return _array_node(nodes, more, low, most)


def _array_node(prefix: list[Schema], more: Schema | None, low: int, most: float) -> Schema:
    if most == 0:
        return {"enum": [[]]}
    node: Schema = {"type": "array"}
    if most <= len(prefix):
        prefix, more = prefix[: int(most)], None
    if prefix:
        node["prefixItems"] = prefix
    node["items"] = False if more is None else more
    if low:
        node["minItems"] = low
    if more is not None and not math.isinf(most):
        node["maxItems"] = int(most)
    return node


def _types(schema: Schema) -> list[str] | None:
    """The types to write; None: nothing is said, any value will do.

    Where no `type` is given but some keyword speaks of one, only that type is written.
    """
    if "type" in schema:
        types = type_set(schema["type"])
        return [t for t in types if t != "integer" or "number" not in types]
    return [name for name, keys in _FAMILIES.items() if not keys.isdisjoint(schema)] or None


def _says_nothing(key: str, schema: Schema) -> bool:
    value = schema[key]
    if key == "uniqueItems":
        return value is False or schema.get("maxItems", 2) <= 1
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return not value
    return key == "not" and value is False


def _bound(
    schema: Schema, inclusive: str, exclusive: str, pick: Callable[[float, float], float]
) -> tuple[float, bool]:
    """The tighter of a bound's two spellings, and whether it is open."""
    none = -math.inf if pick is max else math.inf
    closed, opened = schema.get(inclusive, none), schema.get(exclusive, none)
    if isinstance(opened, bool):  # draft 4
        return closed, opened and not math.isinf(closed)
    if pick(closed, opened) == opened and not math.isinf(opened):
        return opened, True
    return closed, False


def _above(bound: float, *, is_open: bool) -> int:
    """The least integer above a bound."""
    least = math.ceil(bound)
    return least + 1 if is_open and least == bound else least


def _is_plain(value: float) -> bool:
    """A bound that the grammar compares exactly: few digits on either side of the point."""
    return abs(value) <= _LARGEST and (float(value) * 10**6).is_integer()
