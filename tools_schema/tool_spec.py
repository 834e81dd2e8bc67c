# SPDX-License-Identifier: Apache-2.0
"""Owns what a tool is: its name, description and parameters as the client gave them.

Does not know: grammars, model families, HTTP. The prompt is rendered from the original
parameters, key order and all: a session's tools are frozen, so their bytes never change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tools_schema.errors import InvalidSchemaError
from tools_schema.schema_check import check_schema

Shape = Literal["auto", "responses", "chat", "anthropic"]

MAX_TOOLS = 256
MAX_TOOLS_BYTES = 2 * 1024 * 1024
MAX_DESCRIPTION_CHARS = 64 * 1024
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool. `parameters` is the client's schema, untouched; None where it gave none."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """The shape chat templates expect: `{"type": "function", "function": {...}}`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema()
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, Any]:
        """The parameters, or the empty object schema where the client gave none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}}
        return self.parameters


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools in the client's order. Equal content means equal hash; hashing is O(1)."""

    tools: tuple[ToolSpec, ...] = ()
    skipped: tuple[str, ...] = ()  # types of the tools that were left out on request
    content_hash: str = field(init=False, default="")

    def __post_init__(self) -> None:
        text = json.dumps(
            [[t.name, t.description, t.parameters, t.strict] for t in self.tools],
            separators=(",", ":"),
        )
        object.__setattr__(self, "content_hash", hashlib.sha256(text.encode()).hexdigest())

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolSet) and other.content_hash == self.content_hash

    def __len__(self) -> int:
        return len(self.tools)

    def __iter__(self) -> Iterator[ToolSpec]:
        return iter(self.tools)

    def __contains__(self, name: object) -> bool:
        return any(tool.name == name for tool in self.tools)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.tools)

    def get(self, name: str) -> ToolSpec | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    def restrict(self, names: Iterable[str]) -> ToolSet:
        """The tools of these names, in this set's order."""
        wanted = frozenset(names)
        return ToolSet(tuple(tool for tool in self.tools if tool.name in wanted))


def parse_tools(
    raw: object, shape: Shape = "auto", *, param: str = "tools", skip_unknown: bool = False
) -> ToolSet:
    """Tools as a client sent them.

    Args:
        raw: the request's `tools`; None is the empty set.
        shape: `responses` (flat), `chat` (nested under `function`), `anthropic`
            (`input_schema`), or `auto`, which tells them apart tool by tool.
        skip_unknown: leave out tools of other types (`web_search`, ...) instead of refusing;
            their types are in `ToolSet.skipped`.

    Raises:
        InvalidSchemaError: with the path of the field, its value and what is allowed.
    """
    if raw is None:
        return ToolSet()
    if not isinstance(raw, list):
        raise InvalidSchemaError(param=param, message="not a list", value=raw, allowed="a list")
    if len(raw) > MAX_TOOLS:
        raise InvalidSchemaError(
            param=param, message=f"{len(raw)} tools are too many", allowed=f"at most {MAX_TOOLS}"
        )
    tools: list[ToolSpec] = []
    skipped: list[str] = []
    seen: dict[str, int] = {}
    for index, item in enumerate(raw):
        path = f"{param}[{index}]"
        kind = item.get("type", "function") if isinstance(item, dict) else None
        if skip_unknown and isinstance(kind, str) and not _is_function(item, kind):
            skipped.append(kind)
            continue
        tool, name_path = _parse_tool(item, shape, path)
        if tool.name in seen:
            raise InvalidSchemaError(
                param=name_path,
                message=f"the same name as {param}[{seen[tool.name]}]",
                value=tool.name,
                allowed="a name of its own for each tool",
            )
        seen[tool.name] = index
        tools.append(tool)
    size = sum(len(json.dumps(tool.parameters)) + len(tool.description) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidSchemaError(
            param=param, message=f"{size} bytes in all", allowed=f"at most {MAX_TOOLS_BYTES}"
        )
    return ToolSet(tuple(tools), tuple(skipped))


def _is_function(item: dict[str, Any], kind: str) -> bool:
    return kind == "function" or (kind == "custom" and "input_schema" in item)


def _parse_tool(item: object, shape: Shape, path: str) -> tuple[ToolSpec, str]:
    if not isinstance(item, dict):
        raise InvalidSchemaError(param=path, message="not a tool", value=item, allowed="an object")
    kind = item.get("type", "function")
    if not isinstance(kind, str) or not _is_function(item, kind):
        raise InvalidSchemaError(
            param=f"{path}.type", message="unknown tool type", value=kind, allowed='"function"'
        )
    if shape == "auto":
        shape = _guess_shape(item)
    schema_key = "input_schema" if shape == "anthropic" else "parameters"
    body: Any = item
    if shape == "chat":
        body, path = item.get("function"), f"{path}.function"
        if not isinstance(body, dict):
            raise InvalidSchemaError(
                param=path, message="not a function", value=body, allowed="an object with a name"
            )
    return _parse_function(body, schema_key, path), f"{path}.name"


def _guess_shape(item: dict[str, Any]) -> Shape:
    if "function" in item:
        return "chat"
    return "anthropic" if "input_schema" in item else "responses"


def _parse_function(body: dict[str, Any], schema_key: str, path: str) -> ToolSpec:
    name = body.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidSchemaError(
            param=f"{path}.name", message="not a tool name", value=name, allowed=NAME_PATTERN
        )
    description = body.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidSchemaError(
            param=f"{path}.description", message="not text", value=description, allowed="a string"
        )
    if description is not None and len(description) > MAX_DESCRIPTION_CHARS:
        raise InvalidSchemaError(
            param=f"{path}.description",
            message=f"{len(description)} characters are too many",
            allowed=f"at most {MAX_DESCRIPTION_CHARS}",
        )
    strict = body.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidSchemaError(
            param=f"{path}.strict", message="not a boolean", value=strict, allowed="true, false"
        )
    return ToolSpec(
        name=name,
        description=description or "",
        parameters=_parse_parameters(body.get(schema_key), f"{path}.{schema_key}"),
        strict=strict,
    )


def _parse_parameters(raw: object, path: str) -> dict[str, Any] | None:
    if raw is None:
        return None
    schema = check_schema(raw, path)
    if isinstance(schema, bool):
        raise InvalidSchemaError(
            param=path, message="not an object schema", value=raw, allowed="an object"
        )
    declared = schema.get("type", "object")
    if declared != "object" and not (isinstance(declared, list) and "object" in declared):
        raise InvalidSchemaError(
            param=f"{path}.type",
            message="arguments are always an object",
            value=declared,
            allowed='"object"',
        )
    return schema
