# SPDX-License-Identifier: Apache-2.0
"""Patterns in the grammar: search semantics, never looser, refused where they cannot be held."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.grammar_oracle import byte_compiler, compile_tag
from tools_schema.ecma_pattern import UnsupportedPatternError, rewrite_pattern

_WORDS = [
    *("", "a", "b", "ab", "abc", "aab", "xaby", "a-b", "/usr/x", "1", "12", "1.5", "a 1", "\u00e9"),
    *("A", "_", "foo.py", "a|b", "(a)", "[x]", "{1}", "a,b", "\u00a0", "a\\b", 'a"b', "a\nb"),
]


def _grammar_matches(pattern: str, word: str) -> bool:
    import xgrammar

    schema = {"type": "string", "pattern": rewrite_pattern(pattern).regex}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    matcher = xgrammar.GrammarMatcher(compile_tag(json.dumps(tag), byte_compiler()))
    text = json.dumps(word, ensure_ascii=False)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def _is_writable(word: str) -> bool:
    return not re.search(r'["\\\x00-\x1f]', word)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a", "b$", "^ab$", "ab", "^(a|b)+$", "^a|b$", "^[a-z]+$", "[0-9]", "^\\d+(\\.\\d+)?$",
        "^\\w+$", "^\\S+$", "\\s", "^[^/]*$", "^/", "\\.py$", "^[\\w.-]+$", "^(?:ab?){1,3}$",
        "^a+?b*?$", "^.$", "^..?$", "^[\\]x\\[]+$", "^\\x61\\u0062$", "^$", "", "^[ -~]*$",
        "^[A-Z_]$", "^\\{\\d\\}$", "\\|", "^\\(", "[.]", "^[^\\s]+$", "^[\"'a]b?$", "a||b", "^\\W$",
        "^\\D$",
    ],
)  # fmt: skip
def test_a_rewritten_pattern_matches_what_the_original_finds(pattern: str) -> None:
    for word in _WORDS:
        expected = re.search(pattern, word, re.ASCII if "s" not in pattern.lower() else 0)
        assert _grammar_matches(pattern, word) == (bool(expected) and _is_writable(word)), word


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?!a)b", "(?<=a)b", "(a)\\1", "\\bword", "\\p{L}", "a^b", "a$b", "(^a|b)", '"',
        "\\\\", "[\"]", "\\n", "(|a)", "a{,3}", "x{", "[a-\\d]", "(a", "(?<n>a)", "[^", "\\cA",
        "\\ud83d",
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPatternError):
        rewrite_pattern(pattern)


def test_high_counts_are_held_as_any_number_and_said_so() -> None:
    for pattern in ("^[a-z]{1,200}$", "^.{0,40}$", "^([a-z]{1,20}-){1,20}$"):
        rewritten = rewrite_pattern(pattern)
        assert not rewritten.is_exact
        assert "{1,200}" not in rewritten.regex
    assert rewrite_pattern("^[a-z]{1,64}$").is_exact
    assert _grammar_matches("^[a-z]{1,200}$", "abc") and not _grammar_matches("^[a-z]{1,200}$", "1")


_atoms = st.sampled_from(["a", "b", ".", "\\d", "\\w", "[ab]", "[^a]", "(ab)", "(a|b)", "-", "\\."])
_quantified = st.tuples(_atoms, st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}"])).map("".join)
_branch = st.tuples(
    st.sampled_from(["", "^"]),
    st.lists(_quantified, max_size=4).map("".join),
    st.sampled_from(["", "$"]),
).map("".join)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pattern=st.lists(_branch, min_size=1, max_size=2).map("|".join),
    words=st.lists(st.text("ab1.-x", max_size=5), max_size=6),
)
def test_random_patterns_match_as_a_regex_engine_says(pattern: str, words: list[str]) -> None:
    for word in words:
        assert _grammar_matches(pattern, word) == bool(re.search(pattern, word, re.ASCII))
