# SPDX-License-Identifier: Apache-2.0
"""Owns the names of JSON's types as JSON Schema has them. Does not know: schemas."""

from __future__ import annotations

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def json_types(value: object) -> frozenset[str]:
    """The schema types that a parsed JSON value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    for python_type, name in ((str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, python_type):
            return frozenset({name})
    return frozenset({"null"})
