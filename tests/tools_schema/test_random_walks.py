# SPDX-License-Identifier: Apache-2.0
"""Random tokens of a real vocabulary under the grammar's mask: whatever comes, calls are valid.

Each walk samples under the mask until the grammar ends; the parser must then find only calls that
validate against the original schema, enough of them, and no marker in the text.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from engine.text.assets import load_text_assets
from tests.fakes.grammar_oracle import RandomWalker
from tests.fakes.tool_samples import (
    TOOLS,
    calls_of,
    check_event_rules,
    parse,
    problems_of,
    text_of,
    turn_text,
)
from tools_schema.formats.base import HeaderBody, ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.structural_tag import build_structural_tag
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet, parse_tools
from tools_schema.validation import validate_arguments

_SETS = Path(__file__).parents[1] / "data" / "tool_sets"
_MOST_TOKENS = 300
_BOUNDED = parse_tools(
    [
        {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {
                    "which": {"enum": ["a", "b", 3, None]},
                    "id": {"type": "string", "pattern": "^[a-z]{2}-\\d{1,3}$"},
                    "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                    "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
                    "pair": {"prefixItems": [{"type": "boolean"}, {"const": "x"}], "minItems": 2},
                    "on": {"type": "string", "format": "date"},
                },
                "required": ["which", "id", "share", "step", "pair"],
            },
        },
        {
            "name": "tree",
            "parameters": {
                "type": "object",
                "properties": {"root": {"$ref": "#/$defs/node"}},
                "required": ["root"],
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {
                            "leaf": {"type": "boolean"},
                            "children": {
                                "type": "array",
                                "items": {"$ref": "#/$defs/node"},
                                "maxItems": 2,
                            },
                        },
                        "required": ["leaf"],
                    }
                },
            },
        },
    ]
)


@functools.cache
def _walker() -> RandomWalker:
    assets = load_text_assets("smollm2")
    return RandomWalker(assets.token_bytes, assets.eos_ids[0])


@functools.cache
def _agents(name: str) -> ToolSet:
    return parse_tools(json.loads((_SETS / f"{name}.json").read_text()), skip_unknown=True)


def _closers(fmt: ToolFormat) -> list[bytes]:
    found = [fmt.call_end, fmt.section_end, *(fmt.preamble or ())]
    if isinstance(fmt.body, HeaderBody) and fmt.body.params is not None:
        found += [fmt.body.params.end] * 3
    return [marker.encode() for marker in found if marker]


def _walk_and_check(
    fmt: ToolFormat, tools: ToolSet, raw_choice: object, seeds: range, start: str = "", low: int = 0
) -> int:
    """Number of walks that came to an end."""
    choice = parse_tool_choice(raw_choice, tools, None, low or None)
    plan = build_structural_tag(tools, choice, fmt)
    loose = {fallback.tool for fallback in plan.fallbacks}
    grammar = _walker().compile(plan)
    num_ended = 0
    for seed in seeds:
        pieces, ended = _walker().walk(
            grammar, seed, _MOST_TOKENS, start=start.encode(), closers=_closers(fmt)
        )
        reason = "stop" if ended else "length"
        events = parse(fmt, pieces, reason=reason, toolset=tools, choice=choice)
        check_event_rules(events)
        whole = parse(fmt, [b"".join(pieces)], reason=reason, toolset=tools, choice=choice)
        assert whole == events
        calls = calls_of(events)
        for name, arguments in calls:
            if name not in loose:
                assert validate_arguments(tools, name, arguments) == [], arguments
        if ended:
            num_ended += 1
            assert len(calls) >= choice.min_calls
            assert problems_of(events) == []
            assert not [m for m in fmt.markers() if len(m) > 3 and m in text_of(events)]
    return num_ended


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_forced_calls_always_validate(fmt: ToolFormat) -> None:
    assert _walk_and_check(fmt, _BOUNDED, "required", range(12)) >= 3
    if fmt.max_calls is None:
        assert _walk_and_check(fmt, TOOLS, "required", range(6), low=2) >= 1


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_calls_that_the_model_chose_to_make_validate_too(fmt: ToolFormat) -> None:
    text = turn_text(fmt, "So: ", [])
    opening = "" if fmt.is_bare or fmt.text_begin else text
    if not fmt.is_bare:
        opening += fmt.lead + fmt.open_marker
    assert _walk_and_check(fmt, _BOUNDED, "auto", range(8), opening) >= 1
    assert _walk_and_check(fmt, _BOUNDED, "auto", range(4), text) >= 1


@pytest.mark.parametrize("name", ["claude_code_like", "opencode_like", "codex_like", "mcp_like"])
def test_real_agents_tools_are_called_validly(name: str) -> None:
    tools = _agents(name)
    for fmt in random.Random(name).sample(FORMATS, 3):
        assert _walk_and_check(fmt, tools, "required", range(4)) >= 1


def test_a_forced_call_needs_no_luck_to_end() -> None:
    tools = parse_tools(
        [{"name": "go", "parameters": {"properties": {"to": {"enum": ["left", "right"]}}}}]
    )
    for fmt in FORMATS:
        named = {"type": "function", "name": "go"}
        assert _walk_and_check(fmt, tools, named, range(4)) == 4
