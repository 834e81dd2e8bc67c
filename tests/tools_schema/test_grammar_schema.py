# SPDX-License-Identifier: Apache-2.0
"""Lowered schemas: never looser than the original unless it says so, never a dead end."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.grammar_oracle import RandomWalker, accepts, byte_compiler, compile_tag
from tools_schema.grammar_nodes import json_value
from tools_schema.grammar_schema import LoweredSchema, lower_schema
from tools_schema.structural_tag import GrammarPlan
from tools_schema.validation import SchemaValidator

Schema = dict[str, Any]


def _lower(schema: Schema | bool) -> LoweredSchema:
    return lower_schema(schema, must_be_object=False)


def _tag(lowered: LoweredSchema) -> str:
    return json.dumps({"type": "structural_tag", "format": json_value(lowered.schema)})


def _writes(schema: Schema | bool, value: object) -> bool:
    matcher = xgrammar.GrammarMatcher(compile_tag(_tag(_lower(schema)), byte_compiler()))
    return bool(matcher.accept_string(json.dumps(value)) and matcher.is_completed())


def _reasons(schema: Schema) -> set[str]:
    return {f"{loss.path}: {loss.reason}" for loss in _lower(schema).losses}


# -- rules, one by one ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # What real tool schemas do, and grammars trip over.
        ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}]),
        ({"type": "object"}, [{}, {"x": [1]}], [1]),
        ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
        ({"properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
        (
            {"properties": {"a": {}}, "additionalProperties": True},
            [{"a": 1, "b": 2}, {"b": 2}],
            [1],
        ),
        ({"properties": {"a": False, "b": {}}}, [{"b": 1}, {}], [{"a": 1}]),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"x": 1}], [{"x": "y"}]),
        ({"type": "array", "minItems": 1}, [[1], ["a", 2]], [[]]),
        ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        ({"prefixItems": [{"type": "integer"}]}, [[], [1], [1, "x"]], [["x"]]),
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"enum": [1, "a", None, {"k": [1]}], "type": ["integer", "null"]}, [1, None], ["a"]),
        ({"const": 5, "minimum": 3}, [5], [4]),
        ({"type": "integer", "minimum": 1.5, "maximum": 3.5}, [2, 3], [1, 4]),
        ({"type": "integer", "exclusiveMinimum": 2, "maximum": 3}, [3], [2, 4]),
        ({"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 20}, [5, 20], [1, 25]),
        ({"type": "number", "multipleOf": 2}, [2, -4], [3]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, [0, 0.5], [1, -0.5]),
        # Conjunctions and unions.
        (
            {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
            [{"a": 1}],
            [{}, {"a": "x"}],
        ),
        (
            {
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
            [{}],
        ),
        (
            {"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer"}}},
            [3],
            [2, "x"],
        ),
        (
            {
                "$defs": {"t": {"properties": {"kids": {"items": {"$ref": "#/$defs/t"}}}}},
                "$ref": "#/$defs/t",
            },
            [{}, {"kids": [{}, {"kids": []}]}],
            [{"kids": [1]}],
        ),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, [None], [1]),
        (
            {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            ["x", 1, None],
            [1.5],
        ),
        # Keys by rule.
        ({"patternProperties": {"^x_": {"type": "integer"}}}, [{}, {"x_a": 1}], [{"x_a": "s"}]),
        ({"propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {}], [{"c": 1}]),
        ({"propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}]),
        ({"properties": {"a": {}, "B": {}}, "propertyNames": {"pattern": "^[a-z]"}}, [{"a": 1}],
         [{"B": 1}]),
        # Drafts before 2020-12.
        ({"items": [{"type": "integer"}], "additionalItems": False}, [[1]], [[1, 2], ["x"]]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ],
)  # fmt: skip
def test_a_schema_is_held(schema: Schema, good: list[Any], bad: list[Any]) -> None:
    assert _lower(schema).losses == ()
    for value in good:
        assert _writes(schema, value), value
    for value in bad:
        assert not _writes(schema, value), value


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "null"}}, "not is not held"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not held"),
        ({"type": "array", "contains": {}}, "contains is not held"),
        ({"if": {}, "then": {"required": ["a"]}}, "if is not held"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired is not held"),
        ({"type": "string", "maxLength": 100}, "maxLength is not held"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf is not held"),
        ({"type": "number", "minimum": 1e300}, "a bound of a number is not held"),
        ({"type": "integer", "minimum": 2**70}, "a bound of an integer is not held"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf is held as anyOf"),
        ({"$ref": "#thing", "$defs": {"x": {"$anchor": "thing"}}}, "the reference #thing"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 3}, "minProperties"),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, "two pattern"),
    ],
)
def test_what_is_not_held_is_said(schema: Schema, reason: str) -> None:
    assert any(reason in text for text in _reasons(schema)), _reasons(schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"enum": ["x"], "type": "integer"},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$defs": {"t": {"required": ["t"], "properties": {"t": {"$ref": "#/$defs/t"}}}},
         "$ref": "#/$defs/t"},
    ],
)  # fmt: skip
def test_a_schema_that_nothing_fits_is_no_dead_end(schema: Schema | bool) -> None:
    lowered = lower_schema(schema, must_be_object=True)
    assert lowered.schema == {"type": "object"}
    assert [loss.reason for loss in lowered.losses][0].startswith("not held by the grammar")


def test_a_schema_that_explodes_when_unfolded_is_given_up() -> None:
    defs: Schema = {"d0": {"type": "integer"}}
    for i in range(1, 30):
        both = [{"$ref": f"#/$defs/d{i - 1}"}, {"type": "string", "maxLength": i % 7}]
        defs[f"d{i}"] = {"anyOf": both, "allOf": [{"anyOf": both}, {"anyOf": both}]}
    schema = {"$ref": "#/$defs/d29", "$defs": defs}
    lowered = lower_schema(schema, must_be_object=False)
    assert lowered.losses


def test_shared_definitions_are_written_once() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    schema = {
        "properties": {f"p{i}": {"$ref": "#/$defs/point"} for i in range(50)},
        "$defs": {"point": point},
    }
    assert len(_lower(schema).schema["$defs"]) == 1


def test_a_nested_id_or_a_dynamic_reference_is_not_guessed_at() -> None:
    nested = {"properties": {"a": {"$id": "http://x/y", "$ref": "#/$defs/z"}}, "$defs": {"z": {}}}
    assert _reasons(nested)


# -- random schemas: what the grammar writes is valid --------------------------------------

_keys = st.sampled_from(["a", "b", "c"])
_leaf = st.one_of(
    st.just({}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.fixed_dictionaries(
        {"type": st.just("integer")},
        optional={
            "minimum": st.integers(-9, 9),
            "exclusiveMaximum": st.integers(-9, 30),
            "multipleOf": st.integers(1, 4),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("number")},
        optional={
            "minimum": st.sampled_from([-1, 0, 0.5, 2.25, 1e3]),
            "maximum": st.sampled_from([0.5, 3, 7.75, 1e4]),
            "exclusiveMinimum": st.sampled_from([-3.5, 0, 1]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(0, 4),
            "pattern": st.sampled_from(["^a+$", "b", "^[a-c]{1,3}$"]),
        },
    ),
    st.builds(
        lambda v: {"enum": v}, st.lists(st.sampled_from([1, "a", None, True, [1]]), min_size=1)
    ),
)


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(_keys, inner, max_size=3)},
            optional={
                "required": st.lists(_keys, unique=True, max_size=2),
                "additionalProperties": st.one_of(st.booleans(), inner),
                "minProperties": st.integers(0, 2),
                "maxProperties": st.integers(1, 3),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(0, 3),
            },
        ),
        st.builds(lambda v: {"anyOf": v}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda v: {"oneOf": v}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda v: {"allOf": v}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda a, b: {**a, "anyOf": [b, a]}, inner, inner),
        st.builds(lambda a: {**a, "$ref": "#/$defs/shared"}, inner),
    )


_schemas = st.builds(
    lambda schema, shared: {**schema, "$defs": {"shared": shared}},
    st.recursive(_leaf, _grown, max_leaves=6),
    st.one_of(_leaf, st.just({"type": "object", "properties": {"a": {"$ref": "#/$defs/shared"}}})),
)


@pytest.fixture(scope="module")
def walker() -> RandomWalker:
    pieces = [bytes([code]) for code in range(32, 127)] + [b"true", b"null", b'": ', b'"a"', b"12"]
    return RandomWalker([*pieces, b""], len(pieces))


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=_schemas, seed=st.integers(0, 2**32))
def test_whatever_the_grammar_of_a_random_schema_writes_is_valid(
    walker: RandomWalker, schema: Schema, seed: int
) -> None:
    lowered = _lower(schema)
    grammar = walker.compile(GrammarPlan(text=_tag(lowered)))
    validator = SchemaValidator(schema, "value")
    rng = random.Random(seed)
    for _ in range(4):
        pieces, ended = walker.walk(grammar, rng.randrange(2**32), 120)
        if ended and not lowered.losses:
            text = b"".join(pieces).decode()
            assert validator.problems(text) == [], (text, lowered.schema)


def test_undeclared_properties_begin_with_another_letter_than_the_declared_ones() -> None:
    schema = {
        "type": "object",
        "properties": {"plan": {"type": "string"}, "]x": {}, "^": {}, "-": {}, "\\": {}, '"': {}},
        "additionalProperties": {"type": "integer"},
    }
    lowered = lower_schema(schema, must_be_object=True)
    assert lowered.losses == ()
    for text, is_valid in (
        ('{"plan": "x", "size": 1}', True),
        ('{"size": 1, "x": 2}', True),
        ('{"plan": 5}', False),
        ('{"size": "x"}', False),
        ('{"plan": "x", "plan": "y"}', False),
        ('{"place": 1}', False),  # valid, and not written
        ('{"]y": 1}', False),
        ('{"-": 1, "size": 2}', True),
    ):
        plan = GrammarPlan(text=json.dumps(
            {"type": "structural_tag", "format": json_value(lowered.schema)}
        ))  # fmt: skip
        assert accepts(plan, text) == is_valid, text
