# SPDX-License-Identifier: Apache-2.0
"""Incremental text and stop strings against the same rule applied to the whole output."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.text.assets import load_text_assets
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_text_assets("default").tokenizer


def _ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """One token per piece; each must be a token of the vocabulary."""
    ids = [tokenizer.encode(piece) for piece in pieces]
    assert all(len(part) == 1 for part in ids)
    return [part[0] for part in ids]


def _first_stop(data: bytes, stops: list[str]) -> tuple[int, str] | None:
    """Brute force: the stop complete at the earliest byte, the longest of those."""
    for end in range(1, len(data) + 1):
        hits = [s for s in stops if data[:end].endswith(s.encode())]
        if hits:
            stop = max(hits, key=lambda s: len(s.encode()))
            return end - len(stop.encode()), stop
    return None


def test_a_character_of_several_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f9ed")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["\U0001f9ed"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("\U0001f9ed")[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_stop_string_is_found_across_tokens(tokenizer: Tokenizer) -> None:
    ids = _ids(tokenizer, "one", " two", " th", "ree")
    detokenizer = Detokenizer(tokenizer, ["o th"])
    assert detokenizer.push(ids) == "one tw"
    assert detokenizer.stop is not None
    assert detokenizer.stop.stop_string == "o th"
    assert detokenizer.stop.num_tokens_kept == 1
    assert detokenizer.stop.tail_text == " tw"
    assert detokenizer.flush() == ""


def test_a_stop_at_a_token_border_keeps_whole_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["\n"])
    assert detokenizer.push(_ids(tokenizer, "a", "b", "\n", "c")) == "ab"
    assert detokenizer.stop is not None
    assert (detokenizer.stop.num_tokens_kept, detokenizer.stop.tail_text) == (2, "")


def test_text_that_may_become_a_stop_is_held_until_it_cannot(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["END"])
    assert detokenizer.push(_ids(tokenizer, "x", "E")) == "x"
    assert detokenizer.push(_ids(tokenizer, "N")) == ""
    assert detokenizer.push(_ids(tokenizer, "E")) == "EN"
    assert detokenizer.flush() == "E"
    assert detokenizer.stop is None


def test_control_tokens_leave_no_text_unless_asked(tokenizer: Tokenizer) -> None:
    ids = [1, *_ids(tokenizer, "a"), 2]
    assert Detokenizer(tokenizer).push(ids) == "a"
    every = tokenizer.control_ids
    assert Detokenizer(tokenizer, shown_control=every).push(ids) == "<|im_start|>a<|im_end|>"
    assert Detokenizer(tokenizer, shown_control=frozenset({1})).push(ids) == "<|im_start|>a"


def test_a_shown_control_token_ends_what_was_held_and_is_no_stop_string(
    tokenizer: Tokenizer,
) -> None:
    shown = frozenset({1})
    for stops in (["a<|im"], ["|im_"], ["<"], ["ab"]):
        detokenizer = Detokenizer(tokenizer, stops, shown_control=shown)
        ids = [*_ids(tokenizer, "a"), 1, *_ids(tokenizer, "b")]
        assert detokenizer.push(ids) == "a<|im_start|>b" and detokenizer.stop is None
    cut_character = tokenizer.encode("\U0001f600")[:1]
    detokenizer = Detokenizer(tokenizer, shown_control=shown)
    assert detokenizer.push([*cut_character, 1]) == "\ufffd<|im_start|>"
    detokenizer = Detokenizer(tokenizer, ["b"], shown_control=shown)
    assert detokenizer.push([*_ids(tokenizer, "a"), 1, *_ids(tokenizer, "a", "b")]) == (
        "a<|im_start|>a"
    )
    assert detokenizer.stop is not None and detokenizer.stop.num_tokens_kept == 3


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        Detokenizer(tokenizer, ["a", ""])


_PIECES = st.lists(
    st.sampled_from(["a", "b", "ab", "ba", "\n", " a", "\u00e9", "\U0001f600", "\u4e2d", "aab"]),
    max_size=14,
)
_STOPS = st.lists(
    st.sampled_from(["ab", "b", "aba", "a\n", "\u00e9", "b\U0001f600a", "aab", "\n "]), max_size=3
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=_PIECES, stops=_STOPS, cuts=st.lists(st.integers(1, 4), max_size=20))
def test_any_cut_of_the_ids_gives_the_text_of_the_whole(
    tokenizer: Tokenizer, pieces: list[str], stops: list[str], cuts: list[int]
) -> None:
    ids = [i for piece in pieces for i in tokenizer.encode(piece)]
    data = tokenizer.decode_bytes(ids)
    expected = _first_stop(data, stops)
    detokenizer = Detokenizer(tokenizer, stops)
    text, at = "", 0
    while at < len(ids) and detokenizer.stop is None:
        size = cuts.pop() if cuts else 1
        text += detokenizer.push(ids[at : at + size])
        at += size
    text += detokenizer.flush()
    if expected is None:
        assert detokenizer.stop is None
        assert text == data.decode("utf-8", "replace")
        return
    stop = detokenizer.stop
    assert stop is not None
    assert stop.stop_string == expected[1]
    assert text == data[: expected[0]].decode("utf-8", "replace")
    kept = tokenizer.decode_bytes(ids[: stop.num_tokens_kept])
    assert len(kept) <= expected[0]
    assert len(tokenizer.decode_bytes(ids[: stop.num_tokens_kept + 1])) > expected[0]
    assert tokenizer.decode(ids[: stop.num_tokens_kept]) + stop.tail_text == text
