# SPDX-License-Identifier: Apache-2.0
"""What the grammar of a turn lets a model write, judged by the grammar engine itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.grammar_oracle import accepts, accepts_prefix
from tests.fakes.tool_samples import FLAGS, LIST, RAW_TOOLS, TIME, TOOLS, list_call, turn_text
from tools_schema.call_grammar import Fallback
from tools_schema.errors import (
    InvalidSchemaError,
    InvalidToolChoiceError,
    ReasoningUnsupportedError,
)
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS, get_format
from tools_schema.rendering import CallText
from tools_schema.response_format import parse_response_format, parse_structured_outputs
from tools_schema.structural_tag import GrammarPlan, build_structural_tag
from tools_schema.tool_choice import MAX_CALLS, parse_tool_choice
from tools_schema.tool_spec import ToolSet, parse_tools

ALL = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
THINKING = pytest.mark.parametrize(
    "fmt", [f for f in FORMATS if f.reasoning is not None], ids=lambda fmt: fmt.name
)
_CHOICES: dict[str, object] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "name": "list_dir"},
}


def _some_calls(fmt: ToolFormat) -> list[list[CallText]]:
    return [c for c in ([LIST], [TIME], [LIST, FLAGS, TIME]) if len(c) <= (fmt.max_calls or 9)]


def _plan(fmt: ToolFormat, choice: object = "auto", **kwargs: Any) -> GrammarPlan:
    counts = {k: kwargs.pop(k, None) for k in ("parallel", "low", "high")}
    parsed = parse_tool_choice(
        choice, TOOLS, counts["parallel"], counts["low"], max_tool_calls=counts["high"]
    )
    return build_structural_tag(TOOLS, parsed, fmt, **kwargs)


@ALL
def test_auto_takes_text_or_calls_or_text_then_calls(fmt: ToolFormat) -> None:
    plan = _plan(fmt)
    for text in ("", "Hello {there} <b> [x]"):
        assert accepts(plan, turn_text(fmt, text, []))
    for calls in _some_calls(fmt):
        assert accepts(plan, turn_text(fmt, "", calls))
        if not fmt.is_bare:
            assert accepts(plan, turn_text(fmt, "Let me look.\n", calls))


@ALL
def test_a_forced_choice_takes_calls_and_nothing_else(fmt: ToolFormat) -> None:
    for choice in ("required", _CHOICES["named"]):
        plan = _plan(fmt, choice)
        assert plan.min_calls == 1
        assert accepts(plan, turn_text(fmt, "", [LIST]))
        for text in ("", "No.", "No. " + turn_text(fmt, "", [LIST])):
            assert not accepts(plan, text)


@ALL
def test_a_named_choice_takes_only_its_tool(fmt: ToolFormat) -> None:
    plan = _plan(fmt, _CHOICES["named"])
    assert not accepts(plan, turn_text(fmt, "", [TIME]))


@ALL
def test_allowed_tools_are_the_only_ones(fmt: ToolFormat) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "get_time"}]}
    plan = _plan(fmt, allowed)
    assert accepts(plan, turn_text(fmt, "", [TIME]))
    assert not accepts(plan, turn_text(fmt, "", [LIST]))


@ALL
def test_none_takes_text_but_no_markup(fmt: ToolFormat) -> None:
    plan = _plan(fmt, "none")
    assert accepts(plan, turn_text(fmt, "Hello.", []))
    if not fmt.is_bare:
        assert not accepts_prefix(plan, turn_text(fmt, "x ", [LIST]))


@ALL
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_turn_ends_behind_the_most_calls_there_may_be(fmt: ToolFormat, choice: str) -> None:
    """Nothing but the end of the calls may follow: no further call, and no text."""
    plan = _plan(fmt, choice)
    calls = ([TIME, LIST] * MAX_CALLS)[: fmt.max_calls or MAX_CALLS]
    whole = turn_text(fmt, "", calls)
    assert accepts(plan, whole)
    assert not accepts(plan, turn_text(fmt, "", [*calls, TIME]))
    assert not accepts(plan, whole + "more")


@ALL
def test_the_number_of_calls_is_kept(fmt: ToolFormat) -> None:
    turns = [turn_text(fmt, "", [LIST, TIME, FLAGS][:n]) for n in (1, 2, 3)]
    if fmt.max_calls == 1:
        assert [accepts(_plan(fmt, "required"), turn) for turn in turns] == [True, False, False]
        with pytest.raises(InvalidToolChoiceError) as caught:
            _plan(fmt, "required", low=2)
        assert caught.value.param == "min_tool_calls"
        return

    def verdicts(**counts: Any) -> list[bool]:
        return [accepts(_plan(fmt, "required", **counts), turn) for turn in turns]

    assert verdicts() == [True, True, True]
    assert verdicts(parallel=False) == [True, False, False]
    assert verdicts(low=2) == [False, True, True]
    assert verdicts(low=2, high=2) == [False, True, False]
    assert verdicts(low=3) == [False, False, True]
    one = _plan(fmt, "auto", parallel=False)
    assert [accepts(one, turn) for turn in turns] == [True, False, False]


@ALL
def test_arguments_must_fit_the_schema(fmt: ToolFormat) -> None:
    for choice in _CHOICES.values():
        plan = _plan(fmt, choice)
        for arguments in ('{"path": "x"}', '{"path": "x", "depth": -4}'):
            call = list_call(arguments)
            assert accepts(plan, turn_text(fmt, "", [call]))
        for arguments in ("{}", '{"depth": 1}', '{"path": "x", "depth": [1]}', '{"paths": "x"}'):
            call = list_call(arguments)
            assert not accepts(plan, turn_text(fmt, "", [call])), arguments


@ALL
def test_an_unknown_tool_cannot_be_written(fmt: ToolFormat) -> None:
    unknown = CallText(name="rm_rf", arguments="{}", call_id="eB3dE6gH9")
    for choice in _CHOICES.values():
        assert not accepts(_plan(fmt, choice), turn_text(fmt, "", [unknown]))


@ALL
def test_free_text_cannot_follow_calls(fmt: ToolFormat) -> None:
    assert not accepts(_plan(fmt), turn_text(fmt, "", [TIME]) + "\nDone.")


def test_whitespace_inside_arguments_is_bounded() -> None:
    fmt = get_format("hermes")
    for spaces, verdict in ((0, True), (2, True), (3, False)):
        call = CallText(name="list_dir", arguments='{"path":' + " " * spaces + '"x"}')
        assert accepts(_plan(fmt, "required"), turn_text(fmt, "", [call])) is verdict


def test_smollm2_may_say_that_no_call_is_needed_but_not_where_one_is_forced() -> None:
    fmt = get_format("smollm2")
    assert accepts(_plan(fmt), "<tool_call>[]</tool_call>")
    assert accepts(_plan(fmt), "<tool_call>[]</tool_call> I cannot do that.")
    assert not accepts_prefix(_plan(fmt, "required"), "<tool_call>[]")


def test_llama_text_cannot_begin_like_a_call() -> None:
    plan = _plan(get_format("llama"))
    for text in ('{"name": "list_dir", "parameters": 5}', ' {"name": "get_time"}'):
        assert not accepts(plan, text)


# -- reasoning -----------------------------------------------------------------------------


def _thought(fmt: ToolFormat, text: str, *, opened: bool) -> str:
    tags = fmt.reasoning
    assert tags is not None
    begin = "" if opened else tags.begin + tags.layout_after_begin
    return begin + text + tags.end + tags.layout_after_end


@THINKING
@pytest.mark.parametrize("choice", _CHOICES)
def test_reasoning_comes_before_whatever_the_choice_wants(fmt: ToolFormat, choice: str) -> None:
    turn = turn_text(fmt, "", [LIST])
    on = _plan(fmt, _CHOICES[choice], reasoning="on")
    auto = _plan(fmt, _CHOICES[choice], reasoning="auto")
    off = _plan(fmt, _CHOICES[choice], reasoning="off")
    assert accepts(on, _thought(fmt, "hm ", opened=True) + turn)
    assert not accepts(on, turn)
    assert accepts(auto, _thought(fmt, "hm ", opened=False) + turn)
    assert accepts(auto, turn) and accepts(off, turn)
    assert not accepts_prefix(off, _thought(fmt, "hm ", opened=False))


@THINKING
def test_reasoning_without_tools_is_held_to_its_tags(fmt: ToolFormat) -> None:
    none = parse_tool_choice(None, ToolSet())
    assert build_structural_tag(ToolSet(), none, fmt).text is None
    plan = build_structural_tag(ToolSet(), none, fmt, reasoning="on", reasoning_budget=8)
    assert accepts(plan, _thought(fmt, "hm ", opened=True) + turn_text(fmt, "Hello", []))


@THINKING
def test_a_forced_call_after_reasoning_cannot_be_dodged(fmt: ToolFormat) -> None:
    plan = _plan(fmt, "required", reasoning="on")
    assert not accepts(plan, _thought(fmt, "hm ", opened=True) + "No.")
    assert not accepts(plan, _thought(fmt, "hm ", opened=True))


def test_reasoning_that_the_format_has_not_is_refused_by_name() -> None:
    with pytest.raises(ReasoningUnsupportedError) as caught:
        _plan(get_format("smollm2"), reasoning="on")
    assert caught.value.code == "reasoning_unsupported" and caught.value.param == "reasoning"


# -- response formats ----------------------------------------------------------------------

_ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _ANSWER}},
        {"type": "json_schema", "name": "a", "schema": _ANSWER},
    ],
)
def test_a_response_schema_holds_the_answer(raw: dict[str, Any]) -> None:
    none = parse_tool_choice(None, ToolSet())
    plan = build_structural_tag(
        ToolSet(), none, get_format("hermes"), response_format=parse_response_format(raw)
    )
    assert accepts(plan, '{"ok": true}')
    assert not accepts(plan, '{"ok": 1}') and not accepts(plan, "yes")


def test_json_object_takes_any_object() -> None:
    none = parse_tool_choice(None, ToolSet())
    response = parse_response_format({"type": "json_object"})
    plan = build_structural_tag(ToolSet(), none, get_format("hermes"), response_format=response)
    assert accepts(plan, '{"a": [1, {"b": null}]}') and not accepts(plan, "[1]")


@pytest.mark.parametrize(
    ("raw", "right", "wrong"),
    [
        ({"choice": ["yes", "yes, but", "no \u00e9"]}, ["yes", "yes, but", "no \u00e9"],
         ["", "ye", "yes,", "no", "yes yes"]),
        ({"regex": r"[a-c]{2}-\d+"}, ["ab-1", "cc-123"], ["ab-", "xab-1", "ab-1 ", "ad-1"]),
        ({"json": {"type": "integer"}}, ["1", "-20"], ["x", "1.5", "{}"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_structured_outputs_hold_the_whole_answer(
    name: str, raw: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    none, fmt = parse_tool_choice(None, ToolSet()), get_format(name)
    response = parse_structured_outputs(raw)
    plan = build_structural_tag(ToolSet(), none, fmt, response_format=response)
    for said in right:
        assert accepts(plan, turn_text(fmt, said, [])), said
    for said in wrong:
        assert not accepts(plan, turn_text(fmt, said, [])), said


@ALL
def test_with_tools_a_turn_is_a_formatted_answer_or_calls(fmt: ToolFormat) -> None:
    response = parse_response_format({"type": "json_schema", "schema": _ANSWER})
    plan = _plan(fmt, response_format=response)
    answer = turn_text(fmt, '{"ok": true}', [])
    assert accepts(plan, answer) and accepts(plan, turn_text(fmt, "", [LIST]))
    assert not accepts(plan, turn_text(fmt, "yes", []))
    assert not accepts(_plan(fmt, "required", response_format=response), answer)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("json", "response_format"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
            "response_format.json_schema.schema.type",
        ),
    ],
)
def test_a_wrong_response_format_is_named_by_its_path(raw: object, param: str) -> None:
    with pytest.raises(InvalidSchemaError) as caught:
        parse_response_format(raw)
    assert caught.value.param == param


def test_text_is_no_constraint() -> None:
    assert parse_response_format(None) is None
    assert parse_response_format({"type": "text"}) is None


# -- fallbacks and stability ---------------------------------------------------------------


def _with_parameters(parameters: dict[str, Any], **more: Any) -> ToolSet:
    return parse_tools([{"name": "f", "parameters": parameters, **more}])


def test_what_the_grammar_does_not_hold_is_announced_by_tool_and_path() -> None:
    tools = _with_parameters(
        {
            "type": "object",
            "properties": {
                "s": {"type": "string", "maxLength": 500},
                "l": {"type": "array", "uniqueItems": True},
            },
        }
    )
    plan = build_structural_tag(tools, parse_tool_choice(None, tools), get_format("hermes"))
    assert {(f.tool, f.path) for f in plan.fallbacks} == {("f", "s"), ("f", "l")}
    assert all(isinstance(f, Fallback) and f.reason for f in plan.fallbacks)


def test_a_tool_that_the_engine_refused_takes_any_object() -> None:
    tools = _with_parameters({"type": "object", "properties": {"a": {"type": "integer"}}})
    choice = parse_tool_choice("required", tools)
    fmt = get_format("hermes")
    loose = build_structural_tag(tools, choice, fmt, loosen={"f"})
    assert [f.tool for f in loose.fallbacks] == ["f"]
    other = CallText(name="f", arguments='{"b": [1]}')
    assert accepts(loose, turn_text(fmt, "", [other]))
    assert not accepts(build_structural_tag(tools, choice, fmt), turn_text(fmt, "", [other]))


def test_strict_false_and_missing_parameters_still_mean_an_object() -> None:
    fmt = get_format("hermes")
    for tools in (_with_parameters({}, strict=False), parse_tools([{"name": "f"}])):
        plan = build_structural_tag(tools, parse_tool_choice("required", tools), fmt)
        for arguments, verdict in (("{}", True), ("5", False), ('"x"', False), ("[]", False)):
            call = CallText(name="f", arguments=arguments)
            assert accepts(plan, turn_text(fmt, "", [call])) is verdict


def test_equal_questions_have_equal_text() -> None:
    again = parse_tools(json.loads(json.dumps(RAW_TOOLS)))
    fmt = get_format("smollm2")
    choice = parse_tool_choice("auto", again)
    assert build_structural_tag(again, choice, fmt).text == _plan(fmt).text
    assert _plan(fmt).kind == "structural_tag"
