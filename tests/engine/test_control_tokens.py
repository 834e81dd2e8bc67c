# SPDX-License-Identifier: Apache-2.0
"""A grammar allows a control token where it names one, and never as text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xgrammar

from engine.grammar.control_tokens import MARK, grammar_vocabulary, without_control_in_text

# 0-2 control (2 ends a turn), 3-258 the bytes, 259-260 more control tokens, 261 a hole.
FIRST_BYTE, EOS, CALL, END, VOCAB = 3, 2, 259, 260, 262
CONTROL = (0, 1, EOS, CALL, END)
_BYTES = [b""] * 3 + [bytes([i]) for i in range(256)] + [b""] * 2
VOCABULARY = grammar_vocabulary(_BYTES, CONTROL, (EOS,), VOCAB)
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        VOCABULARY, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS]
    ),
    max_threads=1,
    cache_enabled=False,
)
ANY_TEXT = {"type": "any_text"}
JSON = {"type": "json_schema", "json_schema": {"type": "object"}}


def token(token_id: int) -> dict[str, Any]:
    return {"type": "token", "token": token_id}


def sequence(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(nodes)}


def allowed_control(matcher: Any) -> set[int]:
    bitmask = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:VOCAB]
    return {i for i in (*CONTROL, 261) if bits[i]}


def walk(node: dict[str, Any], *pieces: str | int) -> list[set[int]]:
    """The control tokens allowed before each token of `pieces`, and after the last."""
    text = without_control_in_text(json.dumps({"type": "structural_tag", "format": node}))
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(text))
    seen = []
    for piece in pieces:
        ids = [piece] if isinstance(piece, int) else [FIRST_BYTE + b for b in piece.encode()]
        for token_id in ids:
            seen.append(allowed_control(matcher))
            assert matcher.accept_token(token_id), piece
    return [*seen, allowed_control(matcher)]


@pytest.mark.parametrize(
    "free",
    [
        ANY_TEXT,
        {"type": "any_text", "excludes": ["<x>"]},
        {"type": "any_text", "max_tokens": 50},
        {"type": "regex", "pattern": "[^Z]*"},
        {"type": "dispatch", "rules": [["<t>", JSON]], "loop": False, "excludes": []},
        {"type": "triggered_tags", "triggers": ["<t>"], "tags": [
            {"type": "tag", "begin": "<t>", "content": ANY_TEXT, "end": "</t>"}]},
        {"type": "grammar", "grammar": "root ::= [^Z]*"},
    ],
    ids=lambda node: str(node["type"]),
)  # fmt: skip
def test_no_text_holds_a_control_token(free: dict[str, Any]) -> None:
    assert all(found <= {EOS} for found in walk(free, "h\u00e9 <"))
    if free["type"] == "triggered_tags":
        assert all(found <= {EOS} for found in walk(free, "a<t>b"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"type": {"type": "any_text"}, "a": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "[^Z]+"}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ],
)
def test_no_json_holds_a_control_token(schema: dict[str, Any]) -> None:
    schema.get("properties", {}).pop("type", None)
    node = {"type": "json_schema", "json_schema": schema}
    assert all(found <= {EOS} for found in walk(node, '{"a": "q\u00e9', '"}'))


def test_a_named_control_token_comes_where_it_is_named_only() -> None:
    call = sequence(token(CALL), JSON, token(END))
    node = sequence(ANY_TEXT, {"type": "optional", "content": call})
    found = walk(node, "hi", CALL, '{"a": 1}', END)
    assert found[:3] == [{CALL, EOS}] * 3
    assert found[3:-2] == [set()] * len('{"a": 1}')
    assert found[-2:] == [{END}, {EOS}]


def test_bounded_text_ends_with_the_named_token() -> None:
    node = sequence({"type": "any_text", "max_tokens": 2}, token(END), ANY_TEXT)
    assert walk(node, "ab", END, "c") == [{END}, {END}, {END}, {EOS}, {EOS}]
    with pytest.raises(AssertionError):
        walk(node, "abc")


def test_the_mark_is_excluded_from_free_text_and_put_into_nothing_else() -> None:
    tag = {
        "type": "structural_tag",
        "format": sequence(ANY_TEXT, {**JSON, "json_schema": {"type": "any_text", "x": [1]}}),
    }
    changed = json.loads(without_control_in_text(json.dumps(tag)))
    text, schema = changed["format"]["elements"]
    assert text == {"type": "any_text", "excludes": [MARK]}
    assert schema == tag["format"]["elements"][1]
    assert without_control_in_text("no json") == "no json"


def test_stop_ids_and_holes_have_no_bytes_and_every_control_token_bytes_of_its_own() -> None:
    assert VOCABULARY[EOS] == VOCABULARY[261] == b""
    spelled = [VOCABULARY[i] for i in CONTROL if i != EOS]
    assert len(set(spelled)) == 4 and all(s.startswith(b"\xff") for s in spelled)
