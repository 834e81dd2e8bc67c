# SPDX-License-Identifier: Apache-2.0
"""A JSON string with a length holds whatever JSON strings hold, and counts as validators do."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar

from tests.fakes.grammar_oracle import byte_compiler, compile_tag

_PIECES = [
    "a",
    "\u00e9",
    "\U0001f600",
    "\n",
    '"',
    "\\",
    "/",
    "\t",
    "\x01",
    "\x7f",
    "\u2028",
    "\ud7ff",
]


def writes(schema: dict[str, Any], text: str) -> bool:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    matcher = xgrammar.GrammarMatcher(compile_tag(json.dumps(tag), byte_compiler()))
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize(("low", "high"), [(1, None), (0, 3), (2, 4), (3, None)])
def test_strings_with_a_length_are_held_to_it_in_every_spelling(low: int, high: int | None) -> None:
    schema = {"type": "string", "minLength": low} | ({"maxLength": high} if high else {})
    rng = random.Random(low)
    for _ in range(150):
        text = "".join(rng.choice(_PIECES) for _ in range(rng.randrange(6)))
        verdict = low <= len(text) and (high is None or len(text) <= high)
        for ensure_ascii in (False, True):
            assert writes(schema, json.dumps(text, ensure_ascii=ensure_ascii)) is verdict, text


@pytest.mark.parametrize(
    "text", ['"a\tb"', '"a\nb"', '"a\\xb"', '"a\\u12"', '"\\ud83d"', '"\\ude00"']
)
def test_what_is_no_json_string_is_none_with_a_length_either(text: str) -> None:
    assert not writes({"type": "string", "minLength": 1}, text)


def test_lengths_of_members_and_definitions_are_held_alike() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 1}, "b": {"$ref": "#/$defs/x"}},
        "required": ["a", "b"],
        "$defs": {"x": {"type": "string", "maxLength": 2}},
    }
    for a, b, verdict in (('"', "\n\\", True), ("", "", False), ("a", "\n\n\n", False)):
        assert writes(schema, json.dumps({"a": a, "b": b})) is verdict
