# SPDX-License-Identifier: Apache-2.0
"""Reading an answer token by token: what is kept of it, whole or cut at any place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.answer import AnswerReader
from appliance.response_events import ResponseEvents, derived_id
from sessions.ids import is_id
from sessions.items import FunctionCall, Message
from sessions.token_codec import decode_ids
from tests.fakes.appliance import default_assets, ids_of
from tools_schema import events as parsed
from tools_schema.formats.registry import get_format
from tools_schema.stream_parser import StreamParser
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import parse_tools

TOOLSET = parse_tools([{"type": "function", "name": "ls", "parameters": {"type": "object"}}])
CALL = '{"name": "ls", "arguments": {"path": "src"}}'
TEXT = f"Let me look.\n<tool_call>[{CALL}, {CALL}]</tool_call>"


def reader(stop: tuple[str, ...] = ()) -> AnswerReader:
    assets = default_assets()
    parser = StreamParser(get_format("smollm2"), TOOLSET, parse_tool_choice("auto", TOOLSET))
    return AnswerReader(
        tokenizer=assets.tokenizer,
        eos_ids=frozenset(assets.eos_ids),
        parser=parser,
        stop_strings=stop,
    )


def read(ids: list[int], *, is_cut: bool) -> tuple[AnswerReader, ResponseEvents]:
    answer, response = reader(), ResponseEvents("turn_x", TOOLSET)
    for token_id in ids:
        response.take(answer.push(token_id))
    response.take(answer.finish(is_cut=is_cut))
    response.finish()
    return answer, response


def spell(ids: bytes) -> str:
    return default_assets().tokenizer.decode(decode_ids(ids))


def test_a_whole_answer_is_kept_verbatim_and_closed() -> None:
    ids = [*ids_of(TEXT), 2]
    answer, response = read(ids, is_cut=False)
    kept = answer.kept()
    assert decode_ids(kept.token_ids) == ids and kept.is_closed and kept.num_sampled == len(ids)
    assert [type(item) for item in response.items] == [Message, FunctionCall, FunctionCall]


@pytest.mark.parametrize("num_tokens", range(len(ids_of(TEXT)) + 1))
def test_an_answer_cut_anywhere_keeps_whole_items_and_their_tokens(num_tokens: int) -> None:
    ids = ids_of(TEXT)[:num_tokens]
    answer, response = read(ids, is_cut=True)
    num_calls = sum(isinstance(item, FunctionCall) for item in response.items)
    kept = answer.kept()
    assert not kept.is_closed
    assert decode_ids(kept.token_ids)[: kept.num_sampled] == ids[: kept.num_sampled]
    # The tokens spell the calls that are kept, and no further call.
    assert spell(kept.token_ids).count('"name"') == num_calls
    messages = "".join(item.text for item in response.items if isinstance(item, Message))
    text_only = answer.kept(text_only=True)
    if answer.has_calls or answer.has_truncated_call:
        assert spell(text_only.token_ids) == messages
    else:
        assert text_only == kept


def test_a_stop_string_inside_a_token_keeps_the_head_of_that_token_as_new_ids() -> None:
    answer = reader(("ook",))
    for token_id in ids_of("Let me look around"):
        if answer.is_stopped:
            break
        answer.push(token_id)
    kept = answer.kept()
    assert answer.stop_string == "ook" and spell(kept.token_ids) == "Let me l"
    assert kept.num_sampled < len(decode_ids(kept.token_ids)) and not kept.is_closed


def test_derived_ids_are_stable_well_formed_and_all_different() -> None:
    turn_id = "turn_01m8mccd475zm81ysszvxfhxpe"
    ids = [derived_id("item", turn_id, n) for n in range(50)]
    assert len(set(ids)) == 50 and all(is_id(made, "item") for made in ids)
    assert ids == [derived_id("item", turn_id, n) for n in range(50)]
    assert derived_id("call", turn_id, 0)[5:] != derived_id("item", turn_id, 0)[5:]


@pytest.mark.parametrize("stop", ["{", '"', "ls", "}", "}}", "}, {", "]"])
def test_a_stop_string_inside_a_call_keeps_whole_items_only(stop: str) -> None:
    answer, response = reader((stop,)), ResponseEvents("turn_x", TOOLSET)
    for token_id in ids_of(TEXT):
        if answer.is_stopped:
            break
        response.take(answer.push(token_id))
    response.take(answer.finish(is_cut=True))
    response.finish()
    assert answer.is_stopped
    num_calls = sum(isinstance(item, FunctionCall) for item in response.items)
    kept = spell(answer.kept().token_ids)
    assert kept.count('"name"') == num_calls
    assert kept.rstrip() == "Let me look." or kept.startswith(f"Let me look.\n<tool_call>[{CALL}")


THINKING = (
    "A thought, <b>two</b>.\n</think>\n\n I look \u00e4t it: a < b, 1 <2 \U0001f9ed  and \n\n"
    f" so on.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    " <think>Again.</think> Done. "
)


def kinds_of(taken: list[tuple[parsed.Event, int]]) -> list[tuple[type, str, int]]:
    """Neighbouring deltas as one, each with the number of tokens when its kind began."""
    out: list[tuple[type, str, int]] = []
    for event, count in taken:
        text = event.delta if isinstance(event, parsed.ToolCallArgs) else getattr(event, "text", "")
        if out and isinstance(event, parsed.DELTAS) and out[-1][0] is type(event):
            out[-1] = (out[-1][0], out[-1][1] + text, out[-1][2])
        else:
            out.append((type(event), text, count))
    return out


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "glm", "smollm2"])
@given(sizes=st.lists(st.integers(1, 12), max_size=40), stops=st.booleans())
def test_tokens_taken_together_are_counted_as_if_taken_singly(
    family: str, sizes: list[int], stops: bool
) -> None:
    def reader() -> AnswerReader:
        choice = parse_tool_choice("auto", TOOLSET)
        parser = StreamParser(get_format(family), TOOLSET, choice, reasoning_open=True)
        tokenizer = default_assets().tokenizer
        stop_strings = ("so on", "never") if stops else ()
        return AnswerReader(
            tokenizer=tokenizer, eos_ids=frozenset(), parser=parser, stop_strings=stop_strings
        )

    ids = ids_of(THINKING)
    singly, together = reader(), reader()
    want = [pair for token_id in ids for pair in singly.take([token_id])]
    got: list[tuple[parsed.Event, int]] = []
    at = 0
    for size in (*sizes, len(ids)):
        got += together.take(ids[at : at + size])
        at += size
    assert kinds_of(got) == kinds_of(want)
    assert together.token_ids == singly.token_ids
    assert together.num_reasoning == singly.num_reasoning
    assert together.stop_string == singly.stop_string
    ends = [kinds_of([(event, 0) for event in r.finish(is_cut=False)]) for r in (singly, together)]
    assert ends[0] == ends[1] and together.kept() == singly.kept()
