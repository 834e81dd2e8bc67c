# SPDX-License-Identifier: Apache-2.0
"""What the appliance notices by itself: turns that do not move, and what KV costs whom."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from appliance.cache_views import depths_of, on_paths, tenant_rows
from appliance.session_views import cost_wire
from engine.api import TreeNode
from sessions.residency import TierCost
from tests.fakes.appliance import RunningApp, says, sse_events, until
from tests.fakes.engine import KV_BYTES

TEXT = "a question long enough to fill a page or two of the cache " * 8


def test_a_turn_without_progress_is_told_counted_and_seen_in_health(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        watchdog = app.asgi.state.context.watchdog
        assert app.get("/health").json()["status"] == "ok"
        session_id = app.session()
        app.engine.pause()
        body = {"input": "x", "stream": True}
        with app.http.stream("POST", f"/v1/sessions/{session_id}/turns", json=body) as reply:
            events = sse_events(reply)
            seen = []
            for event in events:
                seen.append(event)
                if event["type"] == "turn.cache":  # until then it may well wait as long elsewhere
                    watchdog._stall_s = 0.2
                if event["type"] == "turn.stalled":
                    break
            assert seen[-1]["phase"] == "prefill" and seen[-1]["waiting_s"] >= 0.2
            with_http = app.http.build_request("GET", "/health")
            health = app.http.send(with_http).json()
            assert health["status"] == "degraded"
            assert health["stalled_turns"][0]["turn_id"] == seen[-1]["turn_id"]
            metrics = app.get("/metrics").text
            assert 'moorage_turn_stalls_total{phase="prefill"} 1.0' in metrics
            app.engine.resume()
            rest = list(events)
        assert rest[-1]["type"] == "turn.completed"
        numbers = [event["sequence_number"] for event in (*seen, *rest)]
        assert numbers == list(range(1, len(numbers) + 1))
        until(lambda: app.get("/health").json()["status"] == "ok")


def test_a_session_s_kv_is_counted_in_byte_seconds_and_kept_with_it(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        meter = app.asgi.state.context.meter
        session_id, other = app.session(), app.session()
        path = f"/v1/sessions/{session_id}"
        app.turn(session_id, TEXT)
        app.turn(other, "short")
        until(lambda: bool(meter.copies(session_id) and meter.copies(session_id).l1))
        at = meter.copies(session_id)
        num_tokens = app.get(path).json()["num_tokens"]
        assert at.l1 == (num_tokens - 1) // 64 * 64

        def sample() -> float:
            asyncio.run_coroutine_threadsafe(meter.sample(), app.loop).result(60)
            return float(app.get(f"{path}/cache").json()["cost"]["l1_byte_s"])

        sample()
        started_s = time.monotonic()
        first = sample()
        time.sleep(0.3)
        second = sample()
        spent_s = time.monotonic() - started_s
        assert at.l1 * KV_BYTES * 0.25 < second - first < at.l1 * KV_BYTES * spent_s * 1.2
        top = app.get("/admin/cache/top").json()["data"]
        assert [row["session_id"] for row in top] == [session_id, other]
        for row in top:  # both say where a turn would find the tokens, and what each tier holds
            view = app.get(f"/v1/sessions/{row['session_id']}/cache").json()
            assert row["resident"] == view["resident"] and row["copies"] == view["copies"]
        assert top[0]["resident"] == {"l1": num_tokens - 1, "l2": 0, "l3": 0}
        assert top[0]["copies"]["l1"] == at.l1
        app.turn(session_id, "more")  # brings it into the store
        app.restart()
        kept = app.get(f"{path}/cache").json()["cost"]["l1_byte_s"]
        assert kept >= second
        tenants = app.get("/admin/cache/top", params={"by": "tenant"}).json()["data"]
        assert tenants[0]["tenant"] == "default" and tenants[0]["sessions"] == 2
        assert tenants[0]["cost"]["l1_byte_s"] >= kept
        app.http.delete(path)
        tenants = app.get("/admin/cache/top", params={"by": "tenant"}).json()["data"]
        assert tenants[0]["sessions"] == 1 and tenants[0]["cost"]["l1_byte_s"] >= kept


def test_forks_say_what_they_share(app: RunningApp) -> None:
    session_id = app.session()
    app.turn(session_id, TEXT)
    num_tokens = app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]
    child = app.post(f"/v1/sessions/{session_id}/fork").json()["data"][0]["id"]

    def shared() -> int:
        return int(app.get(f"/v1/sessions/{child}/cache").json()["shared_tokens"])

    until(lambda: shared() > 0)
    assert shared() == (num_tokens - 1) // 64 * 64


def node(node_id: int, parent_id: int, page_hash: bytes) -> TreeNode:
    return TreeNode(
        node_id=node_id, parent_id=parent_id, num_tokens=64, num_pages=1, num_children=0,
        num_users=0, last_used_ms=0, page_hash=page_hash, first_token_ids=b"",
    )  # fmt: skip


def test_a_tree_is_narrowed_to_paths_and_depths() -> None:
    nodes = [
        node(0, -1, b""),
        node(1, 0, b"a"),
        node(2, 1, b"b"),
        node(3, 1, b"c"),
        node(4, 0, b"d"),
        node(5, -1, b""),
    ]
    assert [n.node_id for n in on_paths(nodes, {b"c"})] == [0, 1, 3]
    assert on_paths(nodes, {b"x"}) == []
    assert depths_of(nodes) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}
    assert depths_of(nodes[2:]) == {2: 0, 3: 0, 4: 0, 5: 0}


def test_costs_add_up_by_tenant() -> None:
    rows = [
        {"tenant": t, "tokens_total": 5, "cost": cost_wire(TierCost(l1_byte_s=cost))}
        for t, cost in (("a", 1.0), ("b", 2.0), ("a", 4.0))
    ]
    found = tenant_rows(rows, {"b": TierCost(l3_byte_s=7.0), "c": TierCost(l1_byte_s=1.0)})
    totals = {row["tenant"]: (row["sessions"], sum(row["cost"].values())) for row in found}
    assert totals == {"a": (2, 5.0), "b": (1, pytest.approx(9.0)), "c": (0, 1.0)}
