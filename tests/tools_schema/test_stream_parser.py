# SPDX-License-Identifier: Apache-2.0
"""The streaming parser on JSON families: each test is a way in which parsers lose calls."""

from __future__ import annotations

import json

import pytest

from tests.fakes.tool_samples import (
    AUTO,
    FLAGS,
    LIST,
    NASTY,
    TIME,
    TOOLS,
    calls_of,
    check_event_rules,
    parse,
    parser_for,
    problems_of,
    reasoning_of,
    text_of,
)
from tools_schema.call_reader import WholePart
from tools_schema.events import ParseProblem, TextDelta, ToolCallArgs, ToolCallEnd, ToolCallStart
from tools_schema.formats.registry import get_format
from tools_schema.rendering import CallText, render_calls
from tools_schema.stream_parser import StreamParser
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet

HERMES, SMOL, LLAMA = get_format("hermes"), get_format("smollm2"), get_format("llama")


def _hermes(*calls: CallText) -> str:
    return render_calls(HERMES, list(calls))


def test_text_then_calls() -> None:
    events = parse(HERMES, "Let me look.\n\n" + _hermes(LIST, FLAGS))
    assert text_of(events) == "Let me look."
    assert calls_of(events) == [(c.name, c.arguments) for c in (LIST, FLAGS)]
    check_event_rules(events)


def test_the_first_event_of_a_call_names_it_once_and_deltas_only_add_arguments() -> None:
    events = parse(HERMES, _hermes(LIST))
    assert events == [
        ToolCallStart(0, "call_0", "list_dir"),
        ToolCallArgs(0, LIST.arguments),
        ToolCallEnd(0, "call_0", "list_dir", LIST.arguments),
    ]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = parser_for(HERMES)
    events = parser.feed(b'<tool_call>\n{"name": "list_dir", "arguments": {"path": "a/long')
    assert events == [
        ToolCallStart(0, "call_0", "list_dir"),
        ToolCallArgs(0, '{"path": "a/long'),
    ]


def test_text_streams_at_once() -> None:
    parser = parser_for(HERMES)
    assert parser.feed(b"Hello") == [TextDelta("Hello")]
    assert parser.feed(b" there") == [TextDelta(" there")]


def test_arguments_come_out_exactly_as_sampled() -> None:
    odd = '{ "path" :"\\u0041\\/x" ,\n "depth": 1.0e0 }'
    text = '<tool_call>\n{"name": "list_dir", "arguments": ' + odd + "}\n</tool_call>"
    assert calls_of(parse(HERMES, text)) == [("list_dir", odd)]


def test_markup_inside_a_json_string_is_only_text_of_it() -> None:
    call = CallText(name="list_dir", arguments=json.dumps({"path": NASTY}, ensure_ascii=False))
    for fmt in (HERMES, SMOL, LLAMA):
        assert calls_of(parse(fmt, render_calls(fmt, [call, TIME]))) == [
            ("list_dir", call.arguments),
            ("get_time", "{}"),
        ]


@pytest.mark.parametrize(
    "body",
    [
        '{"arguments": {"path": "x"}, "name": "list_dir"}',
        '{"id": "q", "name": "list_dir", "extra": [1, {"name": "get_time"}], '
        '"arguments": {"path": "x"}}',
        '{"name":"list_dir","arguments":{"path": "x"}}',
        '\n {\n"name"\t:\n"list_dir" , "arguments" : {"path": "x"} }\n',
        '{"\\u006eame": "list\\u005fdir", "arguments": {"path": "x"}, "type": "function"}',
    ],
)
def test_keys_may_come_in_any_order_and_spacing(body: str) -> None:
    events = parse(HERMES, f"<tool_call>{body}</tool_call>")
    assert calls_of(events) == [("list_dir", '{"path": "x"}')]
    assert text_of(events) == "" and problems_of(events) == []


def test_a_call_without_arguments_has_an_empty_object() -> None:
    events = parse(HERMES, '<tool_call>\n{"name": "get_time"}\n</tool_call>')
    assert calls_of(events) == [("get_time", "{}")]
    assert ToolCallArgs(0, "{}") in events


@pytest.mark.parametrize("marker", ["<", "<tool", "<tool_call", "a <tool_call "])
def test_half_a_marker_is_text_where_the_model_ended_its_turn(marker: str) -> None:
    assert text_of(parse(HERMES, f"see {marker}")) == f"see {marker}"


@pytest.mark.parametrize(
    ("marker", "is_text"), [("<", True), ("<to", True), ("<too", False), ("<tool_call", False)]
)
def test_a_turn_cut_in_a_marker_was_cut_in_a_call_once_it_is_no_accident(
    marker: str, is_text: bool
) -> None:
    parser = parser_for(HERMES)
    events = [*parser.feed(f"see \n{marker}".encode()), *parser.finish("length")]
    assert text_of(events) == (f"see \n{marker}" if is_text else "see")
    assert problems_of(events) == ([] if is_text else ["truncated_call"])
    assert parser.whole_part == (None if is_text else WholePart(len("see")))


@pytest.mark.parametrize("marker", ["<", "<tool", "<tool_call"])
def test_half_a_marker_where_a_call_was_due_is_half_a_call(marker: str) -> None:
    parser = StreamParser(HERMES, TOOLS, parse_tool_choice("required", TOOLS))
    assert parser.feed(marker.encode()) == []
    (problem,) = parser.finish("length")
    assert isinstance(problem, ParseProblem) and problem.code == "truncated_call"
    # A model that ended its turn there has said so.
    whole = StreamParser(HERMES, TOOLS, parse_tool_choice("required", TOOLS))
    assert whole.feed(marker.encode()) + whole.finish("stop") == [TextDelta(marker)]


def test_a_held_back_marker_goes_out_once_it_is_none() -> None:
    parser = parser_for(HERMES)
    assert parser.feed(b"x<tool_") == [TextDelta("x")]
    assert parser.feed(b"belt>") == [TextDelta("<tool_belt>")]


def test_whitespace_around_calls_is_layout_and_elsewhere_it_is_text() -> None:
    text = "  a \n\n b  \n" + _hermes(LIST) + " \n\n" + _hermes(TIME) + "\n "
    assert text_of(parse(HERMES, text)) == "  a \n\n b"
    assert text_of(parse(HERMES, "a\n\n")) == "a\n\n"


def test_text_after_a_call_is_text() -> None:
    events = parse(HERMES, _hermes(LIST) + "\n\nDone. " + _hermes(TIME) + " And more.")
    assert text_of(events) == "Done.And more."
    assert len(calls_of(events)) == 2


def test_an_unknown_tool_is_text_and_never_a_call() -> None:
    text = '<tool_call>\n{"name": "rm", "arguments": {"path": "/"}}\n</tool_call>'
    events = parse(HERMES, text)
    assert calls_of(events) == [] and text_of(events) == text
    assert problems_of(events) == ["unknown_tool"]


def test_a_tool_outside_the_allowed_ones_is_text() -> None:
    choice = parse_tool_choice({"type": "function", "name": "get_time"}, TOOLS)
    assert calls_of(parse(HERMES, _hermes(LIST), choice=choice)) == []
    assert calls_of(parse(HERMES, _hermes(TIME), choice=choice)) == [("get_time", "{}")]


def test_choice_none_switches_calls_off() -> None:
    choice = parse_tool_choice("none", TOOLS)
    for fmt in (HERMES, SMOL, LLAMA):
        text = render_calls(fmt, [LIST])
        events = parse(fmt, text, choice=choice)
        assert text_of(events) == text and len(events) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> is a tag",
        "<tool_call>\n[1]</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "list_dir" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "list_dir", "name": "get_time"}</tool_call>',
        '<tool_call>{"arguments": {]}, "name": "get_time"}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_goes_out_as_text_whole(text: str) -> None:
    events = parse(HERMES, text)
    assert text_of(events) == text
    assert calls_of(events) == [] and problems_of(events) == ["malformed_call"]


def test_a_call_behind_broken_markup_is_still_found() -> None:
    events = parse(HERMES, "<tool_call>oops " + _hermes(LIST))
    assert calls_of(events) == [("list_dir", LIST.arguments)]
    assert text_of(events) == "<tool_call>oops"


def test_arguments_that_turn_out_not_to_be_json_never_complete() -> None:
    text = '<tool_call>\n{"name": "list_dir", "arguments": {"path": nope}}\n</tool_call>'
    events = parse(HERMES, text)
    assert calls_of(events) == []
    [problem] = [e for e in events if isinstance(e, ParseProblem)]
    assert problem.index == 0 and problem.code == "malformed_call"
    check_event_rules(events)


def test_extra_braces_after_the_call_do_not_leak_into_arguments() -> None:
    text = '<tool_call>\n{"name": "list_dir", "arguments": ' + LIST.arguments + "}}\n</tool_call>"
    events = parse(HERMES, text)
    assert calls_of(events) == [("list_dir", LIST.arguments)]


def test_a_call_cut_short_is_a_problem_and_no_text() -> None:
    cut = _hermes(LIST)[:-20]
    events = parse(HERMES, "ok " + cut, reason="length")
    assert text_of(events) == "ok" and calls_of(events) == []
    assert problems_of(events) == ["truncated_call"]
    early = parse(HERMES, 'ok <tool_call>\n{"na', reason="length")
    assert text_of(early).strip() == "ok" and problems_of(early) == ["truncated_call"]


def test_a_model_that_stops_inside_markup_said_text() -> None:
    events = parse(HERMES, "use <tool_call>", reason="stop")
    assert text_of(events) == "use <tool_call>"


def test_utf8_split_anywhere_is_whole_and_invalid_bytes_are_replaced() -> None:
    data = "caf\u00e9 \U0001f600".encode()
    for cut in range(len(data)):
        assert text_of(parse(HERMES, [data[:cut], data[cut:]])) == data.decode()
    broken = b"a\xff\xf0\x9f<tool_call>" + _hermes(LIST).encode()[11:]
    events = parse(HERMES, [broken])
    assert text_of(events) == broken[:4].decode("utf-8", "replace")
    assert len(calls_of(events)) == 1


def test_a_character_cut_at_a_switch_of_channels_is_none_of_the_next_one_s() -> None:
    cut, rest = "\u00e9".encode()[:1], "\u00e9".encode()[1:]
    data = b"<think>a" + cut + b"</think>\n\n" + rest + b"b" + cut
    data += b'<tool_call>\n{"name": "list_dir", "arguments": {"path": "' + rest + b"c" + cut
    data += b'"}}\n</tool_call>' + rest
    whole = parse(HERMES, [data])
    assert reasoning_of(whole) == "a\ufffd"
    assert text_of(whole) == "\ufffdb\ufffd\ufffd"
    assert calls_of(whole) == [("list_dir", '{"path": "\ufffdc\ufffd"}')]
    assert parse(HERMES, [data[i : i + 1] for i in range(len(data))]) == whole


def test_a_key_that_comes_twice_goes_out_as_it_was_written() -> None:
    odd = '{"path": "a", "path": "b"}'
    assert calls_of(parse(HERMES, _hermes(CallText(name="list_dir", arguments=odd)))) == [
        ("list_dir", odd)
    ]


def test_a_json_answer_behind_reasoning_is_all_of_the_text() -> None:
    choice = parse_tool_choice(None, ToolSet())
    events = parse(HERMES, '<think>\n{"a"\n</think>\n\n{"ok": 1}', toolset=ToolSet(), choice=choice)
    assert (reasoning_of(events), text_of(events)) == ('{"a"', '{"ok": 1}')


# -- reasoning -----------------------------------------------------------------------------


def test_reasoning_is_split_off_first_and_its_markup_is_no_call() -> None:
    inside = "maybe " + _hermes(LIST)
    events = parse(HERMES, f"<think>\n{inside}\n</think>\n\nHi " + _hermes(TIME))
    assert reasoning_of(events) == inside
    assert text_of(events) == "Hi" and calls_of(events) == [("get_time", "{}")]


def test_reasoning_that_the_prompt_opened_needs_no_tag() -> None:
    events = parse(HERMES, "hm\n</think>\n\nHi", reasoning_open=True)
    assert (reasoning_of(events), text_of(events)) == ("hm", "Hi")


def test_reasoning_that_never_ends_is_all_reasoning() -> None:
    events = parse(HERMES, "<think>hm " + _hermes(LIST), reason="length")
    assert reasoning_of(events) == "hm " + _hermes(LIST)
    assert text_of(events) == "" and calls_of(events) == []


def test_a_think_tag_later_in_the_text_is_text() -> None:
    assert text_of(parse(HERMES, "the <think> tag")) == "the <think> tag"
    assert text_of(parse(SMOL, "<think>x</think>")) == "<think>x</think>"


def test_reasoning_works_with_calls_switched_off() -> None:
    choice = parse_tool_choice("none", TOOLS)
    events = parse(HERMES, "<think>a</think>b", choice=choice)
    assert (reasoning_of(events), text_of(events)) == ("a", "b")


# -- one list (SmolLM2) --------------------------------------------------------------------


def test_a_list_of_calls() -> None:
    text = 'Sure.\n<tool_call>[\n{"name": "get_time", "arguments": {}},\n' + (
        '{"name": "list_dir", "arguments": {"path": "x"}}\n]</tool_call>'
    )
    events = parse(SMOL, text)
    assert calls_of(events) == [("get_time", "{}"), ("list_dir", '{"path": "x"}')]
    assert text_of(events) == "Sure."


def test_an_empty_list_is_no_call_and_no_text() -> None:
    assert parse(SMOL, "<tool_call>[]</tool_call>") == []
    assert text_of(parse(SMOL, "<tool_call>[ ]</tool_call> I cannot.")) == "I cannot."


def test_one_object_without_a_list_is_a_call_too() -> None:
    assert calls_of(parse(SMOL, _hermes(LIST))) == [("list_dir", LIST.arguments)]


def test_a_list_that_breaks_keeps_its_finished_calls() -> None:
    text = '<tool_call>[{"name": "get_time", "arguments": {}}, oops]</tool_call>'
    events = parse(SMOL, text)
    assert calls_of(events) == [("get_time", "{}")]
    assert problems_of(events) == ["malformed_call"]


# -- bare JSON (Llama) ---------------------------------------------------------------------


def test_a_bare_object_is_a_call_only_if_it_names_a_declared_tool() -> None:
    text = '{"name": "list_dir", "parameters": {"path": "x"}}'
    assert calls_of(parse(LLAMA, text)) == [("list_dir", '{"path": "x"}')]
    for answer in ('{"name": "Bob", "age": 5}', '{"answer": 42}', '{"name": "Bob"', "{}", "[1]"):
        events = parse(LLAMA, answer)
        assert text_of(events) == answer and calls_of(events) == []


def test_a_json_answer_is_not_held_back_to_its_end() -> None:
    parser = parser_for(LLAMA)
    assert parser.feed(b'{"answer": "it') == [TextDelta('{"answer": "it')]


def test_the_python_tag_in_front_of_a_call_is_no_text() -> None:
    text = '<|python_tag|>{"name": "get_time", "parameters": {}}'
    assert calls_of(parse(LLAMA, text)) == [("get_time", "{}")]
    assert text_of(parse(LLAMA, "<|python_tag|>print(1)")) == "<|python_tag|>print(1)"


def test_json_inside_prose_is_text() -> None:
    text = 'Use {"name": "get_time", "parameters": {}} please'
    assert text_of(parse(LLAMA, text)) == text


def test_every_parser_counts_its_calls() -> None:
    parser = parser_for(HERMES, TOOLS, AUTO)
    parser.feed(_hermes(LIST, TIME).encode())
    parser.finish()
    assert parser.num_calls == 2
