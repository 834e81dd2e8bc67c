# SPDX-License-Identifier: Apache-2.0
"""The history cache answers only for the history it holds, within its bytes."""

from __future__ import annotations

from dataclasses import replace

from sessions import history
from sessions.log_cache import LogCache
from sessions.session import Session
from sessions.turn_log import Record, TurnLog
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending


def grown() -> tuple[Session, TurnLog]:
    session, records = fresh_session()
    return session, TurnLog(records)


def turned(session: Session) -> tuple[Session, Record]:
    turn = pending(session)
    record = outcome(turn)
    return session.begin_turn(turn, NOW_MS).commit_turn(record, NOW_MS), record


def test_a_commit_extends_the_cached_history() -> None:
    cache = LogCache(1 << 20)
    session, log = grown()
    cache.put(session, log)
    later, record = turned(session)
    cache.extend(later, record)
    cached = cache.get(later)
    assert cached is not None and cached.records == (*log.records, record)


def test_a_shorter_history_is_a_beginning_and_a_gap_is_not_bridged() -> None:
    cache = LogCache(1 << 20)
    session, log = grown()
    cache.put(session, log)
    one, _ = turned(session)
    two, second = turned(one)
    cache.extend(two, second)  # the first turn was committed by another process
    assert cache.get(two) == log


def test_an_older_view_is_not_answered_with_a_newer_history() -> None:
    cache = LogCache(1 << 20)
    session, log = grown()
    later, record = turned(session)
    cache.put(later, log.extended(record))
    assert cache.get(session) is None
    assert cache.get(later) is not None


def test_a_rolled_back_session_finds_nothing() -> None:
    cache = LogCache(1 << 20)
    session, log = grown()
    later, record = turned(session)
    full = log.extended(record)
    cache.put(later, full)
    back, _ = history.rollback(later, full, 0, NOW_MS)
    assert cache.get(back) is None
    assert cache.num_bytes == 0


def test_the_least_recently_used_history_goes_first() -> None:
    weighed = LogCache(1 << 20)
    weighed.put(*grown())
    cache = LogCache(weighed.num_bytes * 5 // 2)
    logs = [grown() for _ in range(3)]
    for session, log in logs[:2]:
        cache.put(session, log)
    assert cache.get(logs[0][0]) is not None
    cache.put(*logs[2])
    assert [cache.get(session) is not None for session, _ in logs] == [True, False, True]
    assert cache.num_bytes == 2 * weighed.num_bytes


def test_a_history_larger_than_the_cache_is_not_kept() -> None:
    session, log = grown()
    cache = LogCache(4 * log.num_tokens)
    cache.put(session, log)
    assert cache.get(session) is None
    assert LogCache(0).get(replace(session, id="sess_other")) is None
