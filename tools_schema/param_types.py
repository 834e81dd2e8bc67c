# SPDX-License-Identifier: Apache-2.0
"""Owns which JSON types a tool's parameters may have, by its schema.

Does not know: formats, streams. Families that write parameters as raw text need this to tell
the string 123 from the number.
"""

from __future__ import annotations

from typing import Any

from tools_schema.json_pointer import resolve_local

_MAX_HOPS = 32
_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


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


def property_types(schema: dict[str, Any]) -> dict[str, frozenset[str]]:
    """The types each declared property may have."""
    found: dict[str, set[str]] = {}
    _gather(schema, schema, found, _MAX_HOPS)
    return {key: frozenset(types) for key, types in found.items()}


def _gather(root: Any, node: Any, found: dict[str, set[str]], hops: int) -> None:
    if not isinstance(node, dict) or hops == 0:
        return
    for key, child in (node.get("properties") or {}).items():
        found.setdefault(key, set()).update(_types(root, child, hops - 1))
    if isinstance(node.get("$ref"), str):
        _gather(root, resolve_local(root, node["$ref"]), found, hops - 1)
    for combinator in ("allOf", "anyOf", "oneOf"):
        for child in node.get(combinator) or []:
            _gather(root, child, found, hops - 1)
    for branch in ("if", "then", "else"):
        _gather(root, node.get(branch), found, hops - 1)


def _types(root: Any, node: Any, hops: int) -> frozenset[str]:
    """The types this schema admits, as far as its own keywords say."""
    if not isinstance(node, dict) or hops == 0:
        return _ALL
    types = _ALL
    declared = node.get("type")
    if isinstance(declared, str):
        types &= {declared}
    elif isinstance(declared, list):
        types &= frozenset(declared)
    if "const" in node:
        types &= json_types(node["const"])
    if isinstance(node.get("enum"), list):
        types &= frozenset().union(*(json_types(v) for v in node["enum"]))
    if isinstance(node.get("$ref"), str):
        types &= _types(root, resolve_local(root, node["$ref"]), hops - 1)
    for child in node.get("allOf") or []:
        types &= _types(root, child, hops - 1)
    for combinator in ("anyOf", "oneOf"):
        if node.get(combinator):
            types &= frozenset().union(
                *(_types(root, child, hops - 1) for child in node[combinator])
            )
    return types
