# SPDX-License-Identifier: Apache-2.0
"""What a parser says never depends on how the bytes were cut: all families, all cuts."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.text.assets import load_text_assets
from tests.fakes.tool_samples import (
    FLAGS,
    LIST,
    NASTY,
    TIME,
    calls_of,
    check_event_rules,
    parse,
    text_of,
    turn_text,
)
from tools_schema.events import ToolCallArgs, ToolCallEnd
from tools_schema.formats.base import HeaderBody, ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.rendering import CallText

_BY_NAME = {fmt.name: fmt for fmt in FORMATS}
_NASTY_CALL = CallText(
    name="list_dir",
    arguments=json.dumps({"path": NASTY, "depth": -3}, ensure_ascii=False),
    call_id="eB3dE6gH9",
)


def _recorded(fmt: ToolFormat) -> list[str]:
    """Whole turns of the family, with reasoning where it has any."""
    text = "" if fmt.is_bare else "Caf\u00e9: let me <look> \u2026\n"
    turns = [
        turn_text(fmt, text, [LIST]),
        turn_text(fmt, text, [LIST, FLAGS, TIME]),
        turn_text(fmt, "", [_NASTY_CALL, TIME]),
        "Only text, \U0001f600 with < and { and [ in it.",
    ]
    if fmt.reasoning is not None:
        tags = fmt.reasoning
        inside = turns[0].replace(tags.end, "")
        thought = f"{tags.begin}\nhm, {inside}\n{tags.end}\n\n"
        turns += [thought + turn for turn in turns[:2]]
    return turns


def _chunks(data: bytes, sizes: list[int]) -> list[bytes]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(data[start : start + size])
        start += size
    return [*chunks, data[start:]]


@pytest.mark.parametrize("name", list(_BY_NAME))
def test_recorded_turns_parse_the_same_in_every_chunking(name: str) -> None:
    fmt = _BY_NAME[name]
    rng = random.Random(name)
    for turn in _recorded(fmt):
        data = turn.encode()
        whole = parse(fmt, [data])
        check_event_rules(whole)
        for size in (1, 2, 3, 7):
            pieces = [data[i : i + size] for i in range(0, len(data), size)]
            assert parse(fmt, pieces) == whole, size
        for _ in range(8):
            sizes = [rng.randrange(0, 12) for _ in range(len(data) // 4)]
            assert parse(fmt, _chunks(data, sizes)) == whole
        for cut in range(0, len(data), 7):
            assert parse(fmt, [data[:cut], data[cut:]]) == whole


@pytest.mark.parametrize("name", list(_BY_NAME))
def test_recorded_turns_yield_exactly_their_calls(name: str) -> None:
    fmt = _BY_NAME[name]
    for calls in ([LIST], [LIST, FLAGS, TIME], [_NASTY_CALL, TIME]):
        if calls[0] is _NASTY_CALL and _cannot_write(fmt, NASTY):
            continue
        found = calls_of(parse(fmt, turn_text(fmt, "", calls)))
        assert [n for n, _ in found] == [c.name for c in calls]
        for (_, arguments), call in zip(found, calls, strict=True):
            assert json.loads(arguments) == json.loads(call.arguments)
            if not (isinstance(fmt.body, HeaderBody) and fmt.body.params is not None):
                assert arguments == call.arguments


def _cannot_write(fmt: ToolFormat, text: str) -> bool:
    """Tagged parameters have no escape for their own end."""
    return (
        isinstance(fmt.body, HeaderBody)
        and fmt.body.params is not None
        and fmt.body.params.end.strip() in text
    )


@pytest.mark.parametrize("name", list(_BY_NAME))
def test_a_turn_cut_at_any_byte_has_no_call_that_the_whole_has_not(name: str) -> None:
    fmt, rng = _BY_NAME[name], random.Random(name)
    for number, turn in enumerate(_recorded(fmt)):
        data = turn.encode()
        whole = parse(fmt, [data])
        full = {e.index: e.arguments for e in whole if isinstance(e, ToolCallEnd)}
        complete = calls_of(whole)
        step = 1 if number == 0 else 6  # every byte of one turn, every part of the others
        for cut in range(0, len(data), step):
            for reason in ("length", "stop"):
                events = parse(fmt, [data[:cut]], reason=reason)
                check_event_rules(events)
                found = calls_of(events)
                assert found == complete[: len(found)]
                for event in events:
                    if isinstance(event, ToolCallArgs):
                        assert full[event.index].startswith(event.delta.rstrip("\ufffd"))
            if number and cut % 4:
                continue
            sizes = [1] * cut if cut % 32 == 0 else [rng.randrange(9) for _ in range(cut // 4)]
            cut_up = parse(fmt, _chunks(data[:cut], sizes), reason="length")
            assert cut_up == parse(fmt, [data[:cut]], reason="length")


@pytest.mark.parametrize("name", list(_BY_NAME))
def test_recorded_turns_parse_the_same_in_tokens_and_in_bursts_of_them(name: str) -> None:
    fmt, tokenizer = _BY_NAME[name], load_text_assets("smollm2").tokenizer
    for turn in _recorded(fmt):
        tokens = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(turn)]
        assert b"".join(tokens) == turn.encode()
        whole = parse(fmt, [turn.encode()])
        for burst in (1, 2, 5):  # a verified draft arrives at once
            bursts = [b"".join(tokens[i : i + burst]) for i in range(0, len(tokens), burst)]
            assert parse(fmt, bursts) == whole, burst


def _fragments(fmt: ToolFormat) -> st.SearchStrategy[bytes]:
    pieces = [m.encode() for m in fmt.markers()]
    pieces += [m[: len(m) // 2] for m in pieces]
    pieces += [turn_text(fmt, "", [call]).encode() for call in (LIST, TIME)]
    pieces += [b'{"name": "list_dir"', b'"arguments": {', b'"path": "x"}', b"}", b"]", b"[", b","]
    pieces += [
        b"\n",
        b" ",
        b"list_dir",
        b"get_time",
        b"nope",
        b'"',
        b"\\",
        b"\xc3\xa9",
        b"\xf0\x9f",
    ]
    return st.one_of(st.sampled_from(pieces), st.binary(max_size=4))


@pytest.mark.parametrize("name", list(_BY_NAME))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_garbage_parses_the_same_in_every_chunking(name: str, data: st.DataObject) -> None:
    fmt = _BY_NAME[name]
    raw = b"".join(data.draw(st.lists(_fragments(fmt), max_size=12)))
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=30))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    opened = data.draw(st.booleans())
    whole = parse(fmt, [raw], reason=reason, reasoning_open=opened)
    check_event_rules(whole)
    cut = parse(fmt, _chunks(raw, sizes), reason=reason, reasoning_open=opened)
    single = parse(fmt, [bytes([b]) for b in raw], reason=reason, reasoning_open=opened)
    assert cut == whole and single == whole
    for _, arguments in calls_of(whole):
        json.loads(arguments)


@pytest.mark.parametrize("name", list(_BY_NAME))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=60))
def test_prose_without_markers_comes_out_unchanged(name: str, text: str) -> None:
    fmt = _BY_NAME[name]
    if any(marker in text for marker in fmt.markers() if marker) or (fmt.is_bare and "{" in text):
        return
    assert (
        text_of(parse(fmt, text.encode("utf-8", "replace").decode()))
        == text.encode("utf-8", "replace").decode()
    )
