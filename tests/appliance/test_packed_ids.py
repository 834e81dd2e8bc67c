# SPDX-License-Identifier: Apache-2.0
"""Prompts of ids that are read in one piece are what their numbers say; errors are the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.packed_ids import PackedIds, pack_array, read_packed
from tests.appliance.test_json_body import ODD, VALUES, same
from tests.fakes.appliance import RunningApp

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)
JSON_HEAD = {"Content-Type": "application/json"}


def unpacked(value: Any) -> Any:
    """The value with a list of numbers for what is packed at its top."""
    if not isinstance(value, dict):
        return value
    return {
        name: np.frombuffer(one.token_ids, "<i4").tolist() if isinstance(one, PackedIds) else one
        for name, one in value.items()
    }


def is_plain(value: Any) -> bool:
    """Whether it is what the engine takes: a list of natural numbers of 31 bits."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(one) is int and 0 <= one < 2**31 for one in value)
    )


def is_strict(value: Any) -> bool:
    """Whether RFC 8259 has a text for it: Python's own reader takes `Infinity` and `NaN` too, and
    half a surrogate pair, with which a body is read number by number."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


@given(IDS | VALUES | st.lists(IDS | VALUES, max_size=3), VALUES, st.sampled_from([None, 1, "\t"]))
def test_the_values_are_those_that_pythons_reader_finds(
    prompt: Any, other: Any, indent: int | str | None
) -> None:
    for value in ({"a": other, "prompt": prompt, "b": 1}, {"prompts": prompt}, other, prompt):
        body = json.dumps(value, indent=indent).encode()
        found = read_packed(body)
        assert same(unpacked(found), json.loads(body))
        if isinstance(value, dict) and "prompt" in value:
            is_packed = isinstance(found["prompt"], PackedIds)
            assert is_packed == (is_plain(json.loads(body)["prompt"]) and is_strict(other))


@pytest.mark.parametrize("text", ODD)
def test_odd_values_are_those_that_pythons_reader_finds(text: bytes) -> None:
    for body in (text, b'{"prompt": ' + text + b"}", b'{"prompt": [1], "x": ' + text + b"}"):
        try:
            expected = json.loads(body)
        except ValueError as error:
            with pytest.raises(type(error)) as caught:
                read_packed(body)
            assert str(caught.value) == str(error)
        else:
            assert same(unpacked(read_packed(body)), expected)


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt": [01]}', b'{"prompt": [1,]}', b'{"prompt": [1 2]}', b'{"p": }']
)
def test_what_is_no_json_is_refused_as_it_is_elsewhere(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(body)
    with pytest.raises(json.JSONDecodeError) as caught:
        read_packed(body)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"12", b"true", b'"1,2"', b"[]", b"[ \n]", b"[[1], [2]]", b"[1, [2]]", b"{}"]
    + [b"[true]", b"[null]", b"[-1]", b"[1.0]", b"[1e2]", b'["1"]', b"[2147483648]"]
    + [b"[1, 9223372036854775808, 2]", b"[18446744073709551616]", b'{"1": 2}'],
)
def test_what_is_no_array_of_ids_is_left_to_the_reader(text: bytes) -> None:
    assert pack_array(text) is None


def test_of_a_name_that_comes_twice_the_last_counts() -> None:
    found = read_packed(b'{"prompt": [1, 2], "prompt": [3]}')
    assert unpacked(found) == {"prompt": [3]}
    assert read_packed(b'{"prompt": [1, 2], "prompt": "x"}') == {"prompt": "x"}


@pytest.mark.parametrize("separator", [",", " ,\n\t "])
def test_a_prompt_of_ids_reaches_the_engine_as_it_is(app: RunningApp, separator: str) -> None:
    ids = np.random.default_rng(3).integers(0, 40_000, 5000).tolist()
    ids[:2] = [0, 40_000]
    body = f'{{"model": "default", "prompt": [{separator.join(map(str, ids))}], "n": 2}}'
    reply = app.http.post("/v1/completions", content=body.encode(), headers=JSON_HEAD)
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] == 5000
    for request in app.engine.requests[-2:]:
        assert np.frombuffer(request.token_ids, "<i4").tolist() == ids


def test_ids_are_said_back_and_written_out(app: RunningApp) -> None:
    """As they are where a prompt is no plain array: a float of a whole number is an id, too."""
    replies = []
    for prompt in ([504, 2365, 318], [504.0, 2365, 318]):
        body = {"model": "default", "prompt": prompt, "echo": True, "return_token_ids": True}
        choice = app.post("/v1/completions", body).json()["choices"][0]
        assert choice["prompt_token_ids"] == [504, 2365, 318]
        replies.append(choice["text"])
    assert replies[0] == replies[1] != ""


@pytest.mark.parametrize("wrong", [49_152, 2**31 - 1, 2**31, 2**63, 2**64 - 1, -1])
def test_an_id_out_of_range_is_named(app: RunningApp, wrong: int) -> None:
    num_requests = len(app.engine.requests)
    body = {"model": "default", "prompt": [5, 7, wrong, wrong]}
    reply = app.post("/v1/completions", body)
    assert app.error(reply) == (400, "invalid_value", "prompt[2]")
    assert f"{wrong} is no token id; allowed: 0 to 49151" in reply.json()["error"]["message"]
    assert len(app.engine.requests) == num_requests


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ([], "invalid_value", "prompt"),
        ({"a": 1}, "invalid_type", "prompt"),
        ([1, None], "invalid_type", "prompt"),
    ],
)
def test_no_prompt_is_refused_in_the_words_it_always_was(
    app: RunningApp, prompt: Any, code: str, param: str
) -> None:
    reply = app.post("/v1/completions", {"model": "default", "prompt": prompt})
    assert app.error(reply) == (400, code, param)
