# SPDX-License-Identifier: Apache-2.0
"""What every session store must do. Subclass `SessionStoreContract` with a `harness` fixture."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from sessions import history
from sessions.errors import (
    IdempotencyKeyReused,
    SessionExists,
    SessionNotFound,
    SettingError,
    TurnNotFound,
    VersionConflict,
)
from sessions.items import parse_items
from sessions.lease_policy import LeaseBudget, grant_lease
from sessions.leases import new_lease
from sessions.session import Session, items_record
from sessions.store import ListQuery, SessionStore, TenantQuota, TurnClaim
from sessions.token_codec import decode_ids, encode_ids
from sessions.turn_log import COMPACTION, PendingTurn
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn

T = TypeVar("T")
DAY_MS = 86_400_000


class StoreHarness:
    """One store under test and its event loop; `another` is a second process's view of it."""

    def __init__(self, make_store: Callable[[], SessionStore]) -> None:
        self._make_store = make_store
        self._runner = asyncio.Runner()
        self._opened: list[SessionStore] = []
        self.store = self.another()

    def run(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await work

        return self._runner.run(wrapped())

    def another(self) -> SessionStore:
        """A further store on the same data, with caches of its own."""
        store = self._make_store()
        self.run(store.open())
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            self.run(store.close())
        self._runner.close()


class SessionStoreContract:
    """The promises of `sessions.store`, one test each."""

    @pytest.fixture
    def store(self, harness: StoreHarness) -> SessionStore:
        return harness.store

    @pytest.fixture
    def session(self, harness: StoreHarness) -> Iterator[Session]:
        session, records = fresh_session(metadata={"repo": "moorage"})
        yield harness.run(harness.store.create(session, records))

    # -- sessions

    def test_created_session_reads_back_equal_in_another_process(
        self, harness: StoreHarness, session: Session
    ) -> None:
        assert session.version == 1
        assert harness.run(harness.another().get(session.id)) == session

    def test_creating_an_id_twice_is_refused(self, harness: StoreHarness, session: Session) -> None:
        _, records = fresh_session()
        with pytest.raises(SessionExists):
            harness.run(harness.store.create(session, records))

    def test_unknown_session_is_not_found(self, harness: StoreHarness) -> None:
        with pytest.raises(SessionNotFound) as caught:
            harness.run(harness.store.get("sess_none"))
        assert caught.value.code == "session_not_found"

    def test_session_of_another_tenant_is_not_found(
        self, harness: StoreHarness, session: Session
    ) -> None:
        with pytest.raises(SessionNotFound):
            harness.run(harness.store.get(session.id, tenant="other"))
        assert harness.run(harness.store.get(session.id, tenant="default")).id == session.id

    def test_update_stores_fields_and_settings(
        self, harness: StoreHarness, session: Session
    ) -> None:
        tools = ({"type": "function", "name": "b", "parameters": {"z": 1, "a": 2}},)
        changed = session.update(
            NOW_MS + 5, settings={"tools": tools, "priority": 3}, metadata={"branch": "main"}
        )
        stored = harness.run(harness.store.update(changed))
        assert stored == replace(changed, version=2)
        read = harness.run(harness.another().get(session.id))
        assert read == stored
        assert list(read.settings.tools[0]["parameters"]) == ["z", "a"]

    def test_leases_are_stored_with_the_session(
        self, harness: StoreHarness, session: Session
    ) -> None:
        grant = grant_lease("l2", 100, LeaseBudget(pool_tokens=10_000))
        lease = new_lease(grant, tier="l2", upto="head", ttl_ms=60_000, now_ms=NOW_MS)
        held = harness.run(harness.store.update(session.add_lease(lease, NOW_MS)))
        assert harness.run(harness.another().get(session.id)).leases == held.leases == (lease,)

    def test_update_of_an_old_version_is_refused_and_changes_nothing(
        self, harness: StoreHarness, session: Session
    ) -> None:
        newer = harness.run(harness.store.update(session.update(NOW_MS, metadata={"a": "1"})))
        with pytest.raises(VersionConflict) as caught:
            harness.run(harness.store.update(session.update(NOW_MS, metadata={"a": "2"})))
        assert (caught.value.expected, caught.value.actual) == (1, 2)
        assert harness.run(harness.store.get(session.id)) == newer

    def test_of_concurrent_updates_of_one_version_exactly_one_wins(
        self, harness: StoreHarness, session: Session
    ) -> None:
        second = harness.another()

        async def race() -> list[Session | BaseException]:
            changes = [session.update(NOW_MS, metadata={"n": str(n)}) for n in range(20)]
            stores = [harness.store, second] * 10
            writes = [s.update(c) for s, c in zip(stores, changes, strict=True)]
            return await asyncio.gather(*writes, return_exceptions=True)

        results = harness.run(race())
        winners = [r for r in results if isinstance(r, Session)]
        assert len(winners) == 1
        assert sum(isinstance(r, VersionConflict) for r in results) == 19
        assert harness.run(second.get(session.id)) == winners[0]

    def test_update_of_a_deleted_session_is_not_found(
        self, harness: StoreHarness, session: Session
    ) -> None:
        assert harness.run(harness.store.delete(session.id)) is True
        with pytest.raises(SessionNotFound):
            harness.run(harness.store.update(session.update(NOW_MS)))

    def test_delete_is_idempotent_and_takes_the_transcript(
        self, harness: StoreHarness, session: Session
    ) -> None:
        session, _ = harness.run(run_turn(harness.store, session))
        assert harness.run(harness.store.delete(session.id)) is True
        assert harness.run(harness.store.delete(session.id)) is False
        with pytest.raises(SessionNotFound):
            harness.run(harness.store.get(session.id))
        with pytest.raises(SessionNotFound):
            harness.run(harness.another().read_log(session))
        assert harness.run(harness.store.find_key(session.id, "k", "h")) is None

    def test_delete_with_an_old_version_is_refused(
        self, harness: StoreHarness, session: Session
    ) -> None:
        harness.run(harness.store.update(session.update(NOW_MS)))
        with pytest.raises(VersionConflict):
            harness.run(harness.store.delete(session.id, version=session.version))
        assert harness.run(harness.store.delete(session.id, version=2)) is True

    # -- listing

    def test_list_pages_newest_first_without_gaps(self, harness: StoreHarness) -> None:
        made = [self._make(harness).id for _ in range(7)]
        seen: list[str] = []
        after = None
        for _ in range(3):
            page = harness.run(harness.store.list_sessions(ListQuery(after=after, limit=3)))
            seen += [s.id for s in page.sessions]
            assert page.has_more is (len(seen) < 7)
            after = seen[-1]
        assert seen == sorted(made, reverse=True)
        oldest = harness.run(harness.store.list_sessions(ListQuery(limit=2, ascending=True)))
        assert [s.id for s in oldest.sessions] == made[:2]

    def test_list_filters_by_tenant_status_parent_and_metadata(self, harness: StoreHarness) -> None:
        red = self._make(harness, metadata={"colour": "red", "size": "1"})
        self._make(harness, metadata={"colour": "blue", "size": "1"})
        foreign = self._make(harness, tenant="other", metadata={"colour": "red", "size": "1"})
        child = self._make(harness, parent_session_id=red.id)
        waiting, _ = harness.run(run_turn(harness.store, child, call_ids=("call_1",)))
        for query, wanted in (
            (ListQuery(metadata={"colour": "red"}), {red.id, foreign.id}),
            (ListQuery(tenant="default", metadata={"colour": "red", "size": "1"}), {red.id}),
            (ListQuery(metadata={"colour": "red", "size": "2"}), set()),
            (ListQuery(tenant="other"), {foreign.id}),
            (ListQuery(parent_session_id=red.id), {child.id}),
            (ListQuery(status="requires_action"), {waiting.id}),
        ):
            page = harness.run(harness.store.list_sessions(query))
            assert {s.id for s in page.sessions} == wanted, query
            assert page.has_more is False

    def test_list_fills_a_page_across_sessions_that_do_not_match(
        self, harness: StoreHarness
    ) -> None:
        wanted = []
        for n in range(12):
            made = self._make(harness, metadata={"odd": str(n % 2)})
            if n % 2:
                wanted.append(made.id)
        query = ListQuery(metadata={"odd": "1"}, limit=4)
        first = harness.run(harness.store.list_sessions(query))
        assert [s.id for s in first.sessions] == wanted[::-1][:4]
        assert first.has_more is True
        rest = harness.run(harness.store.list_sessions(replace(query, after=first.sessions[-1].id)))
        assert [s.id for s in rest.sessions] == wanted[::-1][4:]
        assert rest.has_more is False

    @pytest.mark.parametrize(
        ("query", "param"),
        [(ListQuery(limit=0), "limit"), (ListQuery(limit=1001), "limit")]
        + [(ListQuery(status="asleep"), "status")],
    )
    def test_list_refuses_values_out_of_range(
        self, harness: StoreHarness, query: ListQuery, param: str
    ) -> None:
        with pytest.raises(SettingError) as caught:
            harness.run(harness.store.list_sessions(query))
        assert caught.value.param == param

    # -- turns

    def test_committed_turn_is_history_in_another_process(
        self, harness: StoreHarness, session: Session
    ) -> None:
        after, record = harness.run(run_turn(harness.store, session, token_ids=(70_001, 1, 2)))
        assert (after.revision, after.status, after.current_turn) == (1, "idle", None)
        other = harness.another()
        assert harness.run(other.get(session.id)) == after
        log = harness.run(other.read_log(after))
        assert log.records[-1] == record
        expected = [100, 101, 102, 103, 104, *range(10_000, 10_005), 70_001, 1, 2]
        assert decode_ids(log.token_ids) == expected
        assert harness.run(other.read_tokens(after)) == log.token_ids
        assert after.num_tokens == len(expected)
        assert harness.run(other.read_turn(after, record.id)) == record

    def test_pending_turn_is_readable_but_not_history(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session)
        assert claim.created and claim.session.status == "running"
        other = harness.another()
        assert harness.run(other.pending_turns()) == (turn,)
        running = harness.run(other.get(session.id))
        assert running.current_turn == turn.id
        assert harness.run(other.read_turn(running, turn.id)) == turn
        assert harness.run(other.read_log(running)).num_tokens == session.num_tokens

    def test_pending_turns_are_told_apart_by_owner(self, harness: StoreHarness) -> None:
        turns = []
        for owner in ("east", "west"):
            session = self._make(harness)
            turn = replace(pending(session), owner=owner)
            harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
            turns.append(turn)
        store = harness.another()
        assert harness.run(store.pending_turns()) == tuple(turns)
        assert harness.run(store.pending_turns(owner="west")) == (turns[1],)
        assert harness.run(store.pending_turns(owner="")) == ()

    def test_ended_turn_is_readable_but_not_history(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session, key="k")
        record = outcome(turn, status="failed", committed=False)
        ended = harness.run(harness.store.end_turn(claim.session.end_turn(record, NOW_MS), record))
        assert (ended.revision, ended.status, ended.current_turn) == (0, "idle", None)
        other = harness.another()
        assert harness.run(other.pending_turns()) == ()
        assert harness.run(other.read_turn(ended, turn.id)) == record
        assert harness.run(other.read_log(ended)).num_tokens == session.num_tokens
        match = harness.run(other.find_key(session.id, "k", "h"))
        assert match is not None and match.turn_id == turn.id

    def test_unknown_turn_is_not_found(self, harness: StoreHarness, session: Session) -> None:
        with pytest.raises(TurnNotFound):
            harness.run(harness.store.read_turn(session, "turn_none"))

    def test_committing_a_turn_again_changes_nothing(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session)
        record = outcome(turn)
        committed = claim.session.commit_turn(record, NOW_MS)
        first = harness.run(harness.store.commit_turn(committed, record))
        assert harness.run(harness.store.commit_turn(committed, record)) == first
        assert harness.run(harness.another().commit_turn(committed, record)) == first
        assert len(harness.run(harness.another().read_log(first)).records) == 2

    def test_ending_or_beginning_a_turn_again_changes_nothing(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn = pending(session, key="k")
        running = session.begin_turn(turn, NOW_MS)
        first = harness.run(harness.store.begin_turn(running, turn))
        assert harness.run(harness.store.begin_turn(running, turn)) == first
        record = outcome(turn, status="failed", committed=False)
        ended = first.session.end_turn(record, NOW_MS)
        stored = harness.run(harness.store.end_turn(ended, record))
        assert harness.run(harness.store.end_turn(ended, record)) == stored

    def test_commit_from_an_old_version_is_refused_and_appends_nothing(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session)
        record = outcome(turn)
        running = harness.run(harness.store.update(claim.session.update(NOW_MS)))
        with pytest.raises(VersionConflict):
            harness.run(
                harness.store.commit_turn(claim.session.commit_turn(record, NOW_MS), record)
            )
        log = harness.run(harness.another().read_log(running))
        assert log.num_tokens == session.num_tokens
        assert harness.run(harness.store.pending_turns()) == (turn,)

    def test_fifty_concurrent_submits_of_one_key_start_one_turn(
        self, harness: StoreHarness, session: Session
    ) -> None:
        stores = [harness.store, harness.another()]

        async def submit(n: int) -> TurnClaim:
            turn = pending(session, key="same")
            return await stores[n % 2].begin_turn(session.begin_turn(turn, NOW_MS), turn)

        async def submit_all() -> list[TurnClaim]:
            return await asyncio.gather(*(submit(n) for n in range(50)))

        claims = harness.run(submit_all())
        assert sum(claim.created for claim in claims) == 1
        assert len({claim.turn_id for claim in claims}) == 1
        assert len(harness.run(stores[1].pending_turns())) == 1

    def test_of_concurrent_turns_with_different_keys_one_begins(
        self, harness: StoreHarness, session: Session
    ) -> None:
        async def submit(n: int) -> TurnClaim:
            turn = pending(session, key=f"key {n}")
            return await harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn)

        async def submit_all() -> list[TurnClaim | BaseException]:
            return await asyncio.gather(*(submit(n) for n in range(20)), return_exceptions=True)

        results = harness.run(submit_all())
        assert sum(isinstance(result, TurnClaim) for result in results) == 1
        assert sum(isinstance(result, VersionConflict) for result in results) == 19

    # -- idempotency keys

    def test_key_with_another_body_is_refused(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, _ = self._begin(harness, session, key="k")
        second = pending(session, key="k", body_hash="other")
        with pytest.raises(IdempotencyKeyReused) as caught:
            harness.run(harness.store.begin_turn(session.begin_turn(second, NOW_MS), second))
        assert caught.value.turn_id == turn.id
        match = harness.run(harness.store.find_key(session.id, "k", "other"))
        assert match is not None and not match.same_body
        same = harness.run(harness.store.find_key(session.id, "k", "h"))
        assert same is not None and same.same_body

    def test_key_is_scoped_to_its_session(self, harness: StoreHarness, session: Session) -> None:
        self._begin(harness, session, key="k")
        other = self._make(harness)
        assert harness.run(harness.store.find_key(other.id, "k", "h")) is None
        _, claim = self._begin(harness, other, key="k")
        assert claim.created

    def test_keys_are_forgotten_after_their_retention_unless_the_turn_runs(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session, key="k")
        late = NOW_MS + 3 * DAY_MS
        assert harness.run(harness.store.forget_keys(late)) == 0
        record = outcome(turn)
        done = harness.run(
            harness.store.commit_turn(claim.session.commit_turn(record, NOW_MS), record)
        )
        assert harness.run(harness.store.forget_keys(NOW_MS + DAY_MS)) == 0
        assert harness.run(harness.store.find_key(done.id, "k", "h")) is not None
        assert harness.run(harness.store.forget_keys(late)) == 1
        assert harness.run(harness.store.find_key(done.id, "k", "h")) is None

    def test_many_keys_are_forgotten_at_once(self, harness: StoreHarness, session: Session) -> None:
        async def fill() -> None:
            current = session
            for number in range(120):
                turn = pending(current, key=f"key {number}")
                claim = await harness.store.begin_turn(current.begin_turn(turn, NOW_MS), turn)
                record = outcome(turn)
                done = claim.session.commit_turn(record, NOW_MS)
                current = await harness.store.commit_turn(done, record)

        harness.run(fill())
        assert harness.run(harness.store.forget_keys(NOW_MS + 3 * DAY_MS)) == 120
        assert harness.run(harness.store.forget_keys(NOW_MS + 3 * DAY_MS)) == 0
        for number in (0, 99, 100, 119):
            assert harness.run(harness.store.find_key(session.id, f"key {number}", "h")) is None

    # -- turns that wait, owners

    def test_a_turn_that_waits_outlives_its_process_and_begins_once(
        self, harness: StoreHarness, session: Session
    ) -> None:
        waiting = replace(pending(session, key="k"), owner="a", ask={"input": "hello"})
        assert harness.run(harness.store.queue_turn(waiting)) == waiting.id
        assert harness.run(harness.store.queue_turn(waiting)) == waiting.id
        other = harness.another()
        assert harness.run(other.queued_turns()) == (waiting,)
        assert harness.run(other.queued_turns(session_id=session.id, owner="a")) == (waiting,)
        assert harness.run(other.queued_turns(owner="b")) == ()
        assert harness.run(other.read_turn(session, waiting.id)) == waiting
        assert harness.run(other.pending_turns()) == ()
        begun = replace(waiting, ask=None)
        claim = harness.run(other.begin_turn(session.begin_turn(begun, NOW_MS), begun))
        assert claim.created and claim.turn_id == waiting.id
        assert harness.run(harness.store.queued_turns()) == ()
        assert harness.run(harness.store.pending_turns()) == (begun,)
        again = harness.run(other.begin_turn(session.begin_turn(begun, NOW_MS), begun))
        assert again.created and again.session == claim.session

    def test_turns_wait_in_the_order_they_came(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turns = [pending(session) for _ in range(4)]
        for turn in reversed(turns):
            harness.run(harness.store.queue_turn(turn))
        assert harness.run(harness.store.queued_turns(session_id=session.id)) == tuple(turns)

    def test_the_key_of_a_turn_that_waits_is_taken(
        self, harness: StoreHarness, session: Session
    ) -> None:
        first = pending(session, key="k")
        harness.run(harness.store.queue_turn(first))
        assert harness.run(harness.store.queue_turn(pending(session, key="k"))) == first.id
        other = pending(session, key="k")
        claim = harness.run(harness.store.begin_turn(session.begin_turn(other, NOW_MS), other))
        assert (claim.created, claim.turn_id) == (False, first.id)
        with pytest.raises(IdempotencyKeyReused):
            harness.run(harness.store.queue_turn(pending(session, key="k", body_hash="other")))
        assert harness.run(harness.store.forget_keys(NOW_MS + 9 * DAY_MS)) == 0

    def test_a_turn_that_ended_while_it_waited_is_readable_and_waits_no_more(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn = pending(session)
        harness.run(harness.store.queue_turn(turn))
        record = outcome(turn, status="cancelled", committed=False)
        assert harness.run(harness.store.end_queued(session.id, record))
        assert not harness.run(harness.store.end_queued(session.id, record))
        assert harness.run(harness.store.queued_turns()) == ()
        assert harness.run(harness.another().read_turn(session, turn.id)) == record
        assert harness.run(harness.store.get(session.id)) == session

    def test_a_deleted_session_takes_what_waits_along(
        self, harness: StoreHarness, session: Session
    ) -> None:
        harness.run(harness.store.queue_turn(pending(session)))
        harness.run(harness.store.delete(session.id))
        assert harness.run(harness.store.queued_turns()) == ()
        with pytest.raises(SessionNotFound):
            harness.run(harness.store.queue_turn(pending(session)))

    def test_of_many_that_claim_a_turn_one_gets_it(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn = replace(pending(session), owner="dead")
        harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
        waiting = replace(pending(session), owner="dead", ask={})
        harness.run(harness.store.queue_turn(waiting))
        other = harness.another()

        async def claim_all(claimed: PendingTurn) -> list[bool]:
            stores = (harness.store, other)
            claims = (stores[n % 2].claim_turn(claimed, f"p{n}") for n in range(6))
            return list(await asyncio.gather(*claims))

        for claimed in (turn, waiting):
            won = harness.run(claim_all(claimed))
            assert won.count(True) == 1
            owner = f"p{won.index(True)}"
            stored = harness.run(other.read_turn(session, claimed.id))
            assert stored == replace(claimed, owner=owner)
        assert not harness.run(other.claim_turn(pending(session), "x"))

    def test_all_who_share_a_store_read_one_clock(self, harness: StoreHarness) -> None:
        before_ms = time.time_ns() // 1_000_000
        first = harness.run(harness.store.clock_ms())
        second = harness.run(harness.another().clock_ms())
        assert before_ms <= first <= second <= time.time_ns() // 1_000_000

    def test_owners_are_alive_until_they_said(self, harness: StoreHarness) -> None:
        store = harness.store
        harness.run(store.beat("a", NOW_MS + 10))
        harness.run(store.beat("b", NOW_MS + 20))
        harness.run(store.beat("a", NOW_MS + 15))
        assert harness.run(harness.another().live_owners(NOW_MS + 12)) == {"a", "b"}
        assert harness.run(store.live_owners(NOW_MS + 16)) == {"b"}
        assert harness.run(store.live_owners(NOW_MS + 21)) == frozenset()

    def test_word_that_a_turn_is_to_stop_reaches_other_processes_until_it_has(
        self, harness: StoreHarness
    ) -> None:
        store, other = harness.store, harness.another()
        assert harness.run(other.asked_cancels()) == frozenset()
        for turn_id in ("turn_a", "turn_b", "turn_a"):
            harness.run(store.ask_cancel(turn_id, NOW_MS))
        assert harness.run(other.asked_cancels()) == {"turn_a", "turn_b"}
        harness.run(other.forget_cancels(["turn_a", "turn_none"]))
        harness.run(other.forget_cancels([]))
        assert harness.run(store.asked_cancels()) == {"turn_b"}
        # Nobody runs it any more: it goes with the keys of its time.
        harness.run(store.forget_keys(NOW_MS + DAY_MS // 2))
        assert harness.run(store.asked_cancels()) == {"turn_b"}
        harness.run(store.forget_keys(NOW_MS + 10 * DAY_MS))
        assert harness.run(store.asked_cancels()) == frozenset()

    def test_turns_that_never_became_history_go_with_their_keys(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session, key="k")
        record = outcome(turn, status="failed", committed=False)
        ended = harness.run(harness.store.end_turn(claim.session.end_turn(record, NOW_MS), record))
        assert harness.run(harness.store.forget_keys(NOW_MS + DAY_MS)) == 0
        assert harness.run(harness.store.read_turn(ended, turn.id)) == record
        assert harness.run(harness.store.forget_keys(NOW_MS + 3 * DAY_MS)) == 1
        with pytest.raises(TurnNotFound):
            harness.run(harness.store.read_turn(ended, turn.id))

    # -- items

    def test_appended_items_are_history_once(self, harness: StoreHarness, session: Session) -> None:
        items = parse_items([{"role": "user", "content": "read this"}])
        record = items_record(items, revision=1, token_ids=encode_ids([4, 5]))
        appended = session.append_items(record, NOW_MS)
        first = harness.run(harness.store.append_record(appended, record))
        assert harness.run(harness.store.append_record(appended, record)) == first
        log = harness.run(harness.another().read_log(first))
        assert log.items == items
        assert decode_ids(log.token_ids)[-2:] == [4, 5]

    def test_items_of_every_kind_round_trip_exactly(
        self, harness: StoreHarness, session: Session
    ) -> None:
        raw: list[dict[str, Any]] = [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm \u2603"}]},
            {"type": "message", "role": "assistant", "content": "a\x00b\r\n\U0001f600"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{ "b":1,"a" : 2}'},
            {"type": "function_call_output", "call_id": "c", "output": "", "status": "failed"},
            {"type": "compaction", "summary": "before", "num_replaced": 3},
        ]
        items = parse_items(raw)
        record = items_record(items, revision=1)
        stored = harness.run(
            harness.store.append_record(session.append_items(record, NOW_MS), record)
        )
        assert harness.run(harness.another().read_log(stored)).items == items

    # -- forks, rollback, compaction

    def test_forked_children_share_history_and_go_their_own_ways(
        self, harness: StoreHarness, session: Session
    ) -> None:
        session, first = harness.run(run_turn(harness.store, session))
        session, _ = harness.run(run_turn(harness.store, session))
        log = harness.run(harness.store.read_log(session))
        left, right = harness.run(
            harness.store.create_many(history.fork(session, log, first.id, NOW_MS, n=2))
        )
        left, _ = harness.run(run_turn(harness.store, left, token_ids=(1,)))
        right, _ = harness.run(run_turn(harness.store, right, token_ids=(2,)))
        other = harness.another()
        shared = log.token_ids[: 4 * (5 + 8)]
        for child, own in ((left, 1), (right, 2)):
            tokens = harness.run(other.read_tokens(child))
            assert tokens.startswith(shared)
            assert decode_ids(tokens[len(shared) :]) == [*range(10_000, 10_005), own]
            assert child.num_tokens == len(tokens) // 4
        assert harness.run(other.read_tokens(session)) == log.token_ids

    def test_children_and_grandchildren_outlive_their_parents(
        self, harness: StoreHarness, session: Session
    ) -> None:
        session, _ = harness.run(run_turn(harness.store, session))
        child = self._fork(harness, session)
        child, _ = harness.run(run_turn(harness.store, child, token_ids=(1, 2)))
        grandchild = self._fork(harness, child)
        tokens = harness.run(harness.store.read_tokens(grandchild))
        for gone in (session, child):
            harness.run(harness.store.delete(gone.id))
        other = harness.another()
        assert harness.run(other.read_tokens(grandchild)) == tokens
        grandchild, _ = harness.run(run_turn(other, grandchild))
        assert harness.run(harness.store.read_tokens(grandchild)).startswith(tokens)

    def test_fork_of_a_parent_deleted_meanwhile_is_not_found(
        self, harness: StoreHarness, session: Session
    ) -> None:
        children = history.fork(
            session, harness.run(harness.store.read_log(session)), "head", NOW_MS, n=2
        )
        harness.run(harness.store.delete(session.id))
        with pytest.raises(SessionNotFound):
            harness.run(harness.store.create_many(children))
        for child, _ in children:
            with pytest.raises(SessionNotFound):
                harness.run(harness.store.get(child.id))

    def test_fork_inside_a_turn_cuts_at_the_item(
        self, harness: StoreHarness, session: Session
    ) -> None:
        session, record = harness.run(run_turn(harness.store, session))
        log = harness.run(harness.store.read_log(session))
        forks = history.fork(session, log, record.input_items[0].id, NOW_MS)
        (child,) = harness.run(harness.store.create_many(forks))
        read = harness.run(harness.another().read_log(child))
        assert read.items == record.input_items
        assert decode_ids(read.token_ids) == [100, 101, 102, 103, 104, 10_000, 10_001, 10_002]

    def test_rollback_keeps_what_forks_share_and_drops_the_rest(
        self, harness: StoreHarness, session: Session
    ) -> None:
        session, first = harness.run(run_turn(harness.store, session))
        session, second = harness.run(run_turn(harness.store, session, token_ids=(5,)))
        session, third = harness.run(run_turn(harness.store, session, token_ids=(6,)))
        full = harness.run(harness.store.read_log(session))
        branch = self._fork(harness, session, at=second.id)
        back, own = history.rollback(session, full, first.id, NOW_MS)
        back = harness.run(harness.store.replace_history(back, own))
        assert back.revision == 4
        back, _ = harness.run(run_turn(harness.store, back, token_ids=(9, 9)))
        other = harness.another()
        tokens = decode_ids(harness.run(other.read_tokens(back)))
        assert tokens[:13] == decode_ids(full.token_ids)[:13]
        assert tokens[13:] == [*range(10_000, 10_005), 9, 9]
        assert harness.run(other.read_log(branch)).records == full.records[:3]
        with pytest.raises(TurnNotFound):
            harness.run(other.read_turn(back, third.id))
        with pytest.raises(VersionConflict):
            harness.run(other.read_log(session))

    def test_compaction_puts_a_new_history_in_place_of_the_old(
        self, harness: StoreHarness, session: Session
    ) -> None:
        for _ in range(3):
            session, _ = harness.run(run_turn(harness.store, session))
        log = harness.run(harness.store.read_log(session))
        summary = items_record(
            parse_items([{"type": "compaction", "summary": "did three", "num_replaced": 6}]),
            revision=0,
            token_ids=encode_ids([1, 2, 3]),
            kind=COMPACTION,
        )
        swapped, own = history.replace_history(session, log, [summary], NOW_MS, keep_records=1)
        stored = harness.run(harness.store.replace_history(swapped, own))
        read = harness.run(harness.another().read_log(stored))
        assert decode_ids(read.token_ids) == [100, 101, 102, 103, 104, 1, 2, 3]
        assert read.items == summary.items
        assert stored.revision == 4 and stored.num_tokens == 8

    # -- expiry, usage, health

    def test_due_sessions_come_longest_overdue_first(self, harness: StoreHarness) -> None:
        made = [self._make(harness) for _ in range(3)]
        for session, delta in zip(made, (30, 10, 20), strict=True):
            harness.run(harness.store.update(replace(session, expires_at_ms=NOW_MS + delta)))
        due = harness.run(harness.store.due(NOW_MS + 25, 10))
        assert [s.id for s in due] == [made[1].id, made[2].id]
        assert [s.id for s in harness.run(harness.store.due(NOW_MS + 25, 1))] == [made[1].id]

    def test_session_with_a_running_turn_is_not_due(
        self, harness: StoreHarness, session: Session
    ) -> None:
        turn, claim = self._begin(harness, session)
        late = session.expires_at_ms + DAY_MS
        assert harness.run(harness.store.due(late, 10)) == ()
        record = outcome(turn)
        done = claim.session.commit_turn(record, NOW_MS)
        done = harness.run(harness.store.commit_turn(done, record))
        assert harness.run(harness.store.due(late, 10)) == (done,)

    def test_tenant_usage_counts_sessions_and_tokens(
        self, harness: StoreHarness, session: Session
    ) -> None:
        session, _ = harness.run(run_turn(harness.store, session))
        other = self._make(harness)
        self._make(harness, tenant="other")
        usage = harness.run(harness.store.tenant_usage("default"))
        assert (usage.num_sessions, usage.num_tokens) == (2, session.num_tokens + 5)
        harness.run(harness.store.delete(other.id))
        assert harness.run(harness.store.tenant_usage("default")).num_sessions == 1
        assert harness.run(harness.store.tenant_usage("nobody")).num_sessions == 0

    def test_a_tenant_s_limits_are_kept_until_they_are_forgotten(
        self, harness: StoreHarness
    ) -> None:
        store = harness.store
        assert harness.run(store.get_quota("red")) is None
        quota = TenantQuota(max_sessions=5)
        harness.run(store.set_quota("red", TenantQuota(max_tokens=1)))
        harness.run(store.set_quota("red", quota))
        assert harness.run(harness.another().get_quota("red")) == quota
        assert harness.run(store.get_quota("blue")) is None
        harness.run(store.set_quota("red", None))
        assert harness.run(store.get_quota("red")) is None

    def test_health_answers_and_a_closed_store_says_so(self, harness: StoreHarness) -> None:
        assert harness.run(harness.store.health()).ok is True
        harness.run(harness.store.close())
        harness.run(harness.store.close())
        assert harness.run(harness.store.health()).ok is False

    def test_many_writers_on_many_sessions_lose_nothing(self, harness: StoreHarness) -> None:
        stores = [harness.store, harness.another()]
        made = [self._make(harness) for _ in range(8)]

        async def drive(session: Session, store: SessionStore) -> Session:
            for turn in range(6):
                session, _ = await run_turn(store, session, token_ids=(turn,))
            return session

        async def drive_all() -> list[Session]:
            work = (drive(s, stores[i % 2]) for i, s in enumerate(made))
            return await asyncio.gather(*work)

        reader = harness.another()
        for after in harness.run(drive_all()):
            log = harness.run(reader.read_log(after))
            assert [r.revision for r in log.records] == list(range(7))
            assert [decode_ids(r.output_token_ids) for r in log.records[1:]] == [
                [turn] for turn in range(6)
            ]

    def test_a_cancelled_read_never_answers_another(self, harness: StoreHarness) -> None:
        ids = [self._make(harness).id for _ in range(6)]
        chance = random.Random(3)

        async def read(session_id: str) -> None:
            for _ in range(3):
                assert (await harness.store.get(session_id)).id == session_id

        async def read_and_cancel() -> list[None | BaseException]:
            tasks = [asyncio.create_task(read(ids[n % 6])) for n in range(90)]
            for task in tasks[::2]:
                await asyncio.sleep(chance.random() / 2000)
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = harness.run(read_and_cancel())
        allowed = (type(None), asyncio.CancelledError)
        assert all(isinstance(result, allowed) for result in results), results
        assert results[1::2] == [None] * 45
        for session_id in ids:
            assert harness.run(harness.store.get(session_id)).id == session_id

    # -- helpers

    def _make(self, harness: StoreHarness, **fields: Any) -> Session:
        session, records = fresh_session(**fields)
        return harness.run(harness.store.create(session, records))

    def _begin(
        self, harness: StoreHarness, session: Session, *, key: str | None = None
    ) -> tuple[PendingTurn, TurnClaim]:
        turn = pending(session, key=key)
        claim = harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
        return turn, claim

    def _fork(self, harness: StoreHarness, session: Session, at: str = "head") -> Session:
        log = harness.run(harness.store.read_log(session))
        (child,) = harness.run(harness.store.create_many(history.fork(session, log, at, NOW_MS)))
        return child
