# SPDX-License-Identifier: Apache-2.0
"""The JSON-Schema-Test-Suite against grammar and validator: nothing invalid passes unannounced."""

from __future__ import annotations

import functools
import json

import pytest
import xgrammar

from tests.fakes.grammar_oracle import byte_compiler, compile_tag
from tests.fakes.schema_suite import (
    PINNED,
    SuiteGroup,
    current_fallbacks,
    is_refused,
    lowered,
    suite_groups,
)
from tools_schema.grammar_nodes import MAX_WHITESPACE
from tools_schema.validation import SchemaValidator


@functools.cache
def _groups() -> tuple[SuiteGroup, ...]:
    groups = tuple(suite_groups())
    assert len(groups) > 300
    return groups


def _spellings(data: object) -> list[str]:
    return [
        json.dumps(data),
        json.dumps(data, ensure_ascii=False),
        json.dumps(data, separators=(",", ":")),
    ]


def _grammar(group: SuiteGroup) -> xgrammar.CompiledGrammar:
    schema = {
        "type": "json_schema",
        "json_schema": lowered(group).schema,
        "max_whitespace_cnt": MAX_WHITESPACE,
    }
    tag = {"type": "structural_tag", "format": schema}
    return compile_tag(json.dumps(tag), byte_compiler())


def _writes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def test_every_schema_compiles_and_none_of_its_losses_is_silent() -> None:
    wrong, num_accepted, num_valid = [], 0, 0
    for group in _groups():
        grammar = _grammar(group)
        is_exact = not lowered(group).losses and not is_refused(group)
        for what, data, is_valid in group.cases:
            accepted = any(_writes(grammar, text) for text in _spellings(data))
            num_valid += is_valid
            num_accepted += accepted and is_valid
            if accepted and not is_valid and is_exact:
                wrong.append((group.name, what))
    assert wrong == []
    # Stricter than the schema is allowed (order, undeclared properties), useless is not.
    assert num_accepted > 0.75 * num_valid


def test_after_validation_nothing_invalid_is_accepted_and_nothing_valid_refused() -> None:
    wrong = []
    for group in _groups():
        if is_refused(group):
            continue
        validator = SchemaValidator(group.schema, "value")
        for what, data, is_valid in group.cases:
            if (validator.problems(json.dumps(data)) == []) is not is_valid:
                wrong.append((group.name, what))
    assert wrong == []


def test_the_list_of_schemas_that_fall_back_is_the_pinned_one() -> None:
    assert current_fallbacks() == json.loads(PINNED.read_text()), (
        "the fallbacks changed: see python -m tests.fakes.schema_suite"
    )


def test_most_schemas_do_not_fall_back() -> None:
    pinned = json.loads(PINNED.read_text())
    assert len(pinned) < 0.5 * len(_groups())


@pytest.mark.parametrize(
    "name", ["type: integer type matches integers", "enum: simple enum validation"]
)
def test_plain_schemas_are_held_exactly(name: str) -> None:
    [group] = [g for g in _groups() if g.name == name]
    grammar = _grammar(group)
    for _, data, is_valid in group.cases:
        if not isinstance(data, float):
            assert any(_writes(grammar, text) for text in _spellings(data)) is is_valid
