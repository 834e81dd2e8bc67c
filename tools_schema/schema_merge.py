# SPDX-License-Identifier: Apache-2.0
"""Owns the conjunction of two JSON Schemas as one flat schema.

Does not know: grammars, `$ref`, unions (whoever flattens a schema has taken those out). Exact: an
instance is valid for the merged schema where it is valid for both, but for what is reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Report = Callable[[str], None]

_LOWER_BOUNDS = frozenset(
    {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"}
)
_UPPER_BOUNDS = frozenset(
    {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"}
)
_WHOLE = frozenset({"properties", "additionalProperties", "items", "prefixItems"})


def merge(a: Schema, b: Schema, report: Report) -> Schema:
    """`a` and `b` as one schema; `report` names the keywords that could not be joined."""
    merged = {key: value for key, value in a.items() if key not in _WHOLE}
    for key, value in b.items():
        if key in _WHOLE:
            continue
        merged[key] = _join(key, merged[key], value, report) if key in merged else value
    _merge_objects(a, b, merged)
    _merge_arrays(a, b, merged)
    return merged


def type_set(declared: str | list[str]) -> list[str]:
    return [declared] if isinstance(declared, str) else list(declared)


def both(a: Any, b: Any) -> Any:
    """A schema for what is valid under both."""
    if a is False or b is False:
        return False
    if a is True or a == {} or is_same(a, b):
        return b
    return a if b is True or b == {} else {"allOf": [a, b]}


def is_same(a: Any, b: Any) -> bool:
    """Whether two schemas are written alike (in Python true equals 1, in JSON it does not)."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _join(key: str, a: Any, b: Any, report: Report) -> Any:
    if is_same(a, b):
        return a
    if key == "type":
        return _common_types(type_set(a), type_set(b))
    if key == "enum":
        known = {_canonical(value) for value in b}
        return [value for value in a if _canonical(value) in known]
    if key == "required":
        return list(dict.fromkeys([*a, *b]))
    if key == "patternProperties":
        return {**a, **b, **{k: both(a[k], b[k]) for k in a if k in b}}
    if key == "propertyNames":
        return both(a, b)
    if key in _LOWER_BOUNDS and _are_numbers(a, b):
        return max(a, b)
    if key in _UPPER_BOUNDS and _are_numbers(a, b):
        return min(a, b)
    if key == "multipleOf" and isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    if key != "format":  # an annotation
        report(key)
    return a


def _merge_objects(a: Schema, b: Schema, merged: Schema) -> None:
    """Each side's `additionalProperties` speaks for the properties only the other declares."""
    in_a, in_b = a.get("properties", {}), b.get("properties", {})
    if in_a or in_b or "properties" in a or "properties" in b:
        # Patterns take properties out of `additionalProperties`: the stricter reading is kept.
        merged["properties"] = {
            key: both(
                in_a.get(key, a.get("additionalProperties", True)),
                in_b.get(key, b.get("additionalProperties", True)),
            )
            for key in dict.fromkeys([*in_a, *in_b])
        }
    given = [s["additionalProperties"] for s in (a, b) if "additionalProperties" in s]
    if given:
        merged["additionalProperties"] = both(given[0], given[-1])


def _merge_arrays(a: Schema, b: Schema, merged: Schema) -> None:
    prefix_a, prefix_b = a.get("prefixItems", []), b.get("prefixItems", [])
    rest_a, rest_b = a.get("items", True), b.get("items", True)
    if prefix_a or prefix_b:
        merged["prefixItems"] = [
            both(
                prefix_a[i] if i < len(prefix_a) else rest_a,
                prefix_b[i] if i < len(prefix_b) else rest_b,
            )
            for i in range(max(len(prefix_a), len(prefix_b)))
        ]
    if "items" in a or "items" in b:
        merged["items"] = both(rest_a, rest_b)


def _common_types(a: list[str], b: list[str]) -> list[str]:
    found = [t for t in a if t in b or (t == "integer" and "number" in b)]
    if "number" in a and "number" not in b and "integer" in b:
        found.append("integer")
    return list(dict.fromkeys(found))


def _are_numbers(a: Any, b: Any) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))


def _canonical(value: Any) -> str:
    """Equal for values that JSON Schema calls equal (1 and 1.0, any key order)."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
