# SPDX-License-Identifier: Apache-2.0
"""What only one family does: channels, ids of its own, budgets of reasoning."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xgrammar

from tests.fakes.grammar_oracle import accepts, byte_compiler, compile_tag
from tests.fakes.tool_samples import (
    LIST,
    TIME,
    TOOLS,
    calls_of,
    parse,
    problems_of,
    reasoning_of,
    text_of,
)
from tools_schema.events import ToolCallEnd, ToolCallStart
from tools_schema.formats.registry import get_format
from tools_schema.rendering import render_calls
from tools_schema.structural_tag import build_structural_tag
from tools_schema.tool_choice import parse_tool_choice

HARMONY, KIMI = get_format("harmony"), get_format("kimi")
_NEXT = "<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>"


def test_harmony_channels_are_reasoning_text_and_calls() -> None:
    text = (
        f"<|channel|>analysis<|message|>Let me see.{_NEXT}"
        f"<|channel|>commentary<|message|>I will look.{_NEXT}"
        '<|channel|>commentary to=functions.list_dir <|constrain|>json<|message|>{"path": "x"}'
    )
    events = parse(HARMONY, text)
    assert reasoning_of(events) == "Let me see."
    assert text_of(events) == "I will look."
    assert calls_of(events) == [("list_dir", '{"path": "x"}')]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.list_dir <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.list_dir<|constrain|>json<|message|>",
        " to=functions.list_dir<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.list_dir<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.list_dir json<|message|>",
    ],
)
def test_harmony_recipients_may_stand_in_either_place(header: str) -> None:
    for end in ("", "<|call|>"):
        events = parse(HARMONY, header + '{"path": "x"}' + end)
        assert calls_of(events) == [("list_dir", '{"path": "x"}')]
        assert text_of(events) == "" and problems_of(events) == []


def test_harmony_may_think_again_between_messages() -> None:
    text = (
        f"<|channel|>analysis<|message|>one{_NEXT}"
        f"<|channel|>analysis<|message|>two{_NEXT}{_FINAL}Done.<|return|>"
    )
    events = parse(HARMONY, text)
    assert reasoning_of(events) == "onetwo" and text_of(events) == "Done."


def test_harmony_text_without_tools_has_its_channel_taken_off() -> None:
    none = parse_tool_choice("none", TOOLS)
    assert text_of(parse(HARMONY, f"{_FINAL}Hello.", choice=none)) == "Hello."


def test_harmony_grammar_lets_the_model_think_speak_and_call_once() -> None:
    plan = build_structural_tag(TOOLS, parse_tool_choice("auto", TOOLS), HARMONY, reasoning="auto")
    thought = f"<|channel|>analysis<|message|>hm{_NEXT}"
    preamble = f"<|channel|>commentary<|message|>I look.{_NEXT}"
    call = render_calls(HARMONY, [LIST])
    for text in (call, thought + call, thought + preamble + call, thought + _FINAL + "Hi."):
        assert accepts(plan, text), text
    for text in ("Hi.", thought + "Hi.", call + call, _FINAL + "Hi." + call):
        assert not accepts(plan, text), text


def test_kimis_sampled_id_is_the_calls_id() -> None:
    text = render_calls(KIMI, [LIST, TIME])
    events = parse(KIMI, text)
    starts = [e for e in events if isinstance(e, ToolCallStart)]
    assert [s.call_id for s in starts] == ["functions.list_dir:0", "functions.get_time:1"]
    assert [s.model_id for s in starts] == [s.call_id for s in starts]


def test_an_id_sampled_twice_in_a_turn_names_only_one_call() -> None:
    text = render_calls(KIMI, [TIME]).replace(
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    )
    starts = [e for e in parse(KIMI, text) if isinstance(e, ToolCallStart)]
    assert len({s.call_id for s in starts}) == 2
    assert [s.model_id for s in starts] == ["functions.get_time:0"] * 2


def test_an_id_written_after_the_arguments_is_known_at_the_end() -> None:
    fmt = get_format("mistral_list")
    events = parse(fmt, render_calls(fmt, [LIST]))
    [end] = [e for e in events if isinstance(e, ToolCallEnd)]
    assert end.model_id == LIST.call_id


def test_a_reasoning_budget_forces_the_end_of_reasoning() -> None:
    plan = build_structural_tag(
        TOOLS,
        parse_tool_choice("required", TOOLS),
        get_format("hermes"),
        reasoning="on",
        reasoning_budget=5,
    )
    assert plan.text is not None
    matcher = xgrammar.GrammarMatcher(compile_tag(plan.text, byte_compiler()))
    mask = np.zeros((1, 8), dtype=np.int32)
    for char in b"hmmmm":
        matcher.fill_next_token_bitmask(mask)
        assert matcher.accept_token(char - 1)  # token i is byte i + 1
    matcher.fill_next_token_bitmask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert list(allowed) == [ord("<") - 1]


def test_the_room_needs_neither_torch_nor_the_grammar_engine_nor_another_room() -> None:
    code = (
        "import sys, tools_schema.structural_tag, tools_schema.stream_parser, "
        "tools_schema.rendering, tools_schema.formats.registry\n"
        "rooms = ('torch', 'xgrammar', 'transformers', 'fastapi', 'engine', 'sessions', "
        "'appliance', 'kvtiers', 'kernels')\n"
        "print([room for room in rooms if room in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
