# SPDX-License-Identifier: Apache-2.0
"""The text of tools, calls and results for models whose chat template renders none."""

from __future__ import annotations

import json

import pytest

from tests.fakes.tool_samples import LIST, TIME, TOOLS, calls_of, parse
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS, get_format
from tools_schema.rendering import (
    CallText,
    FormatText,
    ResultText,
    call_pieces,
    render_calls,
    render_results,
    render_system,
    result_pieces,
    system_pieces,
)
from tools_schema.tool_spec import ToolSet, parse_tools

SMOL = get_format("smollm2")


def test_smollm2s_system_text_is_the_prompt_it_was_trained_on() -> None:
    tools = parse_tools([{"name": "f", "description": "d", "parameters": {"type": "object"}}])
    text = render_system(SMOL, tools)
    assert text.startswith("You are an expert in composing functions.")
    assert (
        '<tools>[{"type": "function", "function": {"name": "f", "description": "d", '
        '"parameters": {"type": "object"}}}]</tools>' in text
    )
    assert text.endswith("... (more tool calls as required)\n]</tool_call>")


def test_instructions_stand_beside_the_tools() -> None:
    assert render_system(SMOL, TOOLS, "Be brief.").endswith("</tool_call>\n\nBe brief.")
    assert render_system(get_format("hermes"), TOOLS, "Be brief.").startswith(
        "Be brief.\n\n# Tools"
    )


def test_without_tools_there_are_only_the_instructions() -> None:
    assert render_system(SMOL, ToolSet(), "Be brief.") == "Be brief."
    assert render_system(SMOL, ToolSet()) == ""


def test_braces_in_instructions_and_descriptions_are_left_alone() -> None:
    tools = parse_tools([{"name": "f", "description": "use {instructions} and {tools}"}])
    text = render_system(SMOL, tools, "say {tools}")
    assert "use {instructions} and {tools}" in text and text.endswith("say {tools}")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_system_text_is_byte_stable_and_keeps_key_order(fmt: ToolFormat) -> None:
    raw = [
        {
            "name": "f",
            "parameters": {"type": "object", "properties": {"z": {}, "a": {"type": "string"}}},
        }
    ]
    first = render_system(fmt, parse_tools(raw), "x")
    assert first == render_system(fmt, parse_tools(json.loads(json.dumps(raw))), "x")
    assert first.index('"z"') < first.index('"a"')


def test_arguments_are_rendered_as_they_were_sampled() -> None:
    odd = '{ "path":"\\u0041" }'
    call = CallText(name="list_dir", arguments=odd)
    assert odd in render_calls(SMOL, [call])
    assert "{}" in render_calls(SMOL, [CallText(name="get_time", arguments="")])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_what_is_rendered_parses_back(fmt: ToolFormat) -> None:
    found = calls_of(parse(fmt, render_calls(fmt, [LIST, TIME])))
    assert [(n, json.loads(a)) for n, a in found] == [
        (c.name, json.loads(c.arguments)) for c in (LIST, TIME)
    ]


def test_no_calls_render_as_nothing() -> None:
    assert [render_calls(fmt, []) for fmt in FORMATS] == [""] * len(FORMATS)


def test_results_go_back_in_order_in_the_familys_wrapping() -> None:
    results = [
        ResultText(call_id="call_1", name="list_dir", output="a\nb"),
        ResultText(call_id="call_2", name="get_time", output="now"),
    ]
    assert render_results(SMOL, results) == (
        "user",
        "<tool_response>\na\nb\n</tool_response>\n<tool_response>\nnow\n</tool_response>",
    )
    role, text = render_results(get_format("kimi"), results[:1])
    assert (role, text) == ("tool", "## Return of call_1\na\nb")
    assert render_results(get_format("deepseek_v4"), results[1:])[1] == (
        "<tool_result>now</tool_result>"
    )


def test_output_that_looks_like_a_placeholder_is_left_alone() -> None:
    result = ResultText(call_id="x", name="f", output="{call_id} {name}")
    for fmt in FORMATS:
        assert "{call_id} {name}" in render_results(fmt, [result])[1]


def test_kimi_ids_are_written_as_sampled_or_by_place() -> None:
    own = CallText(name="get_time", arguments="{}", call_id="functions.get_time:7")
    minted = CallText(name="get_time", arguments="{}", call_id="call_abc")
    text = render_calls(get_format("kimi"), [own, minted])
    assert "functions.get_time:7<" in text and "functions.get_time:1<" in text


def test_the_format_s_own_text_is_told_apart_from_a_client_s() -> None:
    nasty = "<|im_end|>"
    call = CallText(name="list_dir", arguments=json.dumps({"path": nasty}), call_id="aB3dE6gH9")
    result = ResultText(call_id="aB3dE6gH9", name="list_dir", output=nasty)
    for fmt in FORMATS:
        system = system_pieces(fmt, TOOLS, nasty)
        for pieces in (system, call_pieces(fmt, [call]), result_pieces(fmt, [result])[1]):
            own = "".join(p for p in pieces if isinstance(p, FormatText))
            rest = "".join(p for p in pieces if not isinstance(p, FormatText))
            assert nasty in rest and nasty not in own, fmt.name
        written = "".join(p for p in call_pieces(fmt, [call]) if isinstance(p, FormatText))
        for marker in (fmt.open_marker, fmt.call_marker, fmt.section_end.strip()):
            assert marker in written
