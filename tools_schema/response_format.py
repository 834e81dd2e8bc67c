# SPDX-License-Identifier: Apache-2.0
"""Owns what a turn's text must be where the client wants JSON: `response_format`, `text.format`.

Does not know: grammars, tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tools_schema.errors import InvalidSchemaError
from tools_schema.schema_check import check_schema

RESPONSE_FORMAT = "response_format"  # who a fallback of it belongs to, where tools have their names


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the turn's text must be. `schema_text`: JSON; empty for any object."""

    kind: Literal["json_object", "json_schema"]
    schema_text: str = ""

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
