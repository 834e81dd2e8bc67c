# SPDX-License-Identifier: Apache-2.0
"""Tools as clients send them: every shape, and every way to be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools_schema.errors import InvalidSchemaError
from tools_schema.schema_check import MAX_COMBINATOR_DEPTH, MAX_DEPTH
from tools_schema.tool_spec import MAX_TOOLS, parse_tools

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
}


def _refusal(raw: object, **kwargs: Any) -> InvalidSchemaError:
    with pytest.raises(InvalidSchemaError) as caught:
        parse_tools(raw, **kwargs)
    assert caught.value.code == "invalid_schema"
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "function", "name": "f", "description": "d", "parameters": _SCHEMA},
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}},
        {"name": "f", "description": "d", "input_schema": _SCHEMA},
        {"type": "custom", "name": "f", "description": "d", "input_schema": _SCHEMA},
    ],
)
def test_every_dialect_shape_is_the_same_tool(raw: dict[str, Any]) -> None:
    [tool] = parse_tools([raw])
    assert (tool.name, tool.description, tool.parameters) == ("f", "d", _SCHEMA)


def test_key_order_of_the_original_schema_is_kept() -> None:
    [tool] = parse_tools([{"name": "f", "parameters": _SCHEMA}])
    assert list(tool.as_chat()["function"]["parameters"]["properties"]) == ["b", "a"]


def test_equal_tools_hash_equal_and_any_change_hashes_different() -> None:
    first = parse_tools([{"name": "f", "parameters": _SCHEMA}])
    again = parse_tools([{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}])
    assert first == again and hash(first) == hash(again)
    swapped = {**_SCHEMA, "properties": dict(reversed(_SCHEMA["properties"].items()))}
    for other in ({"name": "g", "parameters": _SCHEMA}, {"name": "f", "parameters": swapped}):
        assert parse_tools([other]) != first


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    [tool] = parse_tools([{"name": "f"}])
    assert tool.parameters is None
    assert tool.schema() == {"type": "object", "properties": {}}


def test_no_tools_is_an_empty_set() -> None:
    assert len(parse_tools(None)) == 0 and len(parse_tools([])) == 0


def test_builtin_tool_types_are_refused_or_left_out_on_request() -> None:
    raw = [{"type": "web_search"}, {"type": "function", "name": "f"}]
    assert _refusal(raw).param == "tools[0].type"
    kept = parse_tools(raw, skip_unknown=True)
    assert kept.names == ("f",) and kept.skipped == ("web_search",)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("tools", "tools"),
        ([5], "tools[0]"),
        ([{"type": 5}], "tools[0].type"),
        ([{"type": "function", "function": 5}], "tools[0].function"),
        ([{"name": "has space"}], "tools[0].name"),
        ([{"name": ""}], "tools[0].name"),
        ([{"name": "x" * 65}], "tools[0].name"),
        ([{"name": "f\n"}], "tools[0].name"),
        ([{"type": "function", "function": {"name": None}}], "tools[0].function.name"),
        ([{"name": "f", "description": 3}], "tools[0].description"),
        ([{"name": "f", "strict": "yes"}], "tools[0].strict"),
        ([{"name": "f"}, {"name": "f"}], "tools[1].name"),
        ([{"name": "f", "parameters": []}], "tools[0].parameters"),
        ([{"name": "f", "parameters": True}], "tools[0].parameters"),
        ([{"name": "f", "parameters": {"type": "string"}}], "tools[0].parameters.type"),
        (
            [
                {"name": "a"},
                {"name": "b"},
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"type": "object", "properties": {"x": {"type": "intege"}}},
                    },
                },
            ],
            "tools[2].function.parameters.properties.x.type",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"x": {"enum": "a"}}}}],
            "tools[0].parameters.properties.x.enum",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"x": {"items": [{}]}}}}],
            "tools[0].parameters.properties.x.items",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"x": {"pattern": "("}}}}],
            "tools[0].parameters.properties.x.pattern",
        ),
        (
            [{"name": "f", "input_schema": {"required": "x"}}],
            "tools[0].input_schema.required",
        ),
    ],
)
def test_a_wrong_field_is_named_by_its_path(raw: object, param: str) -> None:
    error = _refusal(raw)
    assert error.param == param
    assert str(error).startswith(param + ":")


def test_references_that_lead_nowhere_or_outside_are_refused_and_nothing_is_fetched() -> None:
    for reference in ("#/$defs/missing", "http://127.0.0.1:9/schema.json", "other.json"):
        error = _refusal([{"name": "f", "parameters": {"$ref": reference}}])
        assert error.param.startswith("tools[0].parameters")


def test_older_drafts_are_read_by_their_own_rules() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"x": {"type": "array", "items": [{"type": "integer"}]}},
    }
    assert parse_tools([{"name": "f", "parameters": schema}]).names == ("f",)
    del schema["$schema"]
    assert "name another draft" in str(_refusal([{"name": "f", "parameters": schema}]))


def test_schemas_over_a_cap_are_refused_with_what_is_allowed() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_DEPTH):
        deep = {"type": "object", "properties": {"x": deep}}
    assert "nested too deeply" in str(_refusal([{"name": "f", "parameters": deep}]))

    unions: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_COMBINATOR_DEPTH + 1):
        unions = {"anyOf": [unions]}
    refusal = _refusal([{"name": "f", "parameters": {"properties": {"x": unions}}}])
    assert "anyOf" in str(refusal)

    long = {"type": "object", "description": "x" * 300_000}
    assert "too long" in str(_refusal([{"name": "f", "parameters": long}]))
    values = {"properties": {"x": {"enum": list(range(6000))}}}
    assert "too many" in str(_refusal([{"name": "f", "parameters": values}]))
    assert "too many" in str(_refusal([{"name": f"f{i}"} for i in range(MAX_TOOLS + 1)]))


def test_a_schema_nested_past_any_stack_is_refused_not_fatal() -> None:
    text = '{"properties":{"x":' * 5_000 + "{}" + "}}" * 5_000
    deep: Any = {}
    for _ in range(5_000):
        deep = {"properties": {"x": deep}}
    assert len(text) > 0
    assert "nested too deeply" in str(_refusal([{"name": "f", "parameters": deep}]))


def test_values_in_messages_are_cut_short() -> None:
    error = _refusal([{"name": "x" * 10_000}])
    assert len(str(error)) < 400
    json.dumps(str(error))
