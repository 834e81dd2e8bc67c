# SPDX-License-Identifier: Apache-2.0
"""Long texts: what cannot fit is refused unread, what may fit holds up nobody else."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.errors import ApiError
from appliance.text_limits import LONG_TEXT_CHARS, check_can_fit, num_chars
from tests.fakes.appliance import RunningApp, default_assets

WORDS = "hello world "


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    root: Path = tmp_path_factory.mktemp("a")
    with RunningApp(root, max_context_len=8192) as running:
        yield running


def test_characters_are_counted_in_every_text_of_a_value() -> None:
    assert num_chars(["ab", {"k": "c", "l": [None, 1, "de"]}, ""]) == 5
    assert num_chars("abc") == 3 and num_chars(None) == 0


def test_a_text_is_refused_by_its_length_only_where_no_tokens_could_spell_it() -> None:
    check_can_fit(100, 10, 10, "input")
    with pytest.raises(ApiError) as caught:
        check_can_fit(101, 10, 10, "input")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_the_longest_token_is_the_longest_of_the_vocabulary() -> None:
    tokenizer = default_assets().tokenizer
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert tokenizer.max_token_bytes == longest


@pytest.mark.parametrize("num_words", [1000, 4000])
def test_a_long_text_is_tokenised_as_its_parts_are(num_words: int) -> None:
    tokenizer = default_assets().tokenizer
    parts = [*tokenizer.encode("hello"), *tokenizer.encode(" world")]
    assert len(parts) == 2
    assert tokenizer.encode("hello world" + " hello world" * num_words) == [
        *parts,
        *(tokenizer.encode(" hello") + tokenizer.encode(" world")) * num_words,
    ]


def test_a_text_that_no_context_could_hold_is_refused_unread(roomy: RunningApp) -> None:
    text = WORDS * 600_000
    session_id = roomy.session()
    replies = [
        roomy.post("/v1/sessions", {"model": "default", "instructions": text}),
        roomy.post(f"/v1/sessions/{session_id}/items", {"items": text}),
        roomy.post(f"/v1/sessions/{session_id}/turns", {"input": text}),
    ]
    asks = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
    }
    replies += [roomy.post(path, {"model": "default", **body}) for path, body in asks.items()]
    errors = [roomy.error(reply) for reply in replies]
    assert errors == [
        (400, "context_length_exceeded", param)
        for param in ("initial_items", "items", "input", "messages", "prompt", "input")
    ]
    assert "characters" in replies[2].json()["error"]["message"]


def test_long_turns_are_prepared_beside_the_loop_and_all_run(roomy: RunningApp) -> None:
    text = WORDS * 3600
    assert len(text) > LONG_TEXT_CHARS
    num_tokens = len(default_assets().tokenizer.encode(text))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        turns = list(pool.map(lambda _: roomy.turn(roomy.session(), text), range(4)))
    assert {turn["status"] for turn in turns} == {"completed"}
    assert all(turn["usage"]["input_tokens"] > num_tokens for turn in turns)


def test_text_that_no_context_could_hold_is_not_tokenised_either(app: RunningApp) -> None:
    huge = "a b " * 2_000_000
    for body in ({"prompt": huge}, {"messages": [{"role": "user", "content": huge}]}):
        status, code, param = app.error(app.post("/tokenize", body))
        assert (status, code, param) == (400, "context_length_exceeded", next(iter(body)))
