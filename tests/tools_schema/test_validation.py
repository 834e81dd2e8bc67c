# SPDX-License-Identifier: Apache-2.0
"""Finished arguments against the original schema."""

from __future__ import annotations

from tests.fakes.tool_samples import TOOLS
from tools_schema.tool_spec import parse_tools
from tools_schema.validation import compile_validator, validate_arguments


def test_valid_arguments_have_no_problems() -> None:
    assert validate_arguments(TOOLS, "list_dir", '{"path": "x"}') == []
    assert validate_arguments(TOOLS, "get_time", "{}") == []


def test_each_problem_names_its_path() -> None:
    text = '{"flags": ["a", "z"], "options": {"deep": 1}, "more": 1}'
    paths = {p.path for p in validate_arguments(TOOLS, "set_flags", text)}
    assert paths == {"arguments.flags[1]", "arguments.options.deep", "arguments"}


def test_text_that_is_no_json_is_one_problem() -> None:
    for text in ("", "{", "{'a': 1}", '{"path": NaN}', '{"path": Infinity}', "nope"):
        [problem] = validate_arguments(TOOLS, "list_dir", text)
        assert problem.path == "arguments" and "not JSON" in problem.message


def test_nesting_past_the_stack_is_a_problem_not_a_crash() -> None:
    text = '{"path": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert validate_arguments(TOOLS, "list_dir", text)


def test_arguments_are_an_object_even_where_the_schema_forgets_it() -> None:
    tools = parse_tools(
        [
            {"name": "f", "parameters": {}},
            {"name": "g", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": {}}}},
            {"name": "h"},
        ]
    )
    for name in tools.names:
        for text in ("5", '"text"', "[1]", "null"):
            assert validate_arguments(tools, name, text), (name, text)
        assert validate_arguments(tools, name, "{}") == []


def test_an_unknown_tool_is_a_problem_of_the_name() -> None:
    [problem] = validate_arguments(TOOLS, "nope", "{}")
    assert problem.path == "name" and "list_dir" in problem.message


def test_lone_surrogates_and_huge_numbers_are_judged_not_fatal() -> None:
    assert validate_arguments(TOOLS, "list_dir", '{"path": "\\ud800"}') == []
    assert validate_arguments(TOOLS, "list_dir", '{"path": 1}') != []
    assert validate_arguments(TOOLS, "list_dir", '{"path": "x", "depth": ' + "9" * 600 + "}") == []
    assert validate_arguments(TOOLS, "list_dir", '{"path": "x", "depth": ' + "9" * 9000 + "}") != []


def test_a_set_is_compiled_once() -> None:
    again = parse_tools([{"name": t.name, "parameters": t.parameters} for t in TOOLS][:1])
    assert compile_validator(again) is compile_validator(again)
