# SPDX-License-Identifier: Apache-2.0
"""Suspended sessions: their KV goes down and comes back, or is computed again; that is all."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

import httpx
import pytest

from sessions.token_codec import encode_ids
from sessions.ttl import Sweeper
from tests.fakes.appliance import RunningApp, says, sse_events, until

TEXT = "a question long enough to fill a page or two of the cache " * 8


def with_history(app: RunningApp) -> tuple[str, int]:
    session_id = app.session(instructions="Be brief.")
    app.turn(session_id, TEXT)
    return session_id, app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]


def resident(app: RunningApp, session_id: str) -> dict[str, int]:
    return dict(app.get(f"/v1/sessions/{session_id}/cache").json()["resident"])


def test_a_suspended_session_leaves_l1_and_l2_and_comes_back(app: RunningApp) -> None:
    session_id, num_tokens = with_history(app)
    parked = app.post(f"/v1/sessions/{session_id}/suspend").json()
    whole = num_tokens // 64 * 64
    assert (parked["status"], parked["tier"]) == ("suspended", "l3")
    assert (parked["kept_tokens"], parked["dropped_tokens"]) == (whole, num_tokens - whole)
    assert resident(app, session_id) == {"l1": 0, "l2": 0, "l3": whole}
    listed = app.get("/v1/sessions", params={"status": "suspended"}).json()["data"]
    assert session_id in [s["id"] for s in listed]
    again = app.post(f"/v1/sessions/{session_id}/suspend").json()
    assert again["status"] == "suspended"
    back = app.post(f"/v1/sessions/{session_id}/resume").json()
    assert (back["status"], back["restored_tokens"]) == ("idle", whole)
    assert back["recompute_tokens"] == num_tokens - whole
    assert resident(app, session_id)["l1"] == whole
    turn = app.turn(session_id, "and?")
    assert turn["x_cache"]["l1"] == whole


def test_a_turn_resumes_a_suspended_session_by_itself(app: RunningApp) -> None:
    session_id, num_tokens = with_history(app)
    app.post(f"/v1/sessions/{session_id}/suspend")
    turn = app.turn(session_id, "and?")
    assert turn["status"] == "completed"
    assert turn["x_cache"]["l3"] == num_tokens // 64 * 64
    assert app.get(f"/v1/sessions/{session_id}").json()["status"] == "idle"


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_a_suspend_did_not_keep_is_no_eviction(
    tmp_path: Path, is_resumed: bool, is_restarted: bool
) -> None:
    with RunningApp(tmp_path) as app:
        session_id, num_tokens = with_history(app)
        kept = app.post(f"/v1/sessions/{session_id}/suspend").json()["kept_tokens"]
        if is_restarted:
            app.engine.restart(keep_lower_tiers=True)
        if is_resumed and not is_restarted:  # else the restored rest is computed there and then
            app.post(f"/v1/sessions/{session_id}/resume")
        child = app.post(f"/v1/sessions/{session_id}/fork", {}).json()["data"][0]["id"]
        for owner in (child, session_id):
            miss = app.turn(owner, "and?")["cache"]["miss"]
            if owner == session_id and miss is None:
                continue  # the child has computed it for both
            assert (miss["reason"], miss["missed_tokens"]) == ("suspended", num_tokens - 1 - kept)
        # It has been computed since: what is missing now went otherwise.
        assert app.turn(session_id, "more")["cache"]["miss"] is None
        app.engine.drop_cache()
        assert app.turn(session_id, "more")["cache"]["miss"]["reason"] == "evicted"


def test_what_goes_of_what_a_suspend_kept_is_an_eviction(tmp_path: Path) -> None:
    with RunningApp(tmp_path) as app:
        session_id, num_tokens = with_history(app)
        app.post(f"/v1/sessions/{session_id}/suspend")
        app.engine.drop_cache()
        miss = app.turn(session_id, "and?")["cache"]["miss"]
        assert (miss["reason"], miss["missed_tokens"]) == ("evicted", num_tokens - 1)


def test_the_part_of_a_page_that_lower_tiers_do_not_keep_is_named_so(tmp_path: Path) -> None:
    with RunningApp(tmp_path) as app:
        session_id, num_tokens = with_history(app)
        tokens = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
        moved = app.services.client.move_prefix(encode_ids(tokens), "l2")
        asyncio.run_coroutine_threadsafe(moved, app.loop).result(60)
        miss = app.turn(session_id, "and?")["cache"]["miss"]
        part = num_tokens - 1 - num_tokens // 64 * 64
        assert part > 0 and (miss["reason"], miss["missed_tokens"]) == ("part_page", part)


def test_without_lower_tiers_the_kv_is_given_up_and_computed_again(app: RunningApp) -> None:
    app.engine.tier_states = {"l1": "up", "l2": "off", "l3": "off"}
    tiers = app.asgi.state.context.parking._tiers
    try:
        tiers._facts = None  # what is known of the tiers may be as old as two seconds
        session_id, num_tokens = with_history(app)
        parked = app.post(f"/v1/sessions/{session_id}/suspend").json()
        assert (parked["tier"], parked["dropped_tokens"]) == (None, num_tokens)
        back = app.post(f"/v1/sessions/{session_id}/resume").json()
        assert (back["restored_tokens"], back["recompute_tokens"]) == (0, num_tokens)
        turn = app.turn(session_id, "and?")
        miss = turn["cache"]["miss"]
        assert (miss["reason"], miss["missed_tokens"]) == ("suspended", num_tokens - 1)
    finally:
        app.engine.tier_states = {"l1": "up", "l2": "up", "l3": "up"}
        tiers._facts = None


def test_a_suspend_ends_the_leases_that_would_hold_it_up(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    path = f"/v1/sessions/{session_id}/leases"
    lease = app.post(path, {"ttl": "10m"}).json()
    app.post(f"/v1/sessions/{session_id}/suspend")
    assert app.get(path).json()["data"] == []
    assert lease["id"] not in app.engine.leases


def test_a_running_session_is_not_suspended(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    app.engine.pause()
    body = {"input": "x", "stream": True}
    with app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as reply:
        events = sse_events(reply)
        next(events)
        for verb in ("suspend", "resume"):
            with httpx.Client(base_url=app.url, timeout=30) as http:
                refused = http.post(f"/v1/sessions/{session_id}/{verb}")
            assert app.error(refused)[:2] == (409, "turn_in_progress")
        app.engine.resume()
        list(events)
    missing = app.post("/v1/sessions/sess_x/suspend")
    assert app.error(missing)[:2] == (404, "session_not_found")


def test_a_deleted_session_is_gone_from_every_tier(app: RunningApp) -> None:
    session_id, num_tokens = with_history(app)
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    app.post(f"/v1/sessions/{session_id}/suspend")
    assert app.engine._hit(ids, "", len(ids)).l3 > 0
    app.http.delete(f"/v1/sessions/{session_id}")
    hit = app.engine._hit(ids, "", len(ids))
    assert hit.l1 + hit.l2 + hit.l3 < 64


def test_a_resume_without_an_engine_leaves_the_session_usable(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        session_id, num_tokens = with_history(app)
        app.post(f"/v1/sessions/{session_id}/suspend")
        app.engine.restart(keep_lower_tiers=True)
        back = app.post(f"/v1/sessions/{session_id}/resume").json()
        assert back["restored_tokens"] == num_tokens // 64 * 64
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            turn = pool.submit(app.turn, session_id, "and?")
            assert turn.result()["cache"]["miss"]["missed_tokens"] < 64


def test_an_expired_session_gives_its_kv_back(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        session_id, _ = with_history(app)
        ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
        store = app.services.store

        async def in_a_week() -> int:
            return await store.clock_ms() + 8 * 86_400_000

        sweeper = Sweeper(store, in_a_week, retention_ms=1)
        done = asyncio.run_coroutine_threadsafe(sweeper.sweep(), app.loop).result(60)
        assert done.expired == (session_id,)
        until(lambda: app.engine._hit(ids, "", len(ids)).l1 < 64)
        gone = app.post(f"/v1/sessions/{session_id}/resume")
        assert app.error(gone)[:2] == (410, "session_expired")
