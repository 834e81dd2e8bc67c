# SPDX-License-Identifier: Apache-2.0
"""Bodies that no store, hash or engine could hold are refused by every route, before any work."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from appliance.body_text import BodyRefused, check_text, has_long_number
from tests.fakes.appliance import Json, RunningApp

LONE = "a\ud800b"
MESSAGES = [{"role": "user", "content": LONE}]
CREATE: Json = {"model": "default"}


def send(app: RunningApp, path: str, body: Any) -> tuple[int, str]:
    """Post a body as Python spells it; (status, error code)."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = app.http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    return reply.status_code, error["code"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sessions", {**CREATE, "instructions": LONE}),
        ("/v1/sessions", {**CREATE, "metadata": {"k": LONE}}),
        ("/v1/sessions", {**CREATE, "metadata": {LONE: "v"}}),
        ("/v1/sessions", {**CREATE, "tools": [{"type": "function", "name": LONE}]}),
        ("/v1/sessions", {**CREATE, "tool_choice": LONE}),
        ("turns", {"input": LONE}),
        ("turns", {"input": "x", "stop": LONE}),
        ("turns", {"input": "x", "response_format": {"type": LONE}}),
        ("turns", {"input": [{"type": "function_call_output", "call_id": LONE, "output": ""}]}),
        ("items", {"items": LONE}),
        ("fork", {"metadata": {"k": LONE}}),
        ("/v1/chat/completions", {**CREATE, "messages": MESSAGES}),
        ("/v1/completions", {**CREATE, "prompt": LONE}),
        ("/v1/responses", {**CREATE, "input": LONE}),
        ("/v1/messages", {**CREATE, "max_tokens": 1, "messages": MESSAGES}),
        ("/tokenize", {"prompt": LONE}),
    ],
    ids=str,
)
def test_half_a_surrogate_pair_is_refused_everywhere(
    app: RunningApp, path: str, body: Json
) -> None:
    where = path if path.startswith("/") else f"/v1/sessions/{app.session()}/{path}"
    num_requests = len(app.engine.requests)
    assert send(app, where, body) == (400, "invalid_json")
    assert len(app.engine.requests) == num_requests


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/sessions", "priority", 10**30),
        ("/v1/sessions", "priority", 2**31),
        ("/v1/sessions", "context", {"max_tokens": 10**30}),
        ("/v1/sessions", "context", {"max_tokens": 2**31}),
        ("session", "priority", -(10**30)),
        ("session", "context", {"max_tokens": 10**30}),
        ("turns", "top_k", 10**40),
        ("turns", "top_k", 2**31),
        ("turns", "seed", 2**63),
        ("turns", "seed", 2**64 - 1),
        ("turns", "deadline_ms", 10**40),
        ("turns", "max_output_tokens", 10**40),
        ("turns", "expect_revision", 10**40),
        ("turns", "min_tool_calls", 10**40),
        ("turns", "tool_choice", {"n": 10**40}),
        ("turns", "repetition_penalty", 1e-300),
        ("/v1/chat/completions", "top_k", 10**40),
        ("/v1/chat/completions", "priority", 2**31),
        ("/v1/chat/completions", "priority", 10**40),
        ("/v1/chat/completions", "seed", 2**64 - 1),
        ("/v1/chat/completions", "repetition_penalty", 1e-300),
        ("/v1/completions", "top_k", 2**31),
    ],
    ids=str,
)
def test_a_number_that_the_engine_could_not_take_is_refused_at_the_door(
    app: RunningApp, path: str, field: str, value: Any
) -> None:
    session_id = app.session()
    base: dict[str, Json] = {
        "/v1/sessions": CREATE,
        "turns": {"input": "x"},
        "/v1/chat/completions": {**CREATE, "messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {**CREATE, "prompt": "x"},
    }
    where = {"turns": f"/v1/sessions/{session_id}/turns", "session": f"/v1/sessions/{session_id}"}
    num_requests = len(app.engine.requests)
    body = {**base.get(path, {}), field: value}
    assert send(app, where.get(path, path), body) == (400, "invalid_value")
    assert len(app.engine.requests) == num_requests


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_every_seed_of_64_bits_reaches_the_engine_as_it_is(app: RunningApp, seed: int) -> None:
    app.turn(app.session(), "x", seed=seed)
    assert app.engine.requests[-1].sampling.seed == seed


def test_a_body_is_refused_exactly_where_its_values_say_so() -> None:
    """Against the values themselves: text that cannot be encoded, integers beyond 64 bits."""
    rng = random.Random(4)
    texts = ["\\ud83d\\ude00", "\\ud83d", "\\uDE00", "\\\\ud83d", "\\\\", '\\"', "e", "1" * 25]
    numbers = ["7", "1.5e3", "0." + "3" * 30, "9" * 18, str(2**63), str(2**64), f"-{2**63}"]
    numbers += [f"-{2**63 + 1}", "3" * 40 + ".5", "1" + "0" * 30]
    refused = 0
    for _ in range(2000):
        values = []
        for _ in range(rng.randrange(1, 5)):
            text = "".join(rng.choices(texts, k=rng.randrange(4)))
            values.append(rng.choice([f'"{text}"', rng.choice(numbers)]))
        body = "{" + ", ".join(f'"k{i}": {value}' for i, value in enumerate(values)) + "}"
        is_bad = any(map(_is_bad, json.loads(body).values()))
        refused += is_bad
        if is_bad:
            with pytest.raises(BodyRefused):
                check_text(body.encode())
        else:
            check_text(body.encode())
    assert 300 < refused < 1700


def test_a_long_number_is_found_wherever_it_stands_and_no_shorter_one() -> None:
    rng = random.Random(5)
    found = 0
    for _ in range(3000):
        lens = rng.choices([0, 1, 5, 17, 18, 19, 20, 40], [9, 9, 9, 9, 9, 1, 1, 1], k=4)
        runs = ["".join(rng.choices("0123456789", k=length)) for length in lens]
        gaps = ["".join(rng.choices("/:,-. \u00e9", k=rng.randrange(1, 3))) for _ in runs]
        body = "".join(gap + run for gap, run in zip(gaps, runs, strict=True))
        body = body[rng.randrange(2) :] + rng.choice(["", "]"])
        assert has_long_number(body.encode()) == (max(lens) >= 19)
        found += max(lens) >= 19
    assert 300 < found < 2700
    assert not has_long_number(b"")


def _is_bad(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def test_json_nested_too_deep_is_no_json_for_us(app: RunningApp) -> None:
    body = b'{"model": "default", "tools": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert send(app, "/v1/sessions", body) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\\\\ud800"}',
        b'{"a": "\\"\\\\\\\\ud800"}',
        b"[-9223372036854775808, 18446744073709551615]",
        b"[0.12345678901234567890123, 1e400000, 12345678901234567890.5]",
        b'"12345678901234567890123"',
        "\u00e9 \U0001f600".encode(),
        b"",
    ],
)
def test_whole_text_and_numbers_that_fit_pass(body: bytes) -> None:
    check_text(body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"a": "\\ud83d\\ud83d\\ude00"}', "invalid_json"),
        (b'{"a": "\\\\\\ude00"}', "invalid_json"),
        (b'[18446744073709551615, "\\uD800"]', "invalid_json"),
        (b'"\xed\xa0\x80"', "invalid_json"),
        (b"[18446744073709551616]", "invalid_value"),
        (b"[-9223372036854775809]", "invalid_value"),
    ],
)
def test_what_cannot_be_held_is_found_wherever_it_stands(body: bytes, code: str) -> None:
    with pytest.raises(BodyRefused) as caught:
        check_text(body)
    assert caught.value.code == code


@pytest.mark.parametrize("cursor", ["\u00b2", "9" * 5000, "-1", "1x"])
def test_a_cursor_in_other_digits_is_refused(app: RunningApp, cursor: str) -> None:
    session_id = app.session()
    path = f"/v1/sessions/{session_id}/turns/{app.turn(session_id)['id']}/events"
    headers = {"Last-Event-ID": cursor.encode("latin-1")}
    assert app.error(app.http.get(path, headers=headers))[:2] == (400, "invalid_value")


def test_a_reader_ahead_of_a_live_turn_still_hears_how_it_ends(app: RunningApp) -> None:
    app.engine.pause()
    session_id = app.session()
    path = f"/v1/sessions/{session_id}/turns"
    with app.http.stream("POST", path, json={"input": "x", "stream": True}) as reply:
        turn_id = reply.headers["x-turn-id"]
        ahead = f"{path}/{turn_id}/events?starting_after=100000"
        with app.http.stream("GET", ahead) as reader:
            app.engine.resume()
            assert b"event: turn.completed" in reader.read()
        reply.read()
    assert "turn.completed" in app.get(ahead).text
