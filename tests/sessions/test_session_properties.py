# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a family of sessions, each one's history is exactly what it was told.

A plain model (lists of ids and items) is driven beside the sessions, their logs kept as a store
would keep them: records by log, read through the spans of the session.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sessions import history
from sessions.items import FunctionCall, FunctionCallOutput, Item, parse_items
from sessions.session import Session, items_record
from sessions.token_codec import decode_ids, encode_ids
from sessions.turn_log import COMPACTION, PendingTurn, Record, TurnLog
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending


@dataclass
class Model:
    """What one session must look like."""

    session: Session
    ids: list[int]
    items: list[Item]
    revision: int
    turn: PendingTurn | None = None
    # After each commit: how many ids and items there were, and the id of the record.
    marks: list[tuple[int, int, str]] = field(default_factory=list)

    def open_calls(self) -> list[str]:
        answered = [i.call_id for i in self.items if isinstance(i, FunctionCallOutput)]
        calls = [i.call_id for i in self.items if isinstance(i, FunctionCall)]
        return [call_id for call_id in calls if call_id not in answered]


class SessionFamily(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.models: list[Model] = []
        self.logs: dict[str, list[Record]] = {}
        self.num_calls = 0

    # -- a store in two lines

    def read(self, session: Session) -> TurnLog:
        spans = session.spans
        return TurnLog(tuple(r for s in spans for r in self.logs[s.log_id][s.first : s.end]))

    def append(self, session: Session, record: Record) -> None:
        log = self.logs.setdefault(session.log_id, [])
        assert len(log) == session.log_len - 1
        log.append(record)

    @initialize()
    def create(self) -> None:
        session, records = fresh_session()
        self.logs[session.log_id] = list(records)
        ids = [100, 101, 102, 103, 104]
        self.models.append(
            Model(session=session, ids=ids, items=[], revision=0, marks=[(5, 0, records[0].id)])
        )

    def pick(self, index: int) -> Model:
        return self.models[index % len(self.models)]

    @rule(index=st.integers(0, 9), num_messages=st.integers(0, 2))
    def begin(self, index: int, num_messages: int) -> None:
        model = self.pick(index)
        if model.turn is not None:
            return
        messages = parse_items([{"role": "user", "content": "x"}] * num_messages)
        items = model.session.prepare_input(messages, auto_close_calls=True)
        model.turn = pending(model.session, items)
        model.session = model.session.begin_turn(model.turn, NOW_MS)

    @rule(
        index=st.integers(0, 9),
        num_calls=st.integers(0, 2),
        ids=st.lists(st.integers(0, 200_000), max_size=5),
        status=st.sampled_from(["completed", "cancelled", "incomplete"]),
    )
    def commit(self, index: int, num_calls: int, ids: list[int], status: str) -> None:
        model = self.pick(index)
        if model.turn is None:
            return
        calls = tuple(f"call {self.num_calls + n}" for n in range(num_calls))
        self.num_calls += num_calls
        # The text item takes one id, so an answer of no ids would break its own boundaries.
        record = outcome(model.turn, call_ids=calls, token_ids=(3, *ids), status=status)
        model.session = model.session.commit_turn(record, NOW_MS)
        self.append(model.session, record)
        self.grow(model, record)
        model.turn = None

    @rule(index=st.integers(0, 9))
    def fail(self, index: int) -> None:
        model = self.pick(index)
        if model.turn is not None:
            record = outcome(model.turn, status="failed", committed=False)
            model.session = model.session.end_turn(record, NOW_MS)
            model.turn = None

    @rule(index=st.integers(0, 9), ids=st.lists(st.integers(0, 9), max_size=3))
    def append_outputs(self, index: int, ids: list[int]) -> None:
        model = self.pick(index)
        if model.turn is not None:
            return
        raw = [
            {"type": "function_call_output", "call_id": call_id, "output": "o"}
            for call_id in model.open_calls()[:1]
        ]
        record = items_record(
            parse_items(raw or "more"), revision=model.revision + 1, token_ids=encode_ids(ids)
        )
        model.session = model.session.append_items(record, NOW_MS)
        self.append(model.session, record)
        self.grow(model, record)

    @precondition(lambda self: len(self.models) < 8)
    @rule(index=st.integers(0, 9), mark=st.integers(0, 50), n=st.integers(1, 2))
    def fork(self, index: int, mark: int, n: int) -> None:
        model = self.pick(index)
        num_ids, num_items, record_id = model.marks[mark % len(model.marks)]
        log = self.read(model.session)
        for child, own in history.fork(model.session, log, record_id, NOW_MS, n=n):
            assert own == ()
            self.logs[child.log_id] = []
            self.models.append(
                Model(
                    session=child,
                    ids=model.ids[:num_ids],
                    items=model.items[:num_items],
                    revision=child.revision,
                    marks=model.marks[: mark % len(model.marks) + 1],
                )
            )

    @rule(index=st.integers(0, 9), mark=st.integers(0, 50))
    def rollback(self, index: int, mark: int) -> None:
        model = self.pick(index)
        if model.turn is not None:
            return
        num_ids, num_items, record_id = model.marks[mark % len(model.marks)]
        log = self.read(model.session)
        model.session, own = history.rollback(model.session, log, record_id, NOW_MS)
        self.logs[model.session.log_id] = list(own)
        model.ids, model.items = model.ids[:num_ids], model.items[:num_items]
        model.marks = model.marks[: mark % len(model.marks) + 1]
        model.revision += 1

    @rule(index=st.integers(0, 9), keep=st.integers(0, 3))
    def compact(self, index: int, keep: int) -> None:
        model = self.pick(index)
        if model.turn is not None:
            return
        keep = min(keep, len(model.marks))
        items = parse_items([{"type": "compaction", "summary": "s"}])
        record = items_record(items, revision=0, token_ids=encode_ids([1, 2]), kind=COMPACTION)
        log = self.read(model.session)
        model.session, own = history.replace_history(
            model.session, log, [record], NOW_MS, keep_records=keep
        )
        self.logs[model.session.log_id] = list(own)
        num_ids, num_items, _ = model.marks[keep - 1] if keep else (0, 0, "")
        model.ids = [*model.ids[:num_ids], 1, 2]
        model.items = [*model.items[:num_items], *items]
        model.marks = [*model.marks[:keep], (len(model.ids), len(model.items), record.id)]
        model.revision += 1

    @rule(index=st.integers(0, 9))
    def suspend_and_resume(self, index: int) -> None:
        model = self.pick(index)
        if model.turn is None:
            model.session = model.session.suspend(NOW_MS).resume(NOW_MS)

    def grow(self, model: Model, record: Record) -> None:
        model.ids += decode_ids(record.input_token_ids) + decode_ids(record.output_token_ids)
        model.items += record.items
        model.revision += 1
        model.marks.append((len(model.ids), len(model.items), record.id))

    @invariant()
    def every_session_reads_back_what_it_was_told(self) -> None:
        for model in self.models:
            session, log = model.session, self.read(model.session)
            assert decode_ids(log.token_ids) == model.ids
            assert list(log.items) == model.items
            assert (session.num_tokens, session.num_items) == (len(model.ids), len(model.items))
            assert session.num_records == len(log.records)
            assert session.revision == model.revision
            assert list(session.open_call_ids) == model.open_calls()
            revisions = [record.revision for record in log.records]
            assert revisions == sorted(revisions)

    @invariant()
    def status_says_what_the_session_waits_for(self) -> None:
        for model in self.models:
            wanted = "requires_action" if model.open_calls() else "idle"
            if model.turn is not None:
                wanted = "running"
                assert model.session.current_turn == model.turn.id
            assert model.session.status == wanted


TestSessionFamily = SessionFamily.TestCase
TestSessionFamily.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_version_is_the_stores_and_no_transition_moves_it() -> None:
    session, _ = fresh_session()
    session = replace(session, version=7)
    turn = pending(session)
    running = session.begin_turn(turn, NOW_MS)
    assert running.version == running.commit_turn(outcome(turn), NOW_MS).version == 7
