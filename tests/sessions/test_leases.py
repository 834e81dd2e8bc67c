# SPDX-License-Identifier: Apache-2.0
"""Leases end at their own deadline, move with use, and never outgrow the history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sessions import history
from sessions.errors import LeaseNotFound, SessionExpired
from sessions.lease_policy import LeaseBudget, grant_lease
from sessions.leases import Lease, leased_tokens, new_lease
from sessions.session import Session
from sessions.turn_log import TurnLog
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending


def lease_for(num_tokens: int, *, ttl_ms: int = 1_000, renew_on_use: bool = True) -> Lease:
    grant = grant_lease("l1", num_tokens, LeaseBudget(pool_tokens=1_000))
    return new_lease(
        grant, tier="l1", upto="head", ttl_ms=ttl_ms, now_ms=NOW_MS, renew_on_use=renew_on_use
    )


def turned(session: Session, log: TurnLog, now_ms: int) -> tuple[Session, TurnLog]:
    turn = pending(session)
    record = outcome(turn)
    return session.begin_turn(turn, now_ms).commit_turn(record, now_ms), log.extended(record)


def grown() -> tuple[Session, TurnLog]:
    session, records = fresh_session()
    return turned(session, TurnLog(records), NOW_MS)


def test_a_lease_says_what_was_granted_and_until_when() -> None:
    lease = lease_for(700)
    assert (lease.state, lease.tokens_requested, lease.tokens_granted) == ("clipped", 700, 448)
    assert (lease.expires_at_ms, lease.reason) == (NOW_MS + 1_000, "budget_exceeded")
    assert lease.id.startswith("lease_")


def test_use_moves_the_deadline_of_leases_that_renew() -> None:
    session, log = grown()
    moving, fixed = lease_for(5), lease_for(5, renew_on_use=False)
    session = session.add_lease(moving, NOW_MS).add_lease(fixed, NOW_MS)
    session, _ = turned(session, log, NOW_MS + 600)
    assert [lease.expires_at_ms - NOW_MS for lease in session.leases] == [1_600, 1_000]
    session, _ = turned(session, log, NOW_MS + 1_500)
    assert [lease.id for lease in session.leases] == [moving.id]
    session, _ = turned(session, log, NOW_MS + 9_000)
    assert session.leases == ()


def test_the_longest_live_lease_of_a_tier_counts() -> None:
    leases = (
        lease_for(100),
        lease_for(300),
        replace(lease_for(400), tier="l2"),
        lease_for(440, ttl_ms=10),
    )
    assert leased_tokens(leases, "l1", NOW_MS + 5) == 440
    assert leased_tokens(leases, "l1", NOW_MS + 10) == 300
    assert leased_tokens(leases, "l2", NOW_MS + 10) == 400
    assert leased_tokens(leases, "l3", NOW_MS) == 0


def test_released_leases_are_gone_once() -> None:
    session, _ = grown()
    lease = lease_for(5)
    held = session.add_lease(lease, NOW_MS)
    assert held.release_lease(lease.id).leases == ()
    with pytest.raises(LeaseNotFound) as caught:
        session.release_lease(lease.id)
    assert caught.value.code == "lease_not_found"


def test_expired_sessions_take_no_lease() -> None:
    session, _ = grown()
    with pytest.raises(SessionExpired):
        session.expire(NOW_MS, retention_ms=1).add_lease(lease_for(5), NOW_MS)


def test_rollback_clips_leases_and_forks_have_none() -> None:
    session, log = grown()
    session, log = turned(session, log, NOW_MS)
    session = session.add_lease(lease_for(20), NOW_MS).add_lease(lease_for(4), NOW_MS)
    back, _ = history.rollback(session, log, log.records[1].id, NOW_MS)
    assert back.num_tokens == 13
    assert [(lease.state, lease.tokens_granted) for lease in back.leases] == [
        ("clipped", 13),
        ("granted", 4),
    ]
    ((child, _),) = history.fork(session, log, "head", NOW_MS)
    assert child.leases == ()


def test_tokens_until_a_point_are_what_a_lease_up_to_it_asks_for() -> None:
    _, log = grown()
    record = log.records[1]
    assert log.num_tokens_until("head") == log.num_tokens == 13
    assert log.num_tokens_until(record.input_items[0].id) == 5 + 3
    assert log.num_tokens_until(0) == 5
