# SPDX-License-Identifier: Apache-2.0
"""Owns which JSON types a tool's parameters may have, by what the grammar writes for them.

Does not know: formats, streams. Families that write parameters as raw text need this to tell
the string 123 from the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools_schema.grammar_schema import lower_schema
from tools_schema.json_types import ALL_TYPES, json_types
from tools_schema.schema_merge import Schema

_MAX_HOPS = 32


@dataclass(frozen=True, slots=True)
class ParamTypes:
    """The types of each declared parameter, and of all others."""

    declared: dict[str, frozenset[str]]
    undeclared: frozenset[str] = ALL_TYPES

    def of(self, key: str) -> frozenset[str]:
        return self.declared.get(key, self.undeclared)


def param_types(schema: dict[str, Any]) -> ParamTypes:
    """The types of a tool's parameters."""
    lowered = lower_schema(schema, must_be_object=True).schema
    defs = lowered.get("$defs", {})
    declared: dict[str, frozenset[str]] = {}
    undeclared: frozenset[str] = frozenset()
    for branch in _objects(lowered, defs, _MAX_HOPS):
        for key, node in branch.get("properties", {}).items():
            declared[key] = declared.get(key, frozenset()) | _types(node, defs, _MAX_HOPS)
        for node in branch.get("patternProperties", {}).values():
            undeclared |= _types(node, defs, _MAX_HOPS)
        undeclared |= _types(branch.get("additionalProperties", True), defs, _MAX_HOPS)
    return ParamTypes(declared, undeclared or ALL_TYPES)


def _objects(node: Schema, defs: dict[str, Schema], hops: int) -> list[Schema]:
    """The object schemas that the arguments may be."""
    if "$ref" in node and hops:
        return _objects(defs[node["$ref"].rpartition("/")[2]], defs, hops - 1)
    if "anyOf" in node:
        return [found for branch in node["anyOf"] for found in _objects(branch, defs, hops)]
    if "enum" in node:
        return [{"properties": {k: {"enum": [v]} for k, v in e.items()}} for e in node["enum"]]
    return [node]


def _types(node: Any, defs: dict[str, Schema], hops: int) -> frozenset[str]:
    if node is False:
        return frozenset()
    if not isinstance(node, dict) or hops == 0:
        return ALL_TYPES
    if "$ref" in node:
        return _types(defs[node["$ref"].rpartition("/")[2]], defs, hops - 1)
    if "anyOf" in node:
        return frozenset().union(*(_types(branch, defs, hops - 1) for branch in node["anyOf"]))
    if "enum" in node:
        return frozenset().union(*(json_types(value) for value in node["enum"]))
    if "type" not in node:
        return ALL_TYPES
    return frozenset({"number", "integer"} if node["type"] == "number" else {node["type"]})
