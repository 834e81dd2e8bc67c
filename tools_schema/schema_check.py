# SPDX-License-Identifier: Apache-2.0
"""Owns what schema a client may send: caps, then the JSON Schema meta-schema.

Does not know: grammars, formats, what a tool is. A schema is checked against the draft its
`$schema` names (2020-12 where it names none). References leave the schema only for the
meta-schemas; nothing is ever fetched.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs

from tools_schema.errors import InvalidSchemaError

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 48  # JSON nesting of the schema text
MAX_COMBINATOR_DEPTH = 8  # anyOf / oneOf / allOf inside one another: grammars grow with the product
MAX_NODES = 20_000
MAX_ENUM_VALUES = 5_000

_COMBINATORS = frozenset({"anyOf", "oneOf", "allOf"})


def check_schema(schema: object, param: str) -> dict[str, Any] | bool:
    """The schema itself, proven valid and within the caps.

    Raises:
        InvalidSchemaError: naming the path of the part that is wrong.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidSchemaError(
            param=param, message="not a JSON Schema", value=schema, allowed="an object"
        )
    _check_caps(schema, param)
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        path = param + json_path(error.instance_path)
        raise InvalidSchemaError(
            param=path,
            message=f"not valid JSON Schema: {error.message}",
            value=error.instance,
            hint=_hint(schema),
        ) from None
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        raise InvalidSchemaError(
            param=param + ".$schema", message=str(error), value=schema.get("$schema")
        ) from None
    compile_schema(schema, param)
    return schema


def compile_schema(schema: dict[str, Any] | bool, param: str) -> jsonschema_rs.Validator:
    """A validator for the original schema: nothing is fetched, formats only annotate.

    Raises InvalidSchemaError where it cannot be built.
    """
    try:
        return jsonschema_rs.validator_for(schema, offline=True, validate_formats=False)
    except jsonschema_rs.ReferencingError as error:
        raise InvalidSchemaError(
            param=param,
            message=f"a reference cannot be resolved: {error}",
            allowed="references inside this schema",
        ) from None
    except jsonschema_rs.ValidationError as error:
        raise InvalidSchemaError(
            param=param + json_path(error.instance_path), message=error.message
        ) from None
    except ValueError as error:
        raise InvalidSchemaError(param=param, message=str(error)) from None


def json_path(parts: list[str | int]) -> str:
    """`.properties.x` / `[2]` for a path of keys and indexes."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _hint(schema: dict[str, Any]) -> str:
    if "$schema" in schema:
        return ""
    return "without $schema it is read as draft 2020-12; name another draft there"


def _check_caps(schema: dict[str, Any], param: str) -> None:
    """Walk with an explicit stack: a hostile schema must not overflow ours."""
    num_nodes = 0
    stack: list[tuple[Any, str, int, int]] = [(schema, param, 1, 0)]
    while stack:
        node, path, depth, combinators = stack.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise InvalidSchemaError(
                param=param, message="too many parts", allowed=f"at most {MAX_NODES}"
            )
        if depth > MAX_DEPTH:
            raise InvalidSchemaError(
                param=path, message="nested too deeply", allowed=f"at most {MAX_DEPTH} levels"
            )
        if combinators > MAX_COMBINATOR_DEPTH:
            raise InvalidSchemaError(
                param=path,
                message="anyOf / oneOf / allOf nested too deeply",
                allowed=f"at most {MAX_COMBINATOR_DEPTH} inside one another",
            )
        stack.extend(_children(node, path, depth, combinators))
    size = len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidSchemaError(
            param=param, message=f"{size} bytes is too long", allowed=f"at most {MAX_SCHEMA_BYTES}"
        )


def _children(
    node: Any, path: str, depth: int, combinators: int
) -> list[tuple[Any, str, int, int]]:
    if isinstance(node, dict):
        enum = node.get("enum")
        if isinstance(enum, list) and len(enum) > MAX_ENUM_VALUES:
            raise InvalidSchemaError(
                param=path + ".enum",
                message=f"{len(enum)} values are too many",
                allowed=f"at most {MAX_ENUM_VALUES}",
            )
        return [
            (value, f"{path}.{key}", depth + 1, combinators + (key in _COMBINATORS))
            for key, value in node.items()
        ]
    if isinstance(node, list):
        return [(v, f"{path}[{i}]", depth + 1, combinators) for i, v in enumerate(node)]
    return []
