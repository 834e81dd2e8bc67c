# SPDX-License-Identifier: Apache-2.0
"""Bodies are read by another reader than Python's; their values are those Python's finds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.json_body import read_json
from appliance.body_text import check_text
from tests.fakes.appliance import RunningApp

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
ODD = [
    b"-0",
    b"-0.0",
    b"1e400",
    b"-1e400",
    b"5e-324",
    b"0.1e-400",
    b"2.2250738585072011e-308",
    b"NaN",
    b"[Infinity, -Infinity]",
    b"18446744073709551616",
    b"0." + b"3" * 900,
    b'{"a": 1, "a": 2}',
    b'{"": {"": []}}',
    b'"\\/\\b\\f\\u0000\x7f"',
    b'"\\ud83d\\ude00"',
    b'"\\ud83d"',
    b"\xef\xbb\xbf[1]",
    b" \t\r\n[1]\n ",
]


def same(one: Any, other: Any) -> bool:
    """Equal with equal types, keys in the same order; NaN equals NaN, -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return bool(one == other)


@given(VALUES, st.booleans())
def test_the_values_are_those_that_pythons_reader_finds(value: Any, is_escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_escaped).encode()
    parsed = check_text(body)
    assert same(read_json(body), json.loads(body))
    assert parsed is None or same(parsed[0], json.loads(body))


@pytest.mark.parametrize("body", ODD)
def test_odd_values_are_those_that_pythons_reader_finds(body: bytes) -> None:
    assert same(read_json(body), json.loads(body))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"01", b"1.", b"[1,]", b'"\x01"', b'"\\x41"', b"1 2", b"nul", b"'a'"]
)
def test_what_pythons_reader_refuses_is_refused_as_it_does(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(body)
    with pytest.raises(json.JSONDecodeError) as caught:
        read_json(body)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("text", ["\U0001f600 \\ud800", "plain", "\u00e9"])
@pytest.mark.parametrize("is_escaped", [True, False])
def test_a_prompt_arrives_as_it_was_sent(app: RunningApp, text: str, is_escaped: bool) -> None:
    """With escapes of surrogates the value comes from the check of the body, else from here."""
    body = json.dumps({"prompt": text}, ensure_ascii=is_escaped).encode()
    reply = app.http.post("/tokenize", content=body, headers={"Content-Type": "application/json"})
    tokens = reply.json()["tokens"]
    assert app.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
