# SPDX-License-Identifier: Apache-2.0
"""tool_choice in every dialect's shape, with parallel and counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.tool_samples import TOOLS
from tools_schema.errors import InvalidToolChoiceError
from tools_schema.tool_choice import MAX_CALLS, parse_tool_choice
from tools_schema.tool_spec import ToolSet

_NAMES = ("list_dir", "set_flags", "get_time")


def test_nothing_said_means_auto_with_tools_and_none_without() -> None:
    assert parse_tool_choice(None, TOOLS).kind == "auto"
    assert parse_tool_choice(None, ToolSet()).kind == "none"
    assert parse_tool_choice("auto", ToolSet()).kind == "none"


@pytest.mark.parametrize(
    ("raw", "kind", "names", "least"),
    [
        ("auto", "auto", _NAMES, 0),
        ("required", "required", _NAMES, 1),
        ("any", "required", _NAMES, 1),
        ({"type": "any"}, "required", _NAMES, 1),
        ({"type": "auto"}, "auto", _NAMES, 0),
        ({"type": "function", "name": "get_time"}, "named", ("get_time",), 1),
        ({"type": "function", "function": {"name": "get_time"}}, "named", ("get_time",), 1),
        ({"type": "tool", "name": "get_time"}, "named", ("get_time",), 1),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "get_time"}]},
            "allowed",
            ("get_time",),
            0,
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "function", "function": {"name": "get_time"}},
                        {"type": "function", "function": {"name": "list_dir"}},
                    ],
                },
            },
            "allowed",
            ("list_dir", "get_time"),
            1,
        ),
    ],
)
def test_every_dialect_shape_is_read(
    raw: object, kind: str, names: tuple[str, ...], least: int
) -> None:
    choice = parse_tool_choice(raw, TOOLS)
    assert (choice.kind, choice.names, choice.min_calls) == (kind, names, least)
    assert choice.is_forced == (least > 0)


def test_none_switches_tools_off() -> None:
    for raw in ("none", {"type": "none"}):
        choice = parse_tool_choice(raw, TOOLS)
        assert (choice.kind, choice.names, choice.max_calls) == ("none", (), 0)


def test_not_parallel_means_one_call() -> None:
    assert parse_tool_choice("required", TOOLS, False).max_calls == 1
    anthropic = {"type": "any", "disable_parallel_tool_use": True}
    assert parse_tool_choice(anthropic, TOOLS).max_calls == 1
    assert parse_tool_choice("auto", TOOLS, True).max_calls == MAX_CALLS


@pytest.mark.parametrize("raw", [None, "auto", "required", {"type": "any"}])
def test_no_choice_lets_a_turn_call_for_ever(raw: object) -> None:
    assert parse_tool_choice(raw, TOOLS).max_calls == 128
    assert parse_tool_choice(raw, TOOLS, None, 128).min_calls == 128
    with pytest.raises(InvalidToolChoiceError, match="min_tool_calls.*129.*allowed: 0 to 128"):
        parse_tool_choice(raw, TOOLS, None, 129)


def test_a_named_tool_is_called_once_unless_more_are_asked_for() -> None:
    named = {"type": "function", "name": "get_time"}
    assert parse_tool_choice(named, TOOLS).max_calls == 1
    assert parse_tool_choice(named, TOOLS, None, 3).max_calls == 3


def test_a_least_number_of_calls_makes_auto_required() -> None:
    choice = parse_tool_choice("auto", TOOLS, None, 2)
    assert (choice.kind, choice.min_calls, choice.is_forced) == ("required", 2, True)


@pytest.mark.parametrize(
    ("args", "param"),
    [
        (("maybe",), "tool_choice"),
        ((5,), "tool_choice"),
        (({"type": "mcp"},), "tool_choice.type"),
        (({"type": "function", "name": "nope"},), "tool_choice.name"),
        (({"type": "function", "function": {"name": 3}},), "tool_choice.function.name"),
        (({"type": "allowed_tools", "tools": []},), "tool_choice.tools"),
        (
            ({"type": "allowed_tools", "mode": "x", "tools": [{"name": "get_time"}]},),
            "tool_choice.mode",
        ),
        (
            ({"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "nope"}]}},),
            "tool_choice.allowed_tools.tools[0].name",
        ),
        (("auto", "yes"), "parallel_tool_calls"),
        (("auto", None, -1), "min_tool_calls"),
        (("auto", None, MAX_CALLS + 1), "min_tool_calls"),
        (("auto", None, True), "min_tool_calls"),
        (("required", False, 2), "min_tool_calls"),
        (("none", None, 1), "min_tool_calls"),
    ],
)
def test_a_wrong_choice_is_named_by_its_path(args: tuple[Any, ...], param: str) -> None:
    with pytest.raises(InvalidToolChoiceError) as caught:
        parse_tool_choice(args[0], TOOLS, *args[1:])
    assert caught.value.param == param
    assert caught.value.code == "invalid_tool_choice"


def test_a_forced_choice_without_tools_is_refused() -> None:
    for raw in ("required", {"type": "any"}):
        with pytest.raises(InvalidToolChoiceError, match="there are no tools"):
            parse_tool_choice(raw, ToolSet())


def test_a_cap_on_calls_must_leave_room_for_the_least() -> None:
    assert parse_tool_choice("auto", TOOLS, max_tool_calls=3).max_calls == 3
    for low, high in ((3, 2), (None, 0)):
        with pytest.raises(InvalidToolChoiceError):
            parse_tool_choice("required", TOOLS, None, low, max_tool_calls=high)
