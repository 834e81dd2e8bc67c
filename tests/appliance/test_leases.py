# SPDX-License-Identifier: Apache-2.0
"""Leases of sessions: what is answered, what lasts, what ends them, and who tells."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sessions.session import Session
from tests.fakes.appliance import Json, RunningApp, says, sse_events, until

TEXT = "a question long enough to fill a page or two of the cache " * 8


def with_history(app: RunningApp, **fields: object) -> tuple[str, int]:
    """A session with one turn, and its length."""
    session_id = app.session(**fields)
    app.turn(session_id, TEXT)
    return session_id, app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]


def leases_of(app: RunningApp, session_id: str) -> list[Json]:
    return list(app.get(f"/v1/sessions/{session_id}/leases").json()["data"])


def test_a_lease_on_the_head_is_granted_shown_and_released(app: RunningApp) -> None:
    session_id, num_tokens = with_history(app)
    path = f"/v1/sessions/{session_id}/leases"
    before_s = time.time()
    lease = app.post(path, {"tier": "l1", "ttl": "10m"}).json()
    assert (lease["object"], lease["state"], lease["reason"]) == ("lease", "granted", None)
    assert (lease["tokens_requested"], lease["tokens_granted"]) == (num_tokens, num_tokens - 1)
    assert before_s + 599 < lease["expires_at"] < time.time() + 601
    assert app.engine.leases[lease["id"]][0] == num_tokens - 1
    assert leases_of(app, session_id) == [lease]
    assert app.get(f"/v1/sessions/{session_id}/cache").json()["leased"] == num_tokens - 1
    assert app.http.delete(f"{path}/{lease['id']}").json()["deleted"]
    until(lambda: lease["id"] not in app.engine.leases)
    assert leases_of(app, session_id) == []
    assert app.error(app.http.delete(f"{path}/{lease['id']}"))[:2] == (404, "lease_not_found")


def test_a_lease_reaches_up_to_an_item(app: RunningApp) -> None:
    session_id, num_tokens = with_history(app)
    item = app.get(f"/v1/sessions/{session_id}/items").json()["data"][0]["id"]
    lease = app.post(f"/v1/sessions/{session_id}/leases", {"upto": item, "ttl": "1m"}).json()
    assert 0 < lease["tokens_granted"] < num_tokens - 1 and lease["state"] == "granted"


def test_what_the_cache_or_the_budget_does_not_hold_is_not_granted(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("one"), num_pages=8) as app:  # 256 tokens for leases
        session_id, num_tokens = with_history(app)
        assert 128 < num_tokens - 1 < 256
        path = f"/v1/sessions/{session_id}/leases"
        assert app.post(path, {"ttl": "1m"}).json()["state"] == "granted"
        other, _ = with_history(app, instructions="Be brief.")
        clipped = app.post(f"/v1/sessions/{other}/leases", {"ttl": "1m"}).json()
        assert (clipped["state"], clipped["reason"]) == ("clipped", "budget")
        assert clipped["tokens_granted"] == 256 - (num_tokens - 1)
        queued = app.post(path, {"ttl": "1m"}).json()
        assert (queued["state"], queued["tokens_granted"]) == ("queued", 0)
        assert queued["reason"] == "budget"
        app.engine._cached.clear()
        denied = app.post(path, {"ttl": "1m"}).json()
        assert (denied["state"], denied["reason"]) == ("denied", "not_resident")
        lower = app.post(path, {"tier": "l2", "ttl": "1m"}).json()
        assert (lower["state"], lower["reason"]) == ("denied", "not_resident")
        assert [x["state"] for x in leases_of(app, session_id)] == ["granted", "queued"]
        fresh = app.session()
        nothing = app.post(f"/v1/sessions/{fresh}/leases", {"ttl": "1m"}).json()
        assert (nothing["state"], nothing["reason"]) == ("denied", "nothing_to_lease")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "missing_field", "ttl"),
        ({"ttl": "soon"}, 400, "invalid_setting", "ttl"),
        ({"ttl": "0s"}, 400, "invalid_setting", "ttl"),
        ({"ttl": "999999999d"}, 400, "invalid_setting", "ttl"),
        ({"ttl": "1m", "tier": "l9"}, 400, "invalid_value", "tier"),
        ({"ttl": "1m", "upto": "item_x"}, 404, "item_not_found", "upto"),
        ({"ttl": "1m", "upto": "turn_x"}, 404, "turn_not_found", "upto"),
        ({"ttl": "1m", "pin": True}, 400, "unknown_field", "pin"),
    ],
)
def test_a_bad_lease_is_refused(
    app: RunningApp, body: Json, status: int, code: str, param: str | None
) -> None:
    session_id, _ = with_history(app)
    reply = app.post(f"/v1/sessions/{session_id}/leases", body)
    assert app.error(reply) == (status, code, param)
    assert leases_of(app, session_id) == []


@pytest.mark.parametrize("ttl", ["0s", "999999999d", "soon"])
def test_a_lease_wish_with_a_time_no_lease_takes_is_refused(app: RunningApp, ttl: str) -> None:
    cache = {"lease": {"ttl": ttl}}
    refused = (400, "invalid_setting", "cache.lease.ttl")
    assert app.error(app.post("/v1/sessions", {"model": "default", "cache": cache})) == refused


def test_a_session_holds_a_bounded_number_of_leases(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    path = f"/v1/sessions/{session_id}/leases"
    for _ in range(16):
        app.post(path, {"ttl": "1m"})
    assert app.error(app.post(path, {"ttl": "1m"}))[:2] == (400, "invalid_value")


def test_use_renews_a_lease_and_takes_it_to_the_new_head(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    path = f"/v1/sessions/{session_id}/leases"
    kept = app.post(path, {"ttl": "10m"}).json()
    fixed = app.post(path, {"ttl": "10m", "renew_on_use": False}).json()
    time.sleep(0.05)
    app.turn(session_id, TEXT)
    num_tokens = app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]
    until(lambda: app.engine.leases[kept["id"]][0] == num_tokens - 1)
    until(lambda: leases_of(app, session_id)[0]["tokens_granted"] == num_tokens - 1)
    first, second = leases_of(app, session_id)
    assert first["expires_at"] > kept["expires_at"] and first["state"] == "granted"
    assert second["expires_at"] == fixed["expires_at"]
    assert second["tokens_granted"] <= fixed["tokens_requested"]


def test_a_lease_wished_at_creation_is_taken_once_there_is_something_to_keep(
    app: RunningApp,
) -> None:
    wish = {"tier": "l1", "ttl": "10m", "renew_on_use": True}
    session_id = app.session(cache={"lease": wish})
    assert app.get(f"/v1/sessions/{session_id}").json()["cache"]["lease"] == wish
    assert leases_of(app, session_id) == []
    for _ in range(2):
        app.turn(session_id, TEXT)
        until(lambda: len(leases_of(app, session_id)) == 1)
    exported = app.get(f"/v1/sessions/{session_id}/export").content
    copy = app.post("/v1/sessions/import", content=exported).json()
    assert copy["cache"]["lease"] == wish
    for lease, code in (
        ({"tier": "l4", "ttl": "1m"}, "invalid_value"),
        ({"ttl": "soon"}, "invalid_setting"),
        ({}, "missing_field"),
    ):
        reply = app.post("/v1/sessions", {"model": "default", "cache": {"lease": lease}})
        assert app.error(reply)[:2] == (400, code)
    reply = app.post(f"/v1/sessions/{session_id}", {"cache": {"lease": wish}})
    assert app.error(reply) == (400, "unsupported_parameter", "cache.lease")


def test_leases_are_asserted_again_after_either_process_restarted(tmp_path: Path) -> None:
    with RunningApp(tmp_path) as app:
        session_id, num_tokens = with_history(app)
        lease = app.post(f"/v1/sessions/{session_id}/leases", {"ttl": "10m"}).json()
        app.engine.leases.clear()
        app.restart()
        until(lambda: lease["id"] in app.engine.leases)
        assert app.engine.leases[lease["id"]][0] == num_tokens - 1
        app.engine.restart()  # the cache is gone, so there is nothing to hold until a turn
        until(lambda: leases_of(app, session_id)[0]["state"] == "queued")
        assert leases_of(app, session_id)[0]["reason"] == "not_resident"
        app.turn(session_id, "more")
        until(lambda: leases_of(app, session_id)[0]["state"] == "granted")
        assert lease["id"] in app.engine.leases


def test_leases_are_asserted_when_the_first_engine_comes_however_late_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunningApp(tmp_path) as app:
        session_id, _ = with_history(app)
        app.post(f"/v1/sessions/{session_id}/leases", {"ttl": "10m"})
        app.stop()
        app.engine.stop()
        app._with_engine = False
        app.start()
        assert not app.services.client._queries, "nobody is asked while nobody is there"
        assert leases_of(app, session_id)[0]["state"] == "granted"
        app.engine.start()  # its cache is empty
        until(lambda: leases_of(app, session_id)[0]["state"] == "queued")
        assert leases_of(app, session_id)[0]["reason"] == "not_resident"
    assert not [record for record in caplog.records if "not asserted" in record.message]


def test_what_becomes_of_a_lease_is_told_and_remembered(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    path = f"/v1/sessions/{session_id}"
    with app.http.stream("GET", f"{path}/events") as reply:
        events = sse_events(reply)
        next(events)
        lease = app.post(f"{path}/leases", {"ttl": "10m"}).json()
        app.engine.change_lease(lease["id"], "revoked", 64)
        kinds = []
        for event in events:
            kinds.append(event["type"])
            if event["type"] == "lease.revoked":
                break
        assert "lease.granted" in kinds and event["lease"]["tokens_granted"] == 64
        shown = leases_of(app, session_id)[0]
        assert (shown["state"], shown["reason"]) == ("clipped", "pressure")
        app.engine.change_lease(lease["id"], "expired", 0)
        next(event for event in events if event["type"] == "lease.expired")
        assert leases_of(app, session_id) == []
        app.http.delete(path)
        list(events)


@pytest.mark.parametrize("becomes", ["revoked", "expired"])
def test_what_becomes_of_a_lease_before_the_store_has_it_is_remembered(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    session_id, _ = with_history(app)
    update, known = app.services.store.update, set(app.engine.leases)
    heard: list[str] = []
    app.services.client.on_lease_change(lambda change: heard.append(change.lease_id))

    async def late(session: Session) -> Session:
        if not heard:
            (granted,) = set(app.engine.leases) - known
            app.engine.change_lease(granted, becomes, 64 if becomes == "revoked" else 0)
            while granted not in heard:
                await asyncio.sleep(0.01)
        return await update(session)

    with monkeypatch.context() as patch:
        patch.setattr(app.services.store, "update", late)
        lease = app.post(f"/v1/sessions/{session_id}/leases", {"ttl": "10m"}).json()
    assert heard == [lease["id"]]
    shown = [(found["state"], found["tokens_granted"]) for found in leases_of(app, session_id)]
    assert shown == ([("clipped", 64)] if becomes == "revoked" else [])


@pytest.mark.parametrize("becomes", ["revoked", "expired"])
def test_what_becomes_of_a_wished_lease_before_the_store_has_it_is_remembered(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    update = app.services.store.update
    heard: list[str] = []
    app.services.client.on_lease_change(lambda change: heard.append(change.lease_id))

    async def late(session: Session) -> Session:
        if session.leases and not heard:
            (granted,) = (lease.id for lease in session.leases)
            app.engine.change_lease(granted, becomes, 64 if becomes == "revoked" else 0)
            while granted not in heard:
                await asyncio.sleep(0.01)
        return await update(session)

    monkeypatch.setattr(app.services.store, "update", late)
    session_id = app.session(cache={"lease": {"ttl": "10m"}})
    app.turn(session_id, TEXT)
    until(lambda: heard != [])
    wanted = [("clipped", 64)] if becomes == "revoked" else []
    until(
        lambda: (
            wanted
            == [(found["state"], found["tokens_granted"]) for found in leases_of(app, session_id)]
        )
    )


def test_a_wished_lease_is_held_once_whoever_else_writes_the_session(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, known = app.services.store.update, set(app.engine.leases)
    overtaken: list[str] = []

    async def late(session: Session) -> Session:
        if session.leases and not overtaken:
            overtaken.append(session.id)
            await update(await app.services.store.get(session.id))
        return await update(session)

    monkeypatch.setattr(app.services.store, "update", late)
    session_id = app.session(cache={"lease": {"ttl": "10m"}})
    app.turn(session_id, TEXT)
    until(lambda: leases_of(app, session_id) != [])
    assert overtaken == [session_id]
    (lease,) = leases_of(app, session_id)
    until(lambda: app.engine.leases.keys() - known == {lease["id"]})


def test_closing_a_session_lets_its_leases_go(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    lease = app.post(f"/v1/sessions/{session_id}/leases", {"ttl": "10m"}).json()
    app.http.delete(f"/v1/sessions/{session_id}")
    until(lambda: lease["id"] not in app.engine.leases)


def test_a_rollback_takes_a_lease_back_to_the_new_head(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    app.turn(session_id, TEXT)
    lease = app.post(f"/v1/sessions/{session_id}/leases", {"ttl": "10m"}).json()
    app.post(f"/v1/sessions/{session_id}/rollback", {"to": 1})
    num_tokens = app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]
    until(lambda: app.engine.leases[lease["id"]][0] <= num_tokens)
    until(lambda: leases_of(app, session_id)[0]["tokens_granted"] <= num_tokens)


def test_the_admin_sees_every_lease(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    lease = app.post(f"/v1/sessions/{session_id}/leases", {"ttl": "10m"}).json()
    rows = app.get("/admin/leases").json()["data"]
    assert {**lease, "tenant": "default"} in rows


def test_a_lease_in_a_lower_tier_covers_what_lies_there(app: RunningApp) -> None:
    session_id, num_tokens = with_history(app)
    path = f"/v1/sessions/{session_id}/leases"
    app.post(f"/v1/sessions/{session_id}/suspend")
    lease = app.post(path, {"tier": "l3", "ttl": "1h"}).json()
    assert (lease["tier"], lease["state"]) == ("l3", "clipped")  # whole pages lie there
    assert 0 < lease["tokens_granted"] == num_tokens // 64 * 64
    assert app.get(f"/v1/sessions/{session_id}/cache").json()["leased"] == lease["tokens_granted"]


def test_a_lease_that_pressure_took_down_a_tier_says_so(app: RunningApp) -> None:
    session_id, _ = with_history(app)
    path = f"/v1/sessions/{session_id}/leases"
    lease = app.post(path, {"ttl": "10m"}).json()
    app.engine.change_lease(lease["id"], "demoted", lease["tokens_granted"])
    until(lambda: leases_of(app, session_id)[0]["tier"] == "l2")
    moved = leases_of(app, session_id)[0]
    assert (moved["state"], moved["reason"]) == ("granted", "pressure")
    app.engine.change_lease(lease["id"], "demoted", 64)
    until(lambda: leases_of(app, session_id)[0]["state"] == "clipped")
