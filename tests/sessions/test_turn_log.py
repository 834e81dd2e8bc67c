# SPDX-License-Identifier: Apache-2.0
"""The turn log: exact concatenation, cuts at turns, items and revisions, forks and rollbacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sessions import history
from sessions.errors import (
    ForkPointError,
    ItemNotFound,
    SessionExpired,
    SettingError,
    TurnInProgress,
    TurnNotFound,
)
from sessions.history import cut_spans
from sessions.items import parse_items
from sessions.session import Session, items_record
from sessions.token_codec import decode_ids, encode_ids
from sessions.turn_log import LogSpan, Record, TurnLog
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending


def grown(num_turns: int = 3) -> tuple[Session, TurnLog]:
    session, records = fresh_session()
    log = TurnLog(records)
    for turn_index in range(num_turns):
        turn = pending(session)
        record = outcome(turn, token_ids=(turn_index,))
        session = session.begin_turn(turn, NOW_MS).commit_turn(record, NOW_MS)
        log = log.extended(record)
    return session, log


def test_history_is_the_ids_end_to_end() -> None:
    _, log = grown(2)
    turn = list(range(10_000, 10_005))
    assert decode_ids(log.token_ids) == [100, 101, 102, 103, 104, *turn, 0, *turn, 1]
    assert log.num_tokens == 17
    assert log.items == log.records[1].items + log.records[2].items


def test_extending_a_log_joins_the_same_bytes_as_a_fresh_log() -> None:
    _, log = grown(3)
    prefix = TurnLog(log.records[:2])
    assert prefix.token_ids  # joined before it grows
    assert prefix.extended(*log.records[2:]).token_ids == TurnLog(log.records).token_ids


def test_the_manifest_takes_new_pages_only_and_never_has_a_gap() -> None:
    _, log = grown(2)
    pages = [bytes([number]) * 16 for number in range(5)]
    first = replace(log.records[1], page_hashes=b"".join(pages[:2]))
    log = TurnLog((log.records[0], first))
    assert log.new_page_hashes(b"".join(pages)) == b"".join(pages[2:])
    assert log.new_page_hashes(b"".join(pages[:2])) == b""
    assert log.new_page_hashes(b"".join(pages[1:])) == b""
    assert TurnLog().new_page_hashes(b"".join(pages)) == b"".join(pages)
    second = replace(first, id="turn_2", page_hashes=log.new_page_hashes(b"".join(pages)))
    assert log.extended(second).page_hashes == b"".join(pages)


def test_cut_finds_head_turn_item_and_revision() -> None:
    _, log = grown(3)
    assert log.cut("head").num_records == 4
    assert log.cut(log.records[2].id).num_records == 3
    assert log.cut(log.records[2].output_items[-1].id).num_records == 3
    assert [log.cut(revision).num_records for revision in (0, 1, 3)] == [1, 2, 4]
    for at, error in (("turn_x", TurnNotFound), ("item_x", ItemNotFound), ("x", ItemNotFound)):
        with pytest.raises(error):
            log.cut(at)
    for revision in (-1, 4):
        with pytest.raises(ForkPointError):
            log.cut(revision)


def test_cut_inside_a_record_keeps_exactly_the_items_tokens() -> None:
    items = parse_items([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    answer = parse_items(
        [{"role": "assistant", "content": "c"}, {"role": "assistant", "content": "d"}]
    )
    record = Record(
        id="turn_1",
        revision=1,
        input_items=items,
        input_token_ids=encode_ids([1, 2, 3, 4, 5]),  # a: 1 2, b: 3 4, generation prompt: 5
        output_items=answer,
        output_token_ids=encode_ids([6, 7, 8]),  # c: 6, d: 7, end: 8
        item_token_ends=(2, 4, 6, 7),
    )
    log = TurnLog((record,))
    expected = {
        0: ([1, 2], [], True),
        1: ([1, 2, 3, 4], [], True),
        2: ([1, 2, 3, 4, 5], [6], False),
    }
    for position, (input_ids, output_ids, is_closed) in expected.items():
        cut = log.cut(record.items[position].id)
        assert cut.num_records == 0 and cut.part is not None
        part = cut.part
        part.validate()
        assert part.items == record.items[: position + 1]
        assert decode_ids(part.input_token_ids) == input_ids
        assert decode_ids(part.output_token_ids) == output_ids
        assert TurnLog((part,)).is_closed is is_closed
    assert log.cut(answer[1].id).part is None


def test_cut_inside_a_record_without_item_boundaries_names_what_is_allowed() -> None:
    items = parse_items([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    record = items_record(items, revision=1, token_ids=encode_ids([1, 2]))
    with pytest.raises(ForkPointError, match=record.id):
        TurnLog((record,)).cut(items[0].id)


@pytest.mark.parametrize(
    "ends", [(1,), (2, 1), (1, 9), (-1, 1)], ids=["count", "order", "beyond", "negative"]
)
def test_records_with_impossible_item_boundaries_are_refused(ends: tuple[int, ...]) -> None:
    items = parse_items([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(ValueError, match="item_token_ends"):
        items_record(
            items, revision=1, token_ids=encode_ids([1, 2]), item_token_ends=ends
        ).validate()


def test_fork_is_zero_copy_at_a_turn() -> None:
    session, log = grown(3)
    children = history.fork(session, log, log.records[2].id, NOW_MS, n=3, metadata={"k": "v"})
    assert len({child.id for child, _ in children}) == 3
    for child, own in children:
        assert own == ()
        assert child.lineage == (LogSpan(log_id=session.log_id, first=0, end=3),)
        assert (child.log_len, child.revision, child.version) == (0, 2, 0)
        assert child.num_tokens == 5 + 6 + 6
        assert child.parent_session_id == session.id
        assert child.metadata == {"k": "v"}
        assert child.usage.input == 0


def test_fork_behind_a_call_has_it_open_again() -> None:
    session, records = fresh_session()
    turn = pending(session)
    asked = outcome(turn, call_ids=("a",))
    session = session.begin_turn(turn, NOW_MS).commit_turn(asked, NOW_MS)
    answer = parse_items([{"type": "function_call_output", "call_id": "a", "output": ""}])
    second = pending(session, answer)
    told = outcome(second)
    session = session.begin_turn(second, NOW_MS).commit_turn(told, NOW_MS)
    log = TurnLog((*records, asked, told))
    ((child, _),) = history.fork(session, log, asked.id, NOW_MS)
    assert (child.status, child.open_call_ids) == ("requires_action", ("a",))
    ((head, _),) = history.fork(session, log, "head", NOW_MS)
    assert (head.status, head.open_call_ids) == ("idle", ())


def test_fork_while_a_turn_runs_shares_what_is_committed() -> None:
    session, log = grown(1)
    running = session.begin_turn(pending(session), NOW_MS)
    ((child, _),) = history.fork(running, log, "head", NOW_MS)
    assert (child.status, child.current_turn, child.num_records) == ("idle", None, 2)


@pytest.mark.parametrize("n", [0, 33, -1])
def test_fork_makes_1_to_32_children(n: int) -> None:
    session, log = grown(1)
    with pytest.raises(SettingError) as caught:
        history.fork(session, log, "head", NOW_MS, n=n)
    assert caught.value.param == "n"
    assert len(history.fork(session, log, "head", NOW_MS, n=32)) == 32


def test_expired_sessions_do_not_fork() -> None:
    session, log = grown(1)
    with pytest.raises(SessionExpired):
        history.fork(session.expire(NOW_MS, retention_ms=1), log, "head", NOW_MS)


def test_rollback_is_a_new_revision_of_an_older_history() -> None:
    session, log = grown(3)
    back, own = history.rollback(session, log, log.records[1].id, NOW_MS)
    assert own == ()
    assert (back.id, back.revision, back.num_tokens) == (session.id, 4, 11)
    assert back.lineage == (LogSpan(log_id=session.log_id, first=0, end=2),)
    assert back.log_id != session.log_id
    assert back.usage == session.usage
    assert back.last_turn == log.records[1].id
    with pytest.raises(TurnInProgress):
        history.rollback(session.begin_turn(pending(session), NOW_MS), log, 1, NOW_MS)


def test_rollback_into_a_record_keeps_its_head_at_the_new_revision() -> None:
    session, log = grown(2)
    target = log.records[2].input_items[0].id
    back, own = history.rollback(session, log, target, NOW_MS)
    assert [record.revision for record in own] == [3]
    assert decode_ids(own[0].token_ids) == [10_000, 10_001, 10_002]
    assert back.num_tokens == 5 + 6 + 3


def test_a_new_head_keeps_nothing_and_a_compaction_keeps_the_prelude() -> None:
    session, log = grown(2)
    head = items_record((), revision=0, token_ids=encode_ids([1]), kind="prelude")
    rest = [replace(record, revision=0) for record in log.records[1:]]
    moved, own = history.replace_history(
        session, log, [head, *rest], NOW_MS, model_fingerprint="new"
    )
    assert (moved.lineage, moved.log_len, moved.num_tokens) == ((), 3, 13)
    assert moved.model_fingerprint == "new"
    assert [record.revision for record in own] == [3, 3, 3]
    kept, _ = history.replace_history(session, log, [], NOW_MS, keep_records=1)
    assert kept.num_tokens == 5


def test_spans_are_cut_from_the_front() -> None:
    spans = (LogSpan(log_id="a", first=1, end=3), LogSpan(log_id="b", first=0, end=2))
    assert cut_spans(spans, 0) == ()
    assert cut_spans(spans, 1) == (LogSpan(log_id="a", first=1, end=2),)
    assert cut_spans(spans, 3) == (spans[0], LogSpan(log_id="b", first=0, end=1))
    assert cut_spans(spans, 4) == spans
    with pytest.raises(ValueError, match="num_records"):
        cut_spans(spans, 5)
