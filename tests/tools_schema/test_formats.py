# SPDX-License-Identifier: Apache-2.0
"""The families' formats as data: exact bytes, guesses, and what all of them must have."""

from __future__ import annotations

import re
from typing import Any

import pytest
import xgrammar

from tests.fakes.grammar_oracle import byte_compiler
from tests.fakes.tool_samples import FLAGS, LIST, RAW_TOOLS, TIME, turn_text
from tools_schema.errors import UnknownFormatError
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS, format_names, get_format, guess_format
from tools_schema.rendering import render_calls

_ARGS = '{"path": "src", "depth": 2}'
_DSML_CALL = (
    '<｜DSML｜invoke name="list_dir">\n'
    '<｜DSML｜parameter name="path" string="true">src</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="depth" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
# What each family's documentation shows for two calls, list_dir(path, depth) and get_time();
# @ stands for the first one's arguments as JSON.
_TWO_CALLS = {
    "smollm2": '<tool_call>[{"name": "list_dir", "arguments": @}, '
    '{"name": "get_time", "arguments": {}}]</tool_call>',
    "hermes": '<tool_call>\n{"name": "list_dir", "arguments": @}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "list_dir", "parameters": @}; {"name": "get_time", "parameters": {}}',
    "qwen_xml": "<tool_call>\n<function=list_dir>\n<parameter=path>\nsrc\n</parameter>\n"
    "<parameter=depth>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "mimo": "<tool_call><function=list_dir><parameter=path>src</parameter>"
    "<parameter=depth>2</parameter></function></tool_call>\n"
    "<tool_call><function=get_time></function></tool_call>",
    "glm": "<tool_call>list_dir\n<arg_key>path</arg_key>\n<arg_value>src</arg_value>\n"
    "<arg_key>depth</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
    "<tool_call>get_time\n</tool_call>",
    "glm_compact": "<tool_call>list_dir<arg_key>path</arg_key><arg_value>src</arg_value>"
    "<arg_key>depth</arg_key><arg_value>2</arg_value></tool_call><tool_call>get_time</tool_call>",
    "deepseek_r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>list_dir\n"
    "```json\n@\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>list_dir<｜tool▁sep｜>@"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v3_2": "\n\n<｜DSML｜function_calls>\n"
    + _DSML_CALL
    + '<｜DSML｜invoke name="get_time">'
    "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v4": "\n\n<｜DSML｜tool_calls>\n" + _DSML_CALL + '<｜DSML｜invoke name="get_time">'
    "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.list_dir:0"
    "<|tool_call_argument_begin|>@<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral_list": '[TOOL_CALLS][{"name": "list_dir", "arguments": @, "id": "aB3dE6gH9"}, '
    '{"name": "get_time", "arguments": {}, "id": "cB3dE6gH9"}]',
    "mistral_ids": "[TOOL_CALLS]list_dir[CALL_ID]aB3dE6gH9[ARGS]@"
    "[TOOL_CALLS]get_time[CALL_ID]cB3dE6gH9[ARGS]{}",
    "mistral": "[TOOL_CALLS]list_dir[ARGS]@[TOOL_CALLS]get_time[ARGS]{}",
    "minimax": '\n<minimax:tool_call>\n<invoke name="list_dir">\n<parameter name="path">src'
    '</parameter>\n<parameter name="depth">2</parameter>\n</invoke>\n<invoke name="get_time">\n'
    "</invoke>\n</minimax:tool_call>",
    "harmony": "<|channel|>commentary to=functions.list_dir <|constrain|>json<|message|>@"
    "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
}


@pytest.mark.parametrize("name", format_names())
def test_calls_are_rendered_byte_for_byte(name: str) -> None:
    assert render_calls(get_format(name), [LIST, TIME]) == _TWO_CALLS[name].replace("@", _ARGS)


# Families that the grammar engine has templates for: a judge of our bytes that we did not write.
_ENGINE_NAMES = {
    "llama": "llama",
    "kimi": "kimi",
    "deepseek_r1": "deepseek_r1",
    "deepseek_v3_1": "deepseek_v3_1",
    "deepseek_v3_2": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "hermes": "qwen_3",
    "mimo": "mimo",
    "minimax": "minimax",
    "glm_compact": "glm_4_7",
    "harmony": "harmony",
}


@pytest.mark.parametrize("name", _ENGINE_NAMES)
def test_the_engines_own_template_of_the_family_takes_our_bytes(name: str) -> None:
    tools: list[Any] = [{"type": "function", "function": dict(tool)} for tool in RAW_TOOLS]
    tag = xgrammar.get_model_structural_tag(
        _ENGINE_NAMES[name],
        tools=tools,
        tool_choice="required",
        reasoning="disabled",
    )
    compiled = byte_compiler().compile_structural_tag(tag)
    fmt = get_format(name)
    text = turn_text(fmt, "", [LIST] if name in ("harmony", "llama") else [LIST, FLAGS])
    if name == "harmony":  # its template has the end of the call in it and no blank before json
        text = text.replace(" <|constrain|>", "<|constrain|>") + "<|call|>"
    if name == "minimax":  # its template expects the end of reasoning that the prompt left empty
        text = "\n</think>\n\n\n\n" + text
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_no_marker_is_part_of_another_that_opens_something(fmt: ToolFormat) -> None:
    openers = {fmt.open_marker, fmt.call_marker, fmt.text_begin, *fmt.dropped} - {""}
    if fmt.reasoning is not None:
        openers.add(fmt.reasoning.begin)
    for one in openers:
        for other in openers - {one}:
            assert one not in other, (one, other)


def test_names_are_unique_and_unknown_ones_are_refused_with_the_known() -> None:
    assert len(set(format_names())) == len(FORMATS)
    with pytest.raises(UnknownFormatError, match="hermes") as caught:
        get_format("nope")
    assert caught.value.code == "unknown_tool_format"


_TEMPLATES: dict[str, str] = {
    # Lines of the families' chat templates, as jinja source.
    "hermes": r"""{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}""",
    "qwen_xml": r"""{{- '<function=' ~ tool_call.name ~ '>\n' }}{{- '<parameter=' ~ k ~ '>\n' }}"""
    r"""{{- '\n</parameter>\n' }}""",
    "mimo": "{{ '<function=' + n + '>' }}{{ '<parameter=' + k + '>' + v + '</parameter>' }}",
    "glm": "<tool_call>{{ n }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "glm_compact": "<tool_call>{{ n }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "deepseek_r1": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + "
    "'<｜tool▁sep｜>' + n + '\\n' + '```json' + '\\n' + a}}",
    "deepseek_v3_1": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ n + '<｜tool▁sep｜>' + a}}",
    "kimi": "<|tool_calls_section_begin|>{%- for call in calls %}<|tool_call_begin|>{{ id }}",
    "mistral": '{{ "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "mistral_ids": '{{ "[TOOL_CALLS]" + name + "[CALL_ID]" + id + "[ARGS]" + arguments }}',
    "mistral_list": '{{- "[TOOL_CALLS] [" }}',
    "harmony": '{{- "<|start|>assistant<|channel|>final<|message|>" }}',
    "minimax": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "llama": '{{- "<|python_tag|>" + tool_call.name + ".call(" }}',
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by",
}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_a_template_gives_its_format_away(name: str) -> None:
    assert guess_format(_TEMPLATES[name]).name == name


def test_an_architecture_is_asked_where_the_template_says_nothing() -> None:
    assert guess_format(None, "DeepseekV32ForCausalLM").name == "deepseek_v3_2"
    assert guess_format("{{ messages }}", "GptOssForCausalLM").name == "harmony"
    assert guess_format(None, None).name == "hermes"
    assert guess_format(_TEMPLATES["hermes"], "GptOssForCausalLM").name == "hermes"


def test_markers_for_the_sampling_mask_have_no_layout_and_no_empty_text() -> None:
    for fmt in FORMATS:
        for marker in fmt.markers():
            assert marker and marker == marker.strip()
    kimi = get_format("kimi").markers()
    assert "<|tool_call_argument_begin|>" in kimi and "</think>" in kimi


def test_every_format_says_how_it_declares_tools_and_ends_a_turn() -> None:
    for fmt in FORMATS:
        assert "{tools}" in fmt.system_template and "{instructions}" in fmt.system_template
        assert fmt.end_of_turn
        assert not re.search(r"\{(?!tools|instructions)\w+\}", fmt.result_begin) or (
            "{call_id}" in fmt.result_begin
        )


def test_format_names_are_what_the_docs_list(request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "docs" / "tool-calling.md").read_text()
    text = text.partition("## Formats")[2].partition("## Add a format")[0]
    listed: Any = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(format_names())
