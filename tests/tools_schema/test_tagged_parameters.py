# SPDX-License-Identifier: Apache-2.0
"""Families that write arguments as tagged parameters: types, whitespace, what cannot be held."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.grammar_oracle import accepts
from tests.fakes.tool_samples import calls_of, parse, parser_for, problems_of, text_of
from tools_schema.events import ToolCallArgs
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS, get_format
from tools_schema.rendering import CallText, render_calls
from tools_schema.structural_tag import build_structural_tag
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet, parse_tools
from tools_schema.validation import validate_arguments

QWEN, GLM, DSML = get_format("qwen_xml"), get_format("glm"), get_format("deepseek_v3_2")
TAGGED = [f for f in FORMATS if getattr(f.body, "params", None) is not None]
ALL = pytest.mark.parametrize("fmt", TAGGED, ids=lambda fmt: fmt.name)


def _tools(**properties: Any) -> ToolSet:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return parse_tools([{"name": "f", "parameters": schema}])


def _qwen(key: str, value: str, tools: ToolSet) -> dict[str, Any]:
    param = f"<parameter={key}>\n{value}\n</parameter>\n"
    text = f"<tool_call>\n<function=f>\n{param}</function>\n</tool_call>"
    choice = parse_tool_choice(None, tools)
    [(_, arguments)] = calls_of(parse(QWEN, text, toolset=tools, choice=choice))
    parsed: dict[str, Any] = json.loads(arguments)
    return parsed


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, "\nx\n", "\nx\n"),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "a </parameter b", "a </parameter b"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, "123", 123),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "boolean"}, "true", True),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "array", "items": {"type": "string"}}, '["</parameter>"]', ["</parameter>"]),
        ({"type": "object"}, '{\n "a": [1]\n}', {"a": [1]}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12a", "12a"),
        ({}, "12", 12),
        ({}, "twelve", "twelve"),
        ({"$ref": "#/properties/other"}, "5", "5"),
    ],
)
def test_the_schema_says_whether_a_value_is_text_or_json(
    schema: dict[str, Any], written: str, value: object
) -> None:
    parameters = {"type": "object", "properties": {"k": schema, "other": {"type": "string"}}}
    tools = parse_tools([{"name": "f", "parameters": parameters}])
    assert _qwen("k", written, tools) == {"k": value}


def test_an_undeclared_parameter_is_json_if_it_can_be() -> None:
    tools = _tools(a={"type": "string"})
    assert _qwen("other", "5", tools) == {"other": 5}
    assert _qwen("other", "five", tools) == {"other": "five"}


def test_a_json_value_that_is_none_is_no_complete_call() -> None:
    tools = _tools(n={"type": "integer"})
    text = "<tool_call>\n<function=f>\n<parameter=n>\nfive\n</parameter>\n</function>\n</tool_call>"
    events = parse(QWEN, text, toolset=tools, choice=parse_tool_choice(None, tools))
    assert calls_of(events) == [] and problems_of(events) == ["malformed_call"]


@pytest.mark.parametrize("written", ["True", "None", "07", "", "1 2"])
def test_a_value_is_json_to_the_letter_where_its_type_is_none_of_text(written: str) -> None:
    tools = _tools(k={"type": ["boolean", "null", "integer"]})
    text = f"<tool_call>\n<function=f>\n<parameter=k>\n{written}\n</parameter>\n</function>\n"
    events = parse(
        QWEN, text + "</tool_call>", toolset=tools, choice=parse_tool_choice(None, tools)
    )
    assert calls_of(events) == [] and problems_of(events) == ["malformed_call"]


def test_a_parameter_that_comes_twice_stays_twice_and_readers_take_the_last() -> None:
    tools = _tools(a={"type": "string"})
    param = "<parameter=a>\n{}\n</parameter>\n"
    text = "<tool_call>\n<function=f>\n" + param.format(1) + param.format(2)
    events = parse(
        QWEN,
        text + "</function>\n</tool_call>",
        toolset=tools,
        choice=parse_tool_choice(None, tools),
    )
    assert calls_of(events) == [("f", '{"a": "1", "a": "2"}')]


@ALL
def test_keys_that_no_schema_declares_may_be_long(fmt: ToolFormat) -> None:
    tools = parse_tools([{"name": "f", "parameters": {"type": "object"}}])
    choice = parse_tool_choice("required", tools)
    call = CallText(name="f", arguments=json.dumps({"k" * 3000: "x"}))
    text = render_calls(fmt, [call])
    assert accepts(build_structural_tag(tools, choice, fmt), text)
    assert calls_of(parse(fmt, text, toolset=tools, choice=choice)) == [("f", call.arguments)]


@ALL
def test_a_short_text_may_look_like_the_end_of_its_value(fmt: ToolFormat) -> None:
    tools = _tools(k={"type": "string", "maxLength": 8})
    choice = parse_tool_choice("required", tools)
    end = fmt.body.params.end.strip()  # type: ignore[union-attr]
    values = ["<=", "\n", "\u00e9" * 8, ""]
    if len(end) > 8:  # a shorter one might come about in such a text: its first letter is left out
        values += [end[:8], end[:3]]
    for value in values:
        call = CallText(name="f", arguments=json.dumps({"k": value}, ensure_ascii=False))
        text = render_calls(fmt, [call])
        assert accepts(build_structural_tag(tools, choice, fmt), text), value
        [(_, arguments)] = calls_of(parse(fmt, text, toolset=tools, choice=choice))
        assert json.loads(arguments) == {"k": value}


def test_long_strings_stream_while_they_are_written() -> None:
    tools = _tools(path={"type": "string"}, body={"type": "string"})
    parser = parser_for(QWEN, tools, parse_tool_choice(None, tools))
    parser.feed(b"<tool_call>\n<function=f>\n<parameter=body>\n")
    events = parser.feed(b'line 1 "q"\nline 2\n')
    assert events == [ToolCallArgs(0, 'line 1 \\"q\\"\\nline 2')]


def test_json_values_stream_too() -> None:
    tools = _tools(items={"type": "array"})
    parser = parser_for(GLM, tools, parse_tool_choice(None, tools))
    parser.feed(b"<tool_call>f\n<arg_key>items</arg_key>\n<arg_value>")
    assert parser.feed(b'[1, {"a": "b') == [ToolCallArgs(0, '[1, {"a": "b')]


def test_dsml_says_itself_what_is_a_string() -> None:
    tools = _tools(a={})
    choice = parse_tool_choice(None, tools)
    for mark, value in (("true", "5"), ("false", 5)):
        text = (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            f'<｜DSML｜parameter name="a" string="{mark}">5</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        )
        [(_, arguments)] = calls_of(parse(DSML, text, toolset=tools, choice=choice))
        assert json.loads(arguments) == {"a": value}


def test_line_breaks_between_tags_may_be_missing() -> None:
    tools = _tools(a={"type": "string"})
    text = "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>"
    events = parse(QWEN, text, toolset=tools, choice=parse_tool_choice(None, tools))
    assert calls_of(events) == [("f", '{"a": "x"}')] and text_of(events) == ""


@ALL
def test_a_call_without_parameters_is_an_empty_object(fmt: ToolFormat) -> None:
    tools = parse_tools([{"name": "f"}])
    choice = parse_tool_choice("required", tools)
    text = render_calls(fmt, [CallText(name="f", arguments="{}")])
    assert accepts(build_structural_tag(tools, choice, fmt), text)
    assert calls_of(parse(fmt, text, toolset=tools, choice=choice)) == [("f", "{}")]


@ALL
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "x", "5", "a\nb", 'say "hi"', "{[<"], [5, None]),
        ({"type": "string", "minLength": 1}, ["x", "xy"], [""]),
        ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["", "A", "a b"]),
        ({"enum": ["x", 5, None, {"a": 1}]}, ["x", 5, None], ["y", 6]),
        ({"type": ["string", "null"]}, ["x", None], []),
        ({"type": "integer", "minimum": 3}, [3, 40], [2, "x"]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a", "</parameter>"]], ["x", [1]]),
        ({"type": "object", "properties": {"n": {"type": "null"}}}, [{}, {"n": None}], [{"n": 1}]),
        ({"anyOf": [{"type": "boolean"}, {"type": "array"}]}, [True, [1]], ["x", 1]),
    ],
)
def test_values_are_held_to_their_schema(
    fmt: ToolFormat, schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    tools = _tools(k=schema)
    choice = parse_tool_choice("required", tools)
    plan = build_structural_tag(tools, choice, fmt)
    assert plan.fallbacks == ()
    for value, is_good in [*((v, True) for v in good), *((v, False) for v in bad)]:
        call = CallText(name="f", arguments=json.dumps({"k": value}))
        text = render_calls(fmt, [call])
        accepted = accepts(plan, text)
        assert accepted or not is_good, value
        if accepted:  # bytes of a bad value may mean another one: a valid one
            [(_, arguments)] = calls_of(parse(fmt, text, toolset=tools, choice=choice))
            assert validate_arguments(tools, "f", arguments) == [], value
            assert not is_good or json.loads(arguments) == {"k": value}


@ALL
def test_a_value_cannot_hold_its_own_end_marker(fmt: ToolFormat) -> None:
    tools = _tools(k={"type": "string"})
    end = fmt.body.params.end.strip()  # type: ignore[union-attr]
    call = CallText(name="f", arguments=json.dumps({"k": f"a{end}b"}))
    plan = build_structural_tag(tools, parse_tool_choice("required", tools), fmt)
    assert not accepts(plan, render_calls(fmt, [call]))


@ALL
def test_what_tags_cannot_hold_is_announced(fmt: ToolFormat) -> None:
    tools = _tools(
        any_char={"type": "string", "pattern": "^.x$"}, long={"type": "string", "minLength": 4}
    )
    plan = build_structural_tag(tools, parse_tool_choice(None, tools), fmt)
    assert {f.path for f in plan.fallbacks} == {"any_char", "long"}


@ALL
def test_free_form_parameters_may_be_written(fmt: ToolFormat) -> None:
    tools = parse_tools([{"name": "f", "parameters": {"type": "object"}}])
    plan = build_structural_tag(tools, parse_tool_choice("required", tools), fmt)
    call = CallText(name="f", arguments='{"x": "text", "y": [1, 2]}')
    assert accepts(plan, render_calls(fmt, [call]))
