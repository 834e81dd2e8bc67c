# SPDX-License-Identifier: Apache-2.0
"""Equal rules of a grammar are written once, and its masks stay the same to the last bit."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgrammar

from engine.grammar.equal_rules import merge_equal_rules
from engine.text.assets import load_text_assets
from tests.fakes.grammar_oracle import byte_compiler
from tools_schema.formats.registry import FORMATS, get_format
from tools_schema.structural_tag import build_structural_tag
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import parse_tools

_SETS = Path(__file__).parents[1] / "data" / "tool_sets"


def tag_of(node: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": node})


def tool_tag(name: str, family: str, **options: Any) -> str:
    tools = parse_tools(json.loads((_SETS / f"{name}.json").read_text()), skip_unknown=True)
    choice = parse_tool_choice("auto", tools)
    text = build_structural_tag(tools, choice, get_format(family), **options).text
    assert text is not None
    return text


def both_ways(tag: str, compiler: xgrammar.GrammarCompiler) -> list[xgrammar.CompiledGrammar]:
    """As the engine reads the tag itself, and with its equal rules merged."""
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    return [compiler.compile_grammar(g) for g in (grammar, merge_equal_rules(str(grammar)))]


@functools.cache
def real_compiler() -> xgrammar.GrammarCompiler:
    assets = load_text_assets("smollm2")
    info = xgrammar.TokenizerInfo(
        [bytes(b) for b in assets.token_bytes],
        vocab_type=xgrammar.VocabType.RAW,
        stop_token_ids=[assets.eos_ids[0]],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def test_rules_that_differ_in_names_alone_become_one() -> None:
    text = 'a ::= (("x" b))\nb ::= (("y"))\nc ::= (("y"))\nd ::= (("x" c))\nroot ::= ((a d))\n'
    assert merge_equal_rules(text) == 'a ::= (("x" b))\nb ::= (("y"))\nroot ::= ((a a))\n'


def test_recursive_rules_are_equal_if_nothing_tells_them_apart() -> None:
    text = 'a ::= ("" | ("x" b))\nb ::= ("" | ("x" a))\nc ::= ("" | ("z" c))\nroot ::= ((a b c))\n'
    merged = 'a ::= ("" | ("x" a))\nc ::= ("" | ("z" c))\nroot ::= ((a a c))\n'
    assert merge_equal_rules(text) == merged


def test_what_only_looks_like_a_name_is_none() -> None:
    text = 'a ::= (("a\\"b" [a-b\\]] b))\nb ::= (("a") | (a{0, 2})) (=(a))\nroot ::= ((b a))\n'
    assert merge_equal_rules(text) == text


def test_a_start_rule_keeps_its_name_beside_one_that_equals_it() -> None:
    assert merge_equal_rules('a ::= (("x"))\nroot ::= (("x"))\n') == 'root ::= (("x"))\n'


def test_rules_with_a_budget_stay_apart() -> None:
    text = 'a[max_tokens=2] ::= (("x"))\nb[max_tokens=2] ::= (("x"))\nroot ::= ((a b))\n'
    assert merge_equal_rules(text) == text
    text_of_two = {"type": "any_text", "max_tokens": 2, "excludes": ["|"]}
    end = {"type": "const_string", "value": "|"}
    tag = tag_of({"type": "sequence", "elements": [text_of_two, end]})
    for compiled in both_ways(tag, byte_compiler()):
        num_allowed = [
            int(np.unpackbits(np.frombuffer(mask, dtype=np.uint8)).sum())
            for mask in masks(compiled, [byte - 1 for byte in b"ab|"], 8)
        ]
        assert num_allowed == [255, 255, 1, 1]  # then the bar alone, then the end alone


@pytest.mark.parametrize("char", ["\x01", "\x1f", "\x7f", "\x80", "\xe9", "\xff", "\u2028"])
def test_a_character_that_the_engine_prints_by_number_stays_itself(char: str) -> None:
    """0.2.8 prints two digits behind the x and reads all that follow."""
    written = f"a{char}b1\\{char}0"
    schema = {"enum": [f"{char}{char}f"]}
    parts: list[dict[str, Any]] = [
        {"type": "const_string", "value": written},
        {"type": "json_schema", "json_schema": schema},
    ]
    raw, by_number = f'"{char}{char}f"', '"' + f"\\u{ord(char):04x}" * 2 + 'f"'
    for compiled in both_ways(tag_of({"type": "sequence", "elements": parts}), byte_compiler()):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(written)
        assert matcher.accept_string(raw) or matcher.accept_string(by_number)
        assert matcher.is_completed()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_most_rules_of_a_large_tool_set_are_equal_to_others(fmt: Any) -> None:
    grammar = str(xgrammar.Grammar.from_structural_tag(tool_tag("claude_code_like", fmt.name)))
    merged = merge_equal_rules(grammar)
    assert merged.count(" ::= ") < 0.5 * grammar.count(" ::= ")
    assert merge_equal_rules(merged) == merged


def masks(compiled: xgrammar.CompiledGrammar, ids: list[int], words: int) -> list[bytes]:
    """The mask before each of these tokens, and after the last."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = np.zeros((1, words), dtype=np.int32)
    found = []
    for token_id in [*ids, None]:
        matcher.fill_next_token_bitmask(mask)
        found.append(mask.tobytes())
        assert token_id is None or matcher.accept_token(token_id)
    return found


def random_ids(compiled: xgrammar.CompiledGrammar, rng: random.Random, size: int) -> list[int]:
    """What a model without a mind of its own writes under the grammar."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = np.zeros((1, -(-size // 32)), dtype=np.int32)
    ids: list[int] = []
    while len(ids) < 120 and not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
        allowed = np.flatnonzero(bits)
        ids.append(int(allowed[rng.randrange(len(allowed))]))
        assert matcher.accept_token(ids[-1])
    return ids[:-1] if matcher.is_terminated() else ids


@pytest.mark.parametrize(
    ("family", "options"),
    [("hermes", {"reasoning": "on", "reasoning_budget": 9}), ("deepseek_v3_2", {}), ("glm", {})],
)
def test_masks_over_a_real_vocabulary_are_the_same_to_the_last_bit(
    family: str, options: dict[str, Any]
) -> None:
    plain, merged = both_ways(tool_tag("opencode_like", family, **options), real_compiler())
    size = load_text_assets("smollm2").vocab_size
    begin = [] if options else _encoded(get_format(family).lead + get_format(family).open_marker)
    for seed in range(6):
        matcher_ids = random_ids(merged, random.Random(seed), size)
        ids = begin if seed % 2 and begin else matcher_ids
        words = -(-size // 32)
        assert masks(plain, ids, words) == masks(merged, ids, words)


def _encoded(text: str) -> list[int]:
    return load_text_assets("smollm2").tokenizer.encode(text)
