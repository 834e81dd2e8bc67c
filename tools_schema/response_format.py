# SPDX-License-Identifier: Apache-2.0
"""Owns what a turn's text must be: `response_format`, `text.format`, `structured_outputs`.

Does not know: grammars, tools.

Source: the shapes of OpenAI's API; `structured_outputs` is that of vLLM's server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tools_schema.errors import InvalidSchemaError
from tools_schema.schema_check import check_schema

RESPONSE_FORMAT = "response_format"  # who a fallback of it belongs to, where tools have their names

_CONSTRAINTS = ("json", "json_object", "regex", "choice")
_MAX_PATTERN_CHARS = 4096
_MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the turn's text must be.

    schema_text: JSON; empty for any object.
    pattern: of a regex, which the whole text matches.
    choices: the text is one of these.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    schema_text: str = ""
    pattern: str = ""
    choices: tuple[str, ...] = ()

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


def parse_structured_outputs(
    raw: object, param: str = "structured_outputs"
) -> ResponseFormat | None:
    """`structured_outputs`: exactly one of `json`, `json_object`, `regex`, `choice`.

    Raises:
        InvalidSchemaError: naming the field, its value and what is allowed.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise InvalidSchemaError(
            param=param, message="not an object", value=raw, allowed="an object"
        )
    given = [name for name, value in raw.items() if value is not None and value is not False]
    if len(given) != 1 or given[0] not in _CONSTRAINTS:
        unknown = next((name for name in given if name not in _CONSTRAINTS), None)
        raise InvalidSchemaError(
            param=f"{param}.{unknown}" if unknown else param,
            message="not supported" if unknown else f"{len(given)} constraints",
            allowed="exactly one of " + ", ".join(_CONSTRAINTS),
        )
    name = given[0]
    value, path = raw[name], f"{param}.{name}"
    match name:
        case "json_object":
            return ResponseFormat("json_object")
        case "json":
            return ResponseFormat(
                "json_schema", json.dumps(check_schema(_loaded(value, path), path))
            )
        case "choice":
            return ResponseFormat("choice", choices=_choices(value, path))
    if not isinstance(value, str) or not value or len(value) > _MAX_PATTERN_CHARS:
        raise InvalidSchemaError(
            param=path,
            message="not a pattern",
            value=value,
            allowed=f"a regular expression of up to {_MAX_PATTERN_CHARS} characters",
        )
    return ResponseFormat("regex", pattern=value)


def _loaded(schema: object, path: str) -> object:
    """A schema may come as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError:
        raise InvalidSchemaError(
            param=path, message="not JSON", value=schema, allowed="a JSON Schema"
        ) from None


def _choices(raw: object, path: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= _MAX_CHOICES:
        raise InvalidSchemaError(
            param=path, message="not a list", value=raw, allowed=f"1 to {_MAX_CHOICES} strings"
        )
    for index, choice in enumerate(raw):
        if not isinstance(choice, str) or not choice:
            raise InvalidSchemaError(
                param=f"{path}[{index}]", message="not text", value=choice, allowed="a string"
            )
    return tuple(dict.fromkeys(raw))
