# SPDX-License-Identifier: Apache-2.0
"""Transitions of a session: what each changes, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sessions.errors import (
    RevisionConflict,
    SessionExpired,
    SettingError,
    TurnInProgress,
    UnknownCallId,
    UnresolvedToolCalls,
)
from sessions.items import FunctionCall, FunctionCallOutput, Item, parse_items
from sessions.session import Session, items_record, new_session
from sessions.settings import SessionSettings
from sessions.turn_log import PendingTurn
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending


def committed(session: Session, *, call_ids: tuple[str, ...] = (), **fields: Any) -> Session:
    turn = pending(session, **fields)
    return session.begin_turn(turn, NOW_MS).commit_turn(outcome(turn, call_ids=call_ids), NOW_MS)


def outputs(*call_ids: str) -> tuple[Item, ...]:
    return parse_items(
        [{"type": "function_call_output", "call_id": c, "output": "x"} for c in call_ids]
    )


@pytest.fixture
def session() -> Session:
    return fresh_session()[0]


# -- turns


def test_a_turn_leaves_the_revision_until_it_commits(session: Session) -> None:
    turn = pending(session)
    running = session.begin_turn(turn, NOW_MS)
    assert (running.status, running.current_turn, running.revision) == ("running", turn.id, 0)
    after = running.commit_turn(outcome(turn), NOW_MS + 9)
    assert (after.status, after.current_turn, after.revision) == ("idle", None, 1)
    assert after.last_turn == turn.id
    assert after.num_tokens == 5 + 5 + 3
    assert after.num_items == 2
    assert after.updated_at_ms == NOW_MS + 9


def test_commit_adds_usage_and_moves_expiry(session: Session) -> None:
    turn = pending(session)
    record = outcome(turn)
    record = replace(record, usage=replace(record.usage, cached_l1=40, cached_l3=2, computed=6))
    after = session.begin_turn(turn, NOW_MS).commit_turn(record, NOW_MS + 1000)
    assert (after.usage.input, after.usage.output) == (5, 3)
    assert (after.usage.cache_read, after.usage.cache_creation) == (42, 6)
    assert after.expires_at_ms == NOW_MS + 1000 + 7 * 86_400_000


def test_an_uncommitted_end_restores_what_was(session: Session) -> None:
    waiting = committed(session, call_ids=("a",))
    turn = pending(waiting, outputs("a"))
    failed = outcome(turn, status="failed", committed=False)
    after = waiting.begin_turn(turn, NOW_MS).end_turn(failed, NOW_MS)
    assert (after.status, after.revision) == ("requires_action", waiting.revision)
    assert after.open_calls == waiting.open_calls
    assert after.num_tokens == waiting.num_tokens


def test_a_second_turn_is_refused_with_the_running_turn(session: Session) -> None:
    turn = pending(session)
    running = session.begin_turn(turn, NOW_MS)
    refusals: tuple[Callable[[], object], ...] = (
        lambda: running.begin_turn(pending(session), NOW_MS),
        lambda: running.append_items(items_record((), revision=1), NOW_MS),
        lambda: running.suspend(NOW_MS),
        lambda: running.expire(NOW_MS, retention_ms=1),
        lambda: running.update(NOW_MS, settings={"tools": ()}),
    )
    for refused in refusals:
        with pytest.raises(TurnInProgress) as caught:
            refused()
        assert caught.value.turn_id == turn.id
    assert running.update(NOW_MS, settings={"priority": 1}).settings.priority == 1


def test_an_unexpected_revision_is_a_conflict(session: Session) -> None:
    after = committed(session)
    with pytest.raises(RevisionConflict) as caught:
        after.begin_turn(pending(after), NOW_MS, expect_revision=0)
    assert (caught.value.expected, caught.value.actual) == (0, 1)
    assert after.begin_turn(pending(after), NOW_MS, expect_revision=1).current_turn is not None


def test_an_expired_session_takes_no_turn_even_before_the_sweep(session: Session) -> None:
    with pytest.raises(SessionExpired):
        session.begin_turn(pending(session), session.expires_at_ms)
    gone = session.expire(NOW_MS, retention_ms=100)
    assert (gone.status, gone.expires_at_ms) == ("expired", NOW_MS + 100)
    refusals: tuple[Callable[[], object], ...] = (
        lambda: gone.begin_turn(pending(gone), NOW_MS),
        lambda: gone.update(NOW_MS),
        lambda: gone.resume(NOW_MS),
    )
    for refused in refusals:
        with pytest.raises(SessionExpired):
            refused()


def test_programming_errors_are_refused(session: Session) -> None:
    turn = pending(session)
    running = session.begin_turn(turn, NOW_MS)
    record = outcome(turn)
    with pytest.raises(ValueError, match="is not the turn"):
        running.commit_turn(replace(record, id="turn_other"), NOW_MS)
    with pytest.raises(ValueError, match="revision"):
        running.commit_turn(replace(record, revision=5), NOW_MS)
    with pytest.raises(ValueError, match="commit_turn"):
        running.end_turn(record, NOW_MS)
    with pytest.raises(ValueError, match="base_revision: 3"):
        session.begin_turn(replace(turn, base_revision=3), NOW_MS)
    half = FunctionCall(id="i", call_id="c", name="f", arguments="{", status="incomplete")
    with pytest.raises(ValueError, match="'c' is not complete"):
        running.commit_turn(replace(record, output_items=(half,), item_token_ends=()), NOW_MS)


# -- tool calls


def test_calls_open_a_session_and_their_outputs_close_it(session: Session) -> None:
    waiting = committed(session, call_ids=("a", "b"))
    assert waiting.status == "requires_action"
    assert waiting.open_call_ids == ("a", "b")
    done = committed(waiting, items=outputs("b", "a"))
    assert (done.status, done.open_calls) == ("idle", ())


def test_a_turn_without_all_outputs_is_refused_with_the_missing_calls(session: Session) -> None:
    waiting = committed(session, call_ids=("a", "b", "c"))
    with pytest.raises(UnresolvedToolCalls) as caught:
        waiting.begin_turn(pending(waiting, outputs("b")), NOW_MS)
    assert caught.value.call_ids == ("a", "c")
    assert caught.value.code == "unresolved_tool_calls"


def test_auto_close_answers_the_missing_calls_in_front_of_the_input(session: Session) -> None:
    waiting = committed(session, call_ids=("a", "b", "c"))
    items = (*outputs("b"), *parse_items("stop"))
    closed = waiting.prepare_input(items, auto_close_calls=True)
    assert closed[2:] == items
    assert [(i.call_id, i.status) for i in closed[:2] if isinstance(i, FunctionCallOutput)] == [
        ("a", "interrupted"),
        ("c", "interrupted"),
    ]
    assert committed(waiting, items=closed).status == "idle"
    assert waiting.prepare_input(outputs("a", "b", "c"), auto_close_calls=True) is not None


def test_auto_close_answers_a_call_of_the_input_behind_it(session: Session) -> None:
    call = parse_items([{"type": "function_call", "call_id": "n", "name": "f", "arguments": ""}])
    with pytest.raises(UnresolvedToolCalls):
        session.prepare_input(call)
    closed = session.prepare_input(call, auto_close_calls=True)
    assert closed[0] == call[0]
    assert isinstance(closed[1], FunctionCallOutput) and closed[1].call_id == "n"


@pytest.mark.parametrize("call_ids", [("x",), ("a", "x"), ("a", "a")])
def test_an_output_of_no_open_call_is_refused_with_its_path(
    session: Session, call_ids: tuple[str, ...]
) -> None:
    waiting = committed(session, call_ids=("a",))
    with pytest.raises(UnknownCallId) as caught:
        waiting.prepare_input(outputs(*call_ids))
    assert caught.value.param == f"input[{len(call_ids) - 1}].call_id"


def test_appended_outputs_may_come_one_by_one_but_no_message_between(session: Session) -> None:
    waiting = committed(session, call_ids=("a", "b"))
    record = items_record(outputs("a"), revision=2)
    half = waiting.append_items(record, NOW_MS)
    assert (half.status, half.open_call_ids, half.revision) == ("requires_action", ("b",), 2)
    with pytest.raises(UnresolvedToolCalls):
        half.append_items(items_record(parse_items("wait"), revision=3), NOW_MS)
    whole = half.append_items(items_record(outputs("b"), revision=3), NOW_MS)
    assert whole.status == "idle"


# -- life


def test_suspend_and_resume_keep_the_rest_status(session: Session) -> None:
    waiting = committed(session, call_ids=("a",))
    suspended = waiting.suspend(NOW_MS)
    assert suspended.status == "suspended"
    assert suspended.resume(NOW_MS).status == "requires_action"
    assert waiting.resume(NOW_MS) == waiting
    resumed = suspended.begin_turn(pending(suspended, outputs("a")), NOW_MS)
    assert resumed.status == "running"


def test_a_failed_session_says_why_and_the_next_commit_clears_it(session: Session) -> None:
    failed = session.fail(NOW_MS, code="model_missing", message="no such file")
    assert (failed.status, failed.error) == (
        "failed",
        {"code": "model_missing", "message": "no such file"},
    )
    after = committed(failed)
    assert (after.status, after.error) == ("idle", None)


def test_metadata_merges_and_none_removes(session: Session) -> None:
    one = session.update(NOW_MS, metadata={"a": "1", "b": "2"})
    assert one.update(NOW_MS, metadata={"a": None, "c": "3"}).metadata == {"b": "2", "c": "3"}
    assert one.metadata == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"a": 1}, "metadata.a"),
        ({"": "x"}, "metadata."),
        ({"k" * 65: "x"}, f"metadata.{'k' * 65}"),
        ({"a": "v" * 513}, "metadata.a"),
        ({str(n): "" for n in range(65)}, "metadata"),
    ],
)
def test_bad_metadata_is_refused(session: Session, metadata: Any, param: str) -> None:
    with pytest.raises(SettingError) as caught:
        session.update(NOW_MS, metadata=metadata)
    assert caught.value.param == param
    with pytest.raises(SettingError):
        new_session(model="m", now_ms=NOW_MS, metadata=metadata)


def test_initial_items_may_leave_calls_open_and_must_be_consistent() -> None:
    call = parse_items([{"type": "function_call", "call_id": "n", "name": "f", "arguments": ""}])
    session = new_session(model="m", now_ms=NOW_MS, records=[items_record(call, revision=0)])
    assert (session.status, session.open_call_ids, session.revision) == (
        "requires_action",
        ("n",),
        0,
    )
    with pytest.raises(UnknownCallId, match=r"initial_items\[0\]"):
        new_session(model="m", now_ms=NOW_MS, records=[items_record(outputs("z"), revision=0)])
    with pytest.raises(SettingError):
        new_session(model="m", now_ms=NOW_MS, settings=SessionSettings(on_conflict="x"))


def test_pending_turn_names_the_revision_it_builds_on(session: Session) -> None:
    turn: PendingTurn = pending(committed(session))
    assert turn.base_revision == 1
