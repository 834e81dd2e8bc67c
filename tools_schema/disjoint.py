# SPDX-License-Identifier: Apache-2.0
"""Owns whether the branches of a `oneOf` exclude one another: then it is no more than an `anyOf`.

Does not know: grammars. "No" means "not provably": only what the schemas plainly say counts.
"""

from __future__ import annotations

import itertools
from typing import Any

from tools_schema.json_pointer import resolve_local
from tools_schema.json_types import ALL_TYPES, json_types
from tools_schema.schema_merge import type_set

_MAX_BRANCHES = 64


def are_disjoint(branches: list[Any], root: Any) -> bool:
    """Whether no value is valid under two of `branches`."""
    if len(branches) > _MAX_BRANCHES:
        return False
    resolved = [_follow(branch, root) for branch in branches]
    return all(_exclude(a, b, root) for a, b in itertools.combinations(resolved, 2))


def _follow(schema: Any, root: Any) -> Any:
    if isinstance(schema, dict) and set(schema) == {"$ref"} and isinstance(schema["$ref"], str):
        return resolve_local(root, schema["$ref"])
    return schema


def _exclude(a: Any, b: Any, root: Any) -> bool:
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    if not _types(a) & _types(b):
        return True
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not any(_equal(x, y) for x in values_a for y in values_b)
    return _tells_apart(a, b, root) and _tells_apart(b, a, root)


def _tells_apart(a: Any, b: Any, root: Any) -> bool:
    """Whether an object of `a` has a property that `b` cannot have."""
    if _types(a) != {"object"}:
        return False
    in_a, in_b = a.get("properties", {}), b.get("properties", {})
    for key in a.get("required", []):
        if key in in_b:
            values_a = _values(_follow(in_a.get(key), root))
            values_b = _values(_follow(in_b[key], root))
            if values_a is None or values_b is None:
                continue
            if not any(_equal(x, y) for x in values_a for y in values_b):
                return True
        elif b.get("additionalProperties") is False and "patternProperties" not in b:
            return True
    return False


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """`number` stands for both kinds of number."""
    if "type" not in schema:
        values = _values(schema)
        if values is None:
            return ALL_TYPES
        return frozenset().union(*(json_types(value) for value in values))
    types = set(type_set(schema["type"]))
    return frozenset(types | {"integer"} if "number" in types else types)


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    enum = schema.get("enum")
    return enum if isinstance(enum, list) else None


def _equal(a: Any, b: Any) -> bool:
    """JSON equality: true is not 1."""
    return json_types(a) & json_types(b) != frozenset() and a == b
