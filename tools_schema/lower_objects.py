# SPDX-License-Identifier: Apache-2.0
"""Owns lowering a flat object schema for the grammar. Does not know: other types.

Properties are written in their declared order. Undeclared ones are written only where the schema
says so (`additionalProperties`, or no word of properties at all), since a model invents too easily;
beside declared ones only if they begin with another letter than each of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools_schema.ecma_pattern import UnsupportedPatternError, rewrite_pattern
from tools_schema.schema_merge import Schema, both

Descend = Callable[[Any, str], "Schema | None"]
Lose = Callable[[str, str], None]
IsValid = Callable[[Schema, Any], bool]

# What no key holds unescaped, for a class of characters.
_NO_KEY = r'"\\\x00-\x1f'
OBJECT_KEYS = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    }
)


def lower_object(
    schema: Schema, path: str, descend: Descend, lose: Lose, is_valid: IsValid
) -> Schema | None:
    """The grammar's object; None where no object is valid."""
    required = list(schema.get("required", []))
    declared = _declared(schema, required, is_valid)
    properties: dict[str, Schema] = {}
    for key, part in declared.items():
        node = descend(part, f"{path}.{key}" if path else key)
        if node is not None:
            properties[key] = node
        elif key in required:
            return None
    node = {"type": "object"}
    if declared or "properties" in schema:
        node["properties"] = properties
    if required:
        node["required"] = [key for key in properties if key in required]
    if len(properties) < len(declared):
        node["additionalProperties"] = False  # or one that no value fits would come in as extra
    else:
        node |= _extras(schema, path, bool(declared), descend, lose)
    return _counted(node, schema, path, lose)


def _declared(schema: Schema, required: list[str], is_valid: IsValid) -> dict[str, Any]:
    """Every declared or required property, with all that the schema says of it."""
    declared = dict(schema.get("properties", {}))
    for key in required:
        declared.setdefault(key, schema.get("additionalProperties", True))
    for pattern, part in schema.get("patternProperties", {}).items():
        for key in declared:
            if is_valid({"pattern": pattern}, key):
                declared[key] = both(declared[key], part)
    names = schema.get("propertyNames", True)
    return {
        key: part if is_valid_name(names, key, is_valid) else False
        for key, part in declared.items()
    }


def is_valid_name(names: Any, key: str, is_valid: IsValid) -> bool:
    return names is True or (names is not False and is_valid(names, key))


def _extras(schema: Schema, path: str, has_declared: bool, descend: Descend, lose: Lose) -> Schema:
    """What else may be in the object, as keywords of the grammar's schema."""
    extra = schema.get("additionalProperties", not (has_declared or "properties" in schema))
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        extra = both(extra, schema["unevaluatedProperties"])
    patterns = schema.get("patternProperties", {})
    names = schema.get("propertyNames", True)
    if has_declared and (patterns or names is not True):
        return {"additionalProperties": False}  # the declared ones will do
    if patterns:
        return _patterned(patterns, extra, names, path, descend, lose)
    if names is not True and extra is not False:
        return _named(names, extra, path, descend, lose)
    node = descend(extra, f"{path}.*")
    if node is None or not has_declared:
        return {"additionalProperties": False if node is None else node or True}
    # The engine spends 0.03 s on each letter of each declared key to keep it out of the others
    # (129k tokens): so the others begin with another letter.
    pattern = f"[^{_first_letters(schema)}{_NO_KEY}][^{_NO_KEY}]*"
    return {"patternProperties": {pattern: node or True}, "additionalProperties": False}


def _first_letters(schema: Schema) -> str:
    """What the declared and required keys begin with, for a class of characters."""
    keys = [*schema.get("properties", {}), *schema.get("required", [])]
    letters = dict.fromkeys(key[0] for key in keys if key)
    return "".join(f"\\{c}" if c in "]^-[" else c for c in letters if c not in '"\\')


def _patterned(
    patterns: dict[str, Any], extra: Any, names: Any, path: str, descend: Descend, lose: Lose
) -> Schema:
    """Only patterns are declared: keys of one pattern, the only one that can be told apart."""
    if len(patterns) > 1 or names is not True:
        lose(path, "patternProperties is not held: more than one rule for a key")
        return {"additionalProperties": True}
    [(pattern, part)] = patterns.items()
    node = descend(part, f"{path}.*")
    if node is None:
        return {"properties": {}, "additionalProperties": False}
    return _keyed(pattern, node, path, lose) or {"additionalProperties": True}


def _keyed(pattern: str, node: Schema, path: str, lose: Lose) -> Schema | None:
    """Keys that match a pattern, all with values of `node`; None where it cannot be held."""
    try:
        rewritten = rewrite_pattern(pattern)
    except UnsupportedPatternError as error:
        lose(path, f"the pattern of the keys is not held: {error}")
        return None
    if not rewritten.is_exact:
        lose(path, "repeat counts of the keys' pattern are not held")
    return {"patternProperties": {rewritten.regex: node}, "additionalProperties": False}


def _named(names: Any, extra: Any, path: str, descend: Descend, lose: Lose) -> Schema:
    """A rule for the keys of an object that declares none."""
    node = descend(extra, f"{path}.*")
    if node is None or names is False:
        return {"properties": {}, "additionalProperties": False}
    if isinstance(names, dict) and set(names) <= {"type", "enum"} and "enum" in names:
        keys = [key for key in names["enum"] if isinstance(key, str)]
        return {"properties": dict.fromkeys(keys, node), "additionalProperties": False}
    if isinstance(names, dict) and set(names) <= {"type", "pattern"} and "pattern" in names:
        return _keyed(names["pattern"], node, path, lose) or {"additionalProperties": node or True}
    if isinstance(names, dict) and names not in ({}, {"type": "string"}):
        lose(path, "propertyNames is not held")
    return {"additionalProperties": node or True}


def _counted(node: Schema, schema: Schema, path: str, lose: Lose) -> Schema | None:
    """minProperties and maxProperties, where the grammar counts as the validator does."""
    low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    num_required = len(node.get("required", []))
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    num_declared = len(node.get("properties", {}))
    if high is not None and high < max(low, num_required):
        return None
    if is_closed and low > num_declared:
        return None
    if low > num_required:
        if low > 1 and not is_closed:
            lose(path, "minProperties is not held: a key may come twice")
        else:
            node["minProperties"] = low
    if high is not None and not (is_closed and high >= num_declared):
        if high == 0:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        node["maxProperties"] = int(high)
    return node
