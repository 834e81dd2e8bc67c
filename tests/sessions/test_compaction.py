# SPDX-License-Identifier: Apache-2.0
"""Where a history is cut for compaction: nothing is lost, no kept output is without its call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sessions.calls import open_calls_of
from sessions.compaction import Split, split_history, split_to_fit
from sessions.items import (
    Compaction,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
)
from sessions.token_codec import encode_ids
from sessions.turn_log import COMPACTION, ITEMS, PRELUDE, TURN, Record, TurnLog

TOKENS_OF_ITEM = 2
PROMPT = 1  # tokens of a generation prompt


def says(text: str, role: str = "assistant") -> Message:
    part = OutputText(text=text) if role == "assistant" else InputText(text=text)
    return Message(id=f"item_{text}", role=role, content=(part,))


def call(name: str) -> FunctionCall:
    return FunctionCall(id=f"item_{name}", call_id=name, name="f", arguments="{}")


def output(name: str) -> FunctionCallOutput:
    return FunctionCallOutput(id=f"item_out_{name}", call_id=name, output="ok")


def turn(number: int, inputs: tuple[Item, ...], outputs: tuple[Item, ...]) -> Record:
    input_len = TOKENS_OF_ITEM * len(inputs) + PROMPT
    ends = [TOKENS_OF_ITEM * (i + 1) for i in range(len(inputs))]
    ends += [input_len + TOKENS_OF_ITEM * (i + 1) for i in range(len(outputs))]
    base = 1000 * (number + 1)
    return Record(
        id=f"turn_{number}",
        revision=number,
        input_items=inputs,
        input_token_ids=encode_ids(range(base, base + input_len)),
        output_items=outputs,
        output_token_ids=encode_ids(range(base + 500, base + 500 + TOKENS_OF_ITEM * len(outputs))),
        item_token_ends=tuple(ends),
    )


def items_record(number: int, items: tuple[Item, ...]) -> Record:
    return Record(
        id=f"batch_{number}",
        kind=ITEMS,
        revision=number,
        input_items=items,
        input_token_ids=encode_ids(range(1000 * (number + 1), 1000 * (number + 1) + 2)),
        item_token_ends=(2,),
    )


HEAD = Record(id="batch_head", kind=PRELUDE, input_token_ids=encode_ids([1, 2, 3]))


def check(log: TurnLog, split: Split) -> None:
    kept = b"".join(record.token_ids for record in split.kept)
    assert split.replaced_log.token_ids + kept == log.token_ids
    items = [item for record in (*split.replaced, *split.kept) for item in record.items]
    assert items == list(log.items)
    calls = set()
    for record in split.kept:
        record.validate()
        for item in record.items:
            if isinstance(item, FunctionCall):
                calls.add(item.call_id)
            if isinstance(item, FunctionCallOutput):
                assert item.call_id in calls
    assert {c.call_id for c in open_calls_of(log.items)} <= calls


def test_the_last_turns_stay_whole_with_what_was_appended_for_them() -> None:
    log = TurnLog(
        (
            HEAD,
            turn(0, (says("a", "user"),), (says("b"),)),
            items_record(1, (says("c", "user"),)),
            turn(2, (), (says("d"),)),
        )
    )
    split = split_history(log, (), keep_last_turns=1)
    assert split is not None
    check(log, split)
    assert [r.id for r in split.replaced] == ["turn_0"]
    assert [r.id for r in split.kept] == ["batch_1", "turn_2"]
    assert split.head == (HEAD,) and split.answer is None


def test_a_cut_in_a_tool_loop_goes_through_the_turn_that_made_the_call() -> None:
    log = TurnLog(
        (
            HEAD,
            turn(0, (says("task", "user"),), (call("one"),)),
            turn(1, (output("one"),), (says("hm"), call("two"))),
            turn(2, (output("two"),), (says("done"),)),
        )
    )
    split = split_history(log, (), keep_last_turns=1)
    assert split is not None
    check(log, split)
    answer, last = split.kept
    assert (answer.id, answer.kind, last.id) == ("turn_1", TURN, "turn_2")
    assert answer.input_items == () and answer.output_items == log.records[2].output_items
    assert len(answer.input_token_ids) // 4 == PROMPT
    assert [r.id for r in split.replaced] == ["turn_0", "turn_1"]


def test_open_calls_are_kept_even_where_no_turn_is() -> None:
    log = TurnLog((HEAD, turn(0, (says("task", "user"),), (call("one"), call("two")))))
    split = split_history(log, open_calls_of(log.items), keep_last_turns=0)
    assert split is not None
    check(log, split)
    assert [item.id for item in split.kept[0].items] == ["item_one", "item_two"]


def test_there_is_nothing_to_cut_off_a_short_history() -> None:
    log = TurnLog((HEAD, turn(0, (says("a", "user"),), (says("b"),))))
    assert split_history(log, (), keep_last_turns=1) is None
    assert split_history(log, (), keep_last_turns=9) is None
    assert split_history(TurnLog((HEAD,)), (), keep_last_turns=0) is None
    summary = Record(
        id="batch_s", kind=COMPACTION, input_items=(Compaction(id="item_s", summary="s"),)
    )
    again = TurnLog((HEAD, summary, turn(0, (says("a", "user"),), (says("b"),))))
    assert split_history(again, (), keep_last_turns=1) is None
    assert split_history(again, (), keep_last_turns=0) is not None


def test_a_record_without_seams_is_kept_whole() -> None:
    whole = turn(0, (says("task", "user"),), (call("one"),))
    blurred = Record(**{f: getattr(whole, f) for f in whole.__slots__} | {"item_token_ends": ()})
    before = turn(7, (says("x", "user"),), (says("y"),))
    log = TurnLog((HEAD, before, blurred, turn(1, (output("one"),), (says("done"),))))
    split = split_history(log, (), keep_last_turns=1)
    assert split is not None
    check(log, split)
    assert [r.id for r in split.kept] == ["turn_0", "turn_1"]


@st.composite
def histories(draw: st.DrawFn) -> TurnLog:
    records: list[Record] = [HEAD] if draw(st.booleans()) else []
    waiting: list[str] = []
    for number in range(draw(st.integers(1, 8))):
        inputs: list[Item] = [output(name) for name in waiting]
        if not waiting or draw(st.booleans()):
            inputs.append(says(f"u{number}", "user"))
        num_calls = draw(st.integers(0, 2))
        waiting = [f"c{number}_{i}" for i in range(num_calls)]
        outputs: tuple[Item, ...] = (says(f"a{number}"), *map(call, waiting))
        record = turn(number, tuple(inputs), outputs)
        if draw(st.integers(0, 5)) == 0:
            fields = {name: getattr(record, name) for name in record.__slots__}
            record = Record(**fields | {"item_token_ends": ()})
        records.append(record)
    return TurnLog(tuple(records))


@given(histories(), st.integers(0, 8))
def test_any_cut_keeps_every_token_and_every_call(log: TurnLog, keep: int) -> None:
    split = split_history(log, open_calls_of(log.items), keep_last_turns=keep)
    if split is not None:
        check(log, split)
        assert split.num_kept_turns >= min(keep, 1)


@given(histories(), st.integers(0, 80))
def test_what_is_kept_fits_where_anything_does(log: TurnLog, room: int) -> None:
    calls = open_calls_of(log.items)
    split = split_to_fit(log, calls, max_kept_tokens=room)
    least = split_history(log, calls, keep_last_turns=0)
    assert (split is None) == (least is None)
    if split is not None and least is not None:
        check(log, split)
        assert split.num_kept_tokens <= max(room, least.num_kept_tokens)


def test_a_split_moves_along_with_a_history_that_grows_and_not_with_one_that_changed() -> None:
    first = turn(0, (says("a", "user"),), (says("b"),))
    second = turn(1, (says("c", "user"),), (says("d"),))
    third = turn(2, (says("e", "user"),), (says("f"),))
    log = TurnLog((HEAD, first, second))
    split = split_history(log, (), keep_last_turns=1)
    assert split is not None
    grown = split.moved_to(log, TurnLog((HEAD, first, second, third)))
    assert grown is not None and grown.kept == (second, third)
    assert split.moved_to(log, TurnLog((HEAD, second))) is None
    assert split.moved_to(log, TurnLog((HEAD,))) is None
