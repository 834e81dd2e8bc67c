# SPDX-License-Identifier: Apache-2.0
"""Sessions as clients see them: create, list, update, fork, append, tenants, the cache view."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.appliance import Json, RunningApp, default_assets, says

TOOL: Json = {"type": "function", "name": "ls", "description": "List a folder"}


def test_a_new_session_shows_what_it_was_created_with_and_the_defaults(app: RunningApp) -> None:
    reply = app.post(
        "/v1/sessions",
        {
            "model": "default",
            "instructions": "Be brief.",
            "tools": [TOOL],
            "metadata": {"project": "x"},
            "cache": {"hold": {"l2": "2h"}},
            "priority": 3,
        },
    )
    session = reply.json()
    assert session["object"] == "session" and session["status"] == "idle"
    assert session["revision"] == 0 and session["current_turn"] is None
    assert session["cache"]["hold"] == {"l1": "30s", "l2": "2h", "l3": "1d"}
    assert session["tools"] == [TOOL] and session["metadata"] == {"project": "x"}
    assert session["model"] == default_assets().name
    assert session["expires_at"] - session["created_at"] == pytest.approx(7 * 86400)
    assert app.get(f"/v1/sessions/{session['id']}").json() == session


def test_initial_items_are_history_from_the_start(app: RunningApp) -> None:
    items = [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
    ]
    session_id = app.session(instructions="Be brief.", initial_items=items)
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    messages = [{"role": "system", "content": "Be brief."}, *items]
    whole = default_assets().chat_template.render(messages)
    end_id = default_assets().chat_template.end_token_id
    # Up to the end of the answer, as where it was sampled; the rest comes with what follows.
    assert ids == whole[: len(ids)] and ids[-1] == end_id and end_id not in whole[len(ids) :]
    listed = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant"]


def test_sessions_are_listed_by_page_status_and_metadata(app: RunningApp) -> None:
    ids = [app.session(metadata={"group": "paged", "n": str(n)}) for n in range(3)]
    query = {"metadata[group]": "paged", "limit": 2}
    page = app.get("/v1/sessions", params=query).json()
    assert [row["id"] for row in page["data"]] == [ids[2], ids[1]] and page["has_more"]
    rest = app.get("/v1/sessions", params={**query, "after": page["last_id"]}).json()
    assert [row["id"] for row in rest["data"]] == [ids[0]] and not rest["has_more"]
    none = app.get("/v1/sessions", params={**query, "status": "running"}).json()
    assert none["data"] == []
    one = app.get("/v1/sessions", params={"metadata[n]": "1", "metadata[group]": "paged"}).json()
    assert [row["id"] for row in one["data"]] == [ids[1]]


def test_items_are_paged_in_both_orders(app: RunningApp) -> None:
    app.engine.script = says("one", "two")
    session_id = app.session()
    app.turn(session_id, "a")
    app.turn(session_id, "b")
    whole = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    assert len(whole) == 4
    first = app.get(f"/v1/sessions/{session_id}/items", params={"limit": 3}).json()
    assert first["data"] == whole[:3] and first["has_more"]
    rest = app.get(f"/v1/sessions/{session_id}/items", params={"after": first["last_id"]}).json()
    assert rest["data"] == whole[3:] and not rest["has_more"]
    newest = app.get(f"/v1/sessions/{session_id}/items", params={"order": "desc"}).json()
    assert newest["data"] == whole[::-1]
    reply = app.get(f"/v1/sessions/{session_id}/items", params={"after": "item_x"})
    assert app.error(reply)[:2] == (404, "item_not_found")


def test_forks_share_the_history_and_go_their_own_ways(app: RunningApp) -> None:
    app.engine.script = says("one", "two", "left", "right")
    session_id = app.session(instructions="Be brief.", metadata={"a": "1"})
    first = app.turn(session_id, "a")
    app.turn(session_id, "b")
    reply = app.post(
        f"/v1/sessions/{session_id}/fork", {"at": first["id"], "n": 2, "metadata": {"b": "2"}}
    )
    children = reply.json()["data"]
    assert [c["parent_session_id"] for c in children] == [session_id] * 2
    assert all(c["metadata"] == {"a": "1", "b": "2"} for c in children)
    known = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    for child, text in zip(children, ("left", "right"), strict=True):
        assert child["num_tokens"] == known
        turn = app.turn(child["id"], f"go {text}")
        assert turn["output"][0]["content"][0]["text"] == text
        assert turn["x_cache"]["l1"] >= known - 1
    assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 2


def test_a_fork_at_an_item_ends_right_behind_it(app: RunningApp) -> None:
    session_id = app.session()
    turn = app.turn(
        session_id, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    at = turn["input"][0]["id"]
    child = app.post(f"/v1/sessions/{session_id}/fork", {"at": at}).json()["data"][0]
    ids = app.get(f"/v1/sessions/{child['id']}/tokens").json()["token_ids"]
    assert ids == default_assets().chat_template.render([{"role": "user", "content": "a"}])
    assert app.turn(child["id"], "c")["status"] == "completed"


def test_new_tools_say_what_they_invalidate_and_the_next_turn_says_why_it_missed(
    app: RunningApp,
) -> None:
    session_id = app.session(instructions="Be brief.")
    app.turn(session_id, "a")
    before = app.get(f"/v1/sessions/{session_id}").json()
    updated = app.post(f"/v1/sessions/{session_id}", {"tools": [TOOL]}).json()
    assert updated["x_invalidated_tokens"] == before["num_tokens"]
    assert updated["revision"] == before["revision"] + 1 and updated["tools"] == [TOOL]
    turn = app.turn(session_id, "b")
    assert turn["cache"]["miss"]["reason"] == "settings_changed"
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    text = default_assets().tokenizer.decode(ids, with_control=True)
    assert text.count("<|im_start|>system") == 1 and '"name": "ls"' in text
    assert app.turn(session_id, "c")["cache"]["miss"] is None


def test_harmless_updates_invalidate_nothing(app: RunningApp) -> None:
    session_id = app.session(instructions="Be brief.")
    app.turn(session_id, "a")
    body = {"metadata": {"k": "v"}, "priority": 2, "instructions": "Be brief."}
    updated = app.post(f"/v1/sessions/{session_id}", body).json()
    assert updated["x_invalidated_tokens"] == 0 and updated["revision"] == 1
    assert (updated["metadata"], updated["priority"]) == ({"k": "v"}, 2)
    assert app.turn(session_id, "b")["cache"]["miss"] is None


def test_what_an_update_leaves_out_stays_inside_of_nested_settings_too(app: RunningApp) -> None:
    context = {"max_tokens": 900, "on_overflow": "truncate_oldest", "compact_at": 0.8}
    session_id = app.session(
        context=context,
        cache={"hold": {"l1": "10s", "l2": "2h"}},
        metadata={"a": "1", "b": "2"},
        instructions="Be brief.",
    )
    path = f"/v1/sessions/{session_id}"
    before = app.get(path).json()
    body = {
        "context": {"on_overflow": "error"},
        "cache": {"hold": {"l1": "20s"}},
        "reasoning": {"history": "drop_before_last_user"},
        "metadata": {"b": None, "c": "3"},
    }
    after = app.post(path, body).json()
    assert after["context"] == {**before["context"], "on_overflow": "error"}
    assert after["context"]["max_tokens"] == 900 and after["context"]["compact_at"] == 0.8
    assert after["cache"]["hold"] == {**before["cache"]["hold"], "l1": "20s"}
    assert after["metadata"] == {"a": "1", "c": "3"}
    assert after["instructions"] == "Be brief."
    # null unsets what may be unset.
    after = app.post(path, {"context": {"max_tokens": None}, "instructions": None}).json()
    assert after["context"]["max_tokens"] is None and after["instructions"] is None
    ids = app.get(f"{path}/tokens").json()["token_ids"]
    assert "Be brief." not in default_assets().tokenizer.decode(ids, with_control=True)
    assert app.turn(session_id, "x")["status"] == "completed"


def test_a_context_that_the_model_cannot_hold_is_refused_and_an_import_gets_what_there_is(
    tmp_path: Path,
) -> None:
    with RunningApp(tmp_path, max_context_len=1000) as app:
        body = {"model": "default", "context": {"max_tokens": 1001}}
        reply = app.post("/v1/sessions", body)
        assert app.error(reply) == (400, "invalid_setting", "context.max_tokens")
        message = reply.json()["error"]["message"]
        assert "1001" in message and "1000" in message
        session_id = app.session(context={"max_tokens": 1000})
        path = f"/v1/sessions/{session_id}"
        assert app.error(app.post(path, {"context": {"max_tokens": 1001}}))[1] == "invalid_setting"
        assert app.get(path).json()["context"]["max_tokens"] == 1000
        lines = app.get(f"{path}/export").content.replace(
            b'"max_tokens":1000', b'"max_tokens":5000'
        )
        assert b"5000" in lines
        imported = app.http.post("/v1/sessions/import", content=lines).json()
        assert imported["context"]["max_tokens"] == 1000


def test_the_cache_view_tells_what_is_resident_and_why_a_turn_missed(app: RunningApp) -> None:
    session_id = app.session()
    app.turn(session_id, "an only question")
    view = app.get(f"/v1/sessions/{session_id}/cache").json()
    assert view["resident"]["l1"] == view["tokens_total"] - 1 and view["miss"] is None
    app.engine._cached.clear()  # as if the pressure of others had evicted everything
    turn = app.turn(session_id, "more")
    first_item = app.get(f"/v1/sessions/{session_id}/items").json()["data"][0]["id"]
    miss = {"reason": "evicted", "first_diverging_item": first_item,
            "missed_tokens": view["tokens_total"] - 1}  # fmt: skip
    assert turn["cache"]["miss"] == miss
    view = app.get(f"/v1/sessions/{session_id}/cache").json()
    assert view["miss"] == miss and view["last_turn"]["turn_id"] == turn["id"]


def test_tenants_see_their_own_sessions_alone_and_share_no_prefix(tmp_path: Path) -> None:
    keys = {"key-a": "alpha", "key-b": "beta"}
    with RunningApp(tmp_path, settings={"server": {"api_keys": keys}}) as app:
        assert app.error(app.get("/v1/sessions"))[:2] == (401, "invalid_api_key")
        a, b = ({"Authorization": f"Bearer {key}"} for key in keys)
        body = {"model": "default"}
        session = app.post("/v1/sessions", body, headers=a).json()
        path = f"/v1/sessions/{session['id']}"
        assert app.get(path, headers=a).status_code == 200
        assert app.error(app.get(path, headers=b))[:2] == (404, "session_not_found")
        assert app.get("/v1/sessions", headers=b).json()["data"] == []
        assert app.http.delete(path, headers=b).status_code == 200  # and nothing happened
        assert app.get(path, headers=a).status_code == 200
        app.post(f"{path}/turns", {"input": "x"}, headers=a)
        other = app.post("/v1/sessions", body, headers=b).json()
        app.post(f"/v1/sessions/{other['id']}/turns", {"input": "x"}, headers=b)
        assert [r.salt for r in app.engine.requests] == ["alpha", "beta"]
        assert app.get("/admin/cache/tree", headers=a).status_code == 401
        assert app.get("/health").status_code == 200


def test_a_quota_of_sessions_is_enforced_per_tenant(tmp_path: Path) -> None:
    with RunningApp(tmp_path, settings={"sessions": {"max_sessions_per_tenant": 1}}) as app:
        session_id = app.session()
        reply = app.post("/v1/sessions", {"model": "default"})
        assert app.error(reply)[:2] == (429, "session_quota_exceeded")
        assert reply.headers["retry-after"]
        app.http.delete(f"/v1/sessions/{session_id}")
        app.session()


def test_answers_that_a_client_brings_are_followed_as_those_that_were_sampled(
    app: RunningApp,
) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    session_id = app.session(instructions="Be brief.", initial_items=messages)
    more = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]
    app.post(f"/v1/sessions/{session_id}/items", {"items": more})
    app.turn(session_id, "g")
    talk = [{"role": "system", "content": "Be brief."}, *messages, *more]
    talk += [{"role": "user", "content": "g"}, {"role": "assistant", "content": "Hello there."}]
    whole = default_assets().chat_template.render(talk)
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    assert ids == whole[: len(ids)] and len(whole) - len(ids) <= 1
