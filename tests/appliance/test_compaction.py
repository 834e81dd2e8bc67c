# SPDX-License-Identifier: Apache-2.0
"""Compaction: what goes, what stays to the token, and that nobody has to wait for it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path

import httpx
import pytest

from appliance.compaction import SUMMARY_REQUEST
from appliance.prompts import LEFT_OUT, SUMMARY_OPENING
from engine.text.chat_template import ChatTemplate
from engine.transport import unpack_ids
from tests.appliance.test_tool_calls import TOOLS, calls_text
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says, sse_events, until

LONG = "a rather long question about a part of the repository " * 6


def tokens(app: RunningApp, session_id: str) -> list[int]:
    return list(app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"])


def kinds(app: RunningApp, session_id: str) -> list[str]:
    data = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    return [item.get("role") or item["type"] for item in data]


def full_render(*messages: tuple[str, str]) -> list[int]:
    template = default_assets().chat_template
    return template.render([{"role": role, "content": text} for role, text in messages])


def with_turns(app: RunningApp, num: int, **fields: object) -> str:
    session_id = app.session(instructions="Be brief.", **fields)
    app.engine.script = says("Hello there.")
    for number in range(num):
        app.turn(session_id, f"{LONG}{number}")
    return session_id


def test_the_model_writes_the_summary_and_the_rest_stays_to_the_token(app: RunningApp) -> None:
    session_id = with_turns(app, 3)
    before = tokens(app, session_id)
    app.engine.script = says("They asked twice.")
    reply = app.post(f"/v1/sessions/{session_id}/compact", {"keep_last_turns": 1})
    assert reply.status_code == 200, reply.text
    done = reply.json()
    asked, warmed = app.engine.requests[-2:]
    prompt = unpack_ids(asked.token_ids).tolist()
    text = default_assets().tokenizer.decode(prompt)
    assert SUMMARY_REQUEST in text and f"{LONG}1" in text and f"{LONG}2" not in text
    assert before[: len(prompt) - 100] == prompt[: len(prompt) - 100]
    after = tokens(app, session_id)
    # What a full render of the shorter conversation gives, but for the end it leaves open.
    whole = full_render(
        ("system", "Be brief."),
        ("user", SUMMARY_OPENING + "They asked twice."),
        ("user", f"{LONG}2"),
        ("assistant", "Hello there."),
    )
    assert after == whole[: len(after)] and len(whole) - len(after) <= 1
    num_kept = done["kept_tokens"]
    assert after[-num_kept:] == before[-num_kept:] and num_kept > 50
    assert unpack_ids(warmed.token_ids).tolist() == after
    assert done["num_tokens"] == len(after) and done["num_tokens_before"] == len(before)
    assert (done["revision"], done["replaced_items"], done["kept_turns"]) == (4, 4, 1)
    assert done["items"][0]["type"] == "compaction"
    assert kinds(app, session_id) == ["compaction", "user", "assistant"]
    item = app.get(f"/v1/sessions/{session_id}/items").json()["data"][0]
    assert (item["summary"], item["num_replaced"]) == ("They asked twice.", 4)
    turn = app.turn(session_id, "next")
    assert turn["cache"]["miss"] is None and turn["x_cache"]["l1"] >= len(after) - 1


def test_the_branch_that_was_replaced_is_released(app: RunningApp) -> None:
    app.engine.drop_cache()
    session_id = with_turns(app, 2)
    before = tokens(app, session_id)
    head = len(full_render(("system", "Be brief.")))
    assert app.engine._hit(before, "", len(before)).l1 == len(before) - 1
    app.post(f"/v1/sessions/{session_id}/compact", {})
    until(lambda: app.engine._hit(before, "", len(before)).l1 <= head + 8)


def test_without_warming_the_next_turn_says_what_it_computed_again(app: RunningApp) -> None:
    session_id = with_turns(app, 2)
    num_requests = len(app.engine.requests)
    reply = app.post(f"/v1/sessions/{session_id}/compact", {"warm": False})
    assert reply.json()["prefill"] is None
    assert len(app.engine.requests) == num_requests + 1
    assert app.turn(session_id, "x")["cache"]["miss"]["reason"] == "compacted"
    assert app.turn(session_id, "y")["cache"]["miss"] is None


def test_items_of_the_client_take_the_place_of_the_old_ones(app: RunningApp) -> None:
    session_id = with_turns(app, 3)
    num_requests = len(app.engine.requests)
    items: list[Json] = [
        {"role": "user", "content": "We did this and that."},
        {"role": "assistant", "content": "Right."},
    ]
    body = {"mode": "items", "summary_items": items, "keep_last_turns": 2}
    reply = app.post(f"/v1/sessions/{session_id}/compact", body)
    assert reply.status_code == 200, reply.text
    assert len(app.engine.requests) == num_requests + 1  # the prefill: no summary was sampled
    assert kinds(app, session_id) == ["user", "assistant"] * 3
    after = tokens(app, session_id)
    whole = full_render(
        ("system", "Be brief."),
        ("user", "We did this and that."),
        ("assistant", "Right."),
        ("user", f"{LONG}1"),
        ("assistant", "Hello there."),
        ("user", f"{LONG}2"),
        ("assistant", "Hello there."),
    )
    assert after == whole[: len(after)] and len(whole) - len(after) <= 1


def test_in_a_tool_loop_a_kept_result_keeps_its_call(app: RunningApp) -> None:
    app.engine.script = says(calls_text(("ls", '{"path": "src"}')))
    session_id = app.session(tools=TOOLS)
    turn = app.turn(session_id, LONG)
    for number in range(2):
        (call,) = (item for item in turn["output"] if item["type"] == "function_call")
        output: Json = {"type": "function_call_output", "call_id": call["call_id"]}
        output["output"] = f"r{number}"
        if number:
            app.engine.script = says("All done.")
        turn = app.turn(session_id, [output])
    before = tokens(app, session_id)
    app.engine.script = says("They want src listed.")
    body = {"keep_last_turns": 1}
    assert app.post(f"/v1/sessions/{session_id}/compact", body).status_code == 200
    assert kinds(app, session_id) == [
        "compaction", "function_call", "function_call_output", "assistant"
    ]  # fmt: skip
    after = tokens(app, session_id)
    (prompt,) = [r for r in app.engine.requests[-2:] if SUMMARY_REQUEST in text_of(r.token_ids)]
    assert "r0" in text_of(prompt.token_ids) and "r1" not in text_of(prompt.token_ids)
    opening = default_assets().chat_template.render_append(
        ("user",), [], add_generation_prompt=True
    )
    call_ids = ids_of(calls_text(("ls", '{"path": "src"}')))
    start = next(i for i in range(len(after)) if after[i : i + len(call_ids)] == call_ids)
    assert after[start - len(opening) : start] == opening
    num_kept = len(after) - start + len(opening)
    assert after[-num_kept:] == before[-num_kept:]
    app.engine.script = says("Yes.")
    assert app.turn(session_id, "Anything else?")["status"] == "completed"


def text_of(token_ids: bytes) -> str:
    return default_assets().tokenizer.decode(unpack_ids(token_ids).tolist())


def test_calls_that_wait_for_their_results_are_kept(app: RunningApp) -> None:
    app.engine.script = says("fine", calls_text(("ls", '{"path": "a"}')), "short")
    session_id = app.session(tools=TOOLS)
    app.turn(session_id, LONG)
    turn = app.turn(session_id, LONG)
    call_id = turn["output"][0]["call_id"]
    assert app.post(f"/v1/sessions/{session_id}/compact", {"keep_last_turns": 0}).json()["status"]
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert session["status"] == "requires_action"
    assert [c["call_id"] for c in session["open_calls"]] == [call_id]
    output = {"type": "function_call_output", "call_id": call_id, "output": "x"}
    assert app.turn(session_id, [output])["status"] == "completed"


def test_a_turn_that_comes_meanwhile_is_kept_and_waits_for_nobody(app: RunningApp) -> None:
    session_id = with_turns(app, 2)
    app.engine.pause()
    app.engine.script = says("a summary of some words that takes its time to write down")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compaction = pool.submit(app.post, f"/v1/sessions/{session_id}/compact", {})
        until(lambda: SUMMARY_REQUEST in text_of(app.engine.requests[-1].token_ids))
        app.engine.held.add(app.engine.requests[-1].request_id)
        app.engine.script = says("quick")
        app.engine.resume()
        turn = app.turn(session_id, "in between")
        assert turn["status"] == "completed"
        app.engine.held.clear()
        done = compaction.result().json()
    assert done["status"] == "completed", done
    assert kinds(app, session_id) == ["compaction"] + ["user", "assistant"] * 2
    last = app.get(f"/v1/sessions/{session_id}/items").json()["data"][-1]
    assert last["content"][0]["text"] == "quick"
    assert done["revision"] == turn["revision"] + 1


def test_a_history_that_is_changed_meanwhile_is_not_compacted(app: RunningApp) -> None:
    session_id = with_turns(app, 3)
    first = app.get(f"/v1/sessions/{session_id}/turns").json()["data"][0]["id"]
    app.engine.pause()
    app.engine.script = says("a summary of some words that takes its time to write down")
    num_before = len(app.engine.requests)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compaction = pool.submit(app.post, f"/v1/sessions/{session_id}/compact", {})
        until(lambda: len(app.engine.requests) > num_before)
        again = app.post(f"/v1/sessions/{session_id}/compact", {})
        assert app.error(again)[:2] == (409, "compaction_in_progress")
        app.post(f"/v1/sessions/{session_id}/rollback", {"to": first})
        app.engine.resume()
        assert app.error(compaction.result())[:2] == (409, "version_conflict")
    assert kinds(app, session_id) == ["user", "assistant"]
    assert app.turn(session_id, "go on")["status"] == "completed"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"keep_last_turns": 9}, "nothing_to_compact", "keep_last_turns"),
        ({"keep_last_turns": -1}, "invalid_value", "keep_last_turns"),
        ({"mode": "shorter"}, "invalid_value", "mode"),
        ({"mode": "items"}, "missing_field", "summary_items"),
        ({"summary_items": "x"}, "invalid_value", "summary_items"),
        ({"mode": "items", "summary_items": [{"type": "function_call", "call_id": "c",
          "name": "f", "arguments": "{}"}]}, "unresolved_tool_calls", "summary_items"),
        ({"mode": "items", "summary_items": [{"type": "function_call_output", "call_id": "c",
          "output": "x"}]}, "unknown_call_id", "summary_items[0].call_id"),
        ({"mode": "items", "summary_items": LONG * 20}, "compaction_failed", None),
        ({"turns": 1}, "unknown_field", "turns"),
    ],
)  # fmt: skip
def test_a_bad_compaction_changes_nothing(
    app: RunningApp, body: Json, code: str, param: str | None
) -> None:
    session_id = with_turns(app, 2)
    before = tokens(app, session_id)
    reply = app.post(f"/v1/sessions/{session_id}/compact", body)
    assert app.error(reply)[1:] == (code, param), reply.text
    assert tokens(app, session_id) == before


def test_a_summary_that_is_empty_leaves_the_session_as_it_was(app: RunningApp) -> None:
    session_id = with_turns(app, 2)
    before = tokens(app, session_id)
    app.engine.script = lambda request: [app.engine.eos_id]
    reply = app.post(f"/v1/sessions/{session_id}/compact", {})
    assert app.error(reply)[:2] == (422, "compaction_failed")
    assert tokens(app, session_id) == before


ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined "
    "and loop.previtem.role == 'user' %}{{ raise_exception('turns must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_template_that_wants_turns_to_alternate_gets_an_answer_to_the_summary(
    tmp_path: Path, keep: int
) -> None:
    assets = default_assets()
    strict = dataclasses.replace(assets, chat_template=ChatTemplate(ALTERNATING, assets.tokenizer))
    with RunningApp(tmp_path, assets=strict) as app:
        session_id = with_turns(app, 2)
        app.engine.script = says("They asked twice.")
        path = f"/v1/sessions/{session_id}"
        assert app.post(f"{path}/compact", {"keep_last_turns": keep}).status_code == 200
        assert kinds(app, session_id)[:2] == ["compaction", "assistant"]
        app.engine.script = says("Yes.")
        assert app.turn(session_id, "go on")["status"] == "completed"
        kept = [("user", f"{LONG}1"), ("assistant", "Hello there.")] if keep else []
        messages = [
            ("system", "Be brief."),
            ("user", SUMMARY_OPENING + "They asked twice."),
            ("assistant", "Understood."),
            *kept,
            ("user", "go on"),
            ("assistant", "Yes."),
        ]
        whole = strict.chat_template.render([{"role": r, "content": t} for r, t in messages])
        after = tokens(app, session_id)
        assert after == whole[: len(after)] and len(whole) - len(after) <= 1


# Overflow -------------------------------------------------------------------------------------


def test_the_oldest_turns_are_left_out_where_a_session_asks_for_that(app: RunningApp) -> None:
    context = {"max_tokens": 400, "on_overflow": "truncate_oldest"}
    session_id = app.session(instructions="Be brief.", context=context)
    app.engine.script = says("Hello there.")
    for number in range(8):
        turn = app.turn(session_id, f"{LONG}{number}", max_output_tokens=16)
        assert turn["status"] == "completed"
        assert app.get(f"/v1/sessions/{session_id}").json()["num_tokens"] < 400
    items = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    assert items[0]["type"] == "compaction" and items[0]["summary"] == ""
    assert items[0]["num_replaced"] > 0
    text = default_assets().tokenizer.decode(tokens(app, session_id))
    assert LEFT_OUT in text and f"{LONG}7" in text and f"{LONG}1" not in text
    assert "Be brief." in text


def test_a_turn_that_does_not_fit_waits_for_the_summary_and_then_runs(app: RunningApp) -> None:
    context = {"max_tokens": 400, "on_overflow": "compact", "compact_at": 1.0}
    session_id = app.session(instructions="Be brief.", context=context)
    app.engine.script = says("Hello there.")
    num_summaries, num_before = 0, len(app.engine.requests)
    for number in range(8):
        events = app.stream(session_id, f"{LONG}{number}", max_output_tokens=16)
        assert events[-1]["type"] == "turn.completed", events[-1]
        assert events[0]["turn"]["status"] in ("queued", "running")
        num_summaries += events[0]["turn"]["status"] == "queued"
    assert num_summaries >= 2
    assert kinds(app, session_id)[0] == "compaction"
    sent = app.engine.requests[num_before:]
    asked = [r for r in sent if SUMMARY_REQUEST in text_of(r.token_ids)]
    assert len(asked) == num_summaries


@pytest.mark.parametrize("why", ["the model writes none", "no room to ask for one"])
def test_turns_go_on_without_the_oldest_where_no_summary_can_be_had(
    app: RunningApp, why: str
) -> None:
    context = {"max_tokens": 400, "on_overflow": "compact", "compact_at": 1.0}
    session_id = app.session(instructions="Be brief.", context=context)
    path = f"/v1/sessions/{session_id}"
    app.engine.script = says("Hello there.")
    app.turn(session_id, f"{LONG}0", max_output_tokens=16)
    if why == "no room to ask for one":
        app.engine.script = says("on and on " * 400)
        filled = app.turn(session_id, "Go on for long.")
        assert filled["status"] == "incomplete" and filled["reason"] == "context_limit"
        app.engine.script = says("Hello there.")
    else:
        app.turn(session_id, f"{LONG}1", max_output_tokens=16)
        app.turn(session_id, f"{LONG}2", max_output_tokens=16)
        hello, summary = says("Hello there."), [app.engine.eos_id]
        app.engine.script = lambda request: (
            summary if SUMMARY_REQUEST in text_of(request.token_ids) else hello(request)
        )
    for number in range(3, 6):
        turn = app.turn(session_id, f"{LONG}{number}", max_output_tokens=16)
        assert turn["status"] == "completed", turn
        assert app.get(path).json()["num_tokens"] < 400
    first = app.get(f"{path}/items").json()["data"][0]
    assert (first["type"], first["summary"]) == ("compaction", "")


def test_a_session_whose_turn_waits_for_room_is_queued(app: RunningApp) -> None:
    context = {"max_tokens": 400, "on_overflow": "compact", "compact_at": 1.0}
    session_id = app.session(context=context)
    path = f"/v1/sessions/{session_id}"
    app.engine.script = says("Hello there.")
    while app.get(path).json()["num_tokens"] < 280:
        app.turn(session_id, LONG, max_output_tokens=16)
    app.engine.pause()
    body = {"input": LONG * 2, "stream": True, "max_output_tokens": 16}
    with app.http.stream("POST", f"{path}/turns", json=body) as reply:
        events = sse_events(reply)
        turn_id = next(events)["turn_id"]
        with httpx.Client(base_url=app.url, timeout=30) as http:
            seen = http.get(path).json()
            assert (seen["status"], seen["current_turn"]) == ("queued", turn_id)
            refused = http.post(f"{path}/turns", json={"input": "x"})
            assert app.error(refused)[:2] == (409, "turn_in_progress")
            assert refused.json()["error"]["turn_id"] == turn_id
        app.engine.resume()
        assert list(events)[-1]["type"] == "turn.completed"
    assert app.get(path).json()["status"] == "idle"


def test_a_long_history_is_compacted_beside_its_turns(app: RunningApp) -> None:
    context = {"max_tokens": 400, "on_overflow": "compact", "compact_at": 0.5, "compact_to": 0.3}
    session_id = app.session(instructions="Be brief.", context=context)
    app.engine.script = says("Hello there.")
    for number in range(4):
        app.turn(session_id, f"{LONG}{number}")
    until(lambda: app.get(f"/v1/sessions/{session_id}").json()["num_tokens"] <= 200)
    assert kinds(app, session_id)[0] == "compaction"


@pytest.mark.parametrize("policy", ["compact", "truncate_oldest"])
def test_appended_items_make_room_as_a_turn_s_input_does(app: RunningApp, policy: str) -> None:
    context = {"max_tokens": 400, "on_overflow": policy, "compact_at": 1.0}
    session_id = app.session(instructions="Be brief.", context=context)
    app.engine.script = says("Hello there.")
    for number in range(8):
        items = [{"role": "user", "content": f"{LONG}{number}"}]
        reply = app.post(f"/v1/sessions/{session_id}/items", {"items": items})
        assert reply.status_code == 200, reply.text
        assert reply.json()["num_tokens"] < 400
        assert app.turn(session_id, "go on", max_output_tokens=16)["status"] == "completed"
    text = default_assets().tokenizer.decode(tokens(app, session_id))
    assert f"{LONG}7" in text and f"{LONG}0" not in text
    reply = app.post(f"/v1/sessions/{session_id}/items", {"items": LONG * 8})
    assert app.error(reply)[:2] == (400, "context_length_exceeded"), "nothing makes room for it"


def test_what_no_compaction_can_make_room_for_is_refused(app: RunningApp) -> None:
    for policy in ("error", "compact", "truncate_oldest"):
        session_id = app.session(context={"max_tokens": 300, "on_overflow": policy})
        reply = app.post(f"/v1/sessions/{session_id}/turns", {"input": LONG * 8})
        assert app.error(reply)[:2] == (400, "context_length_exceeded"), policy
        assert app.turn(session_id, "short")["status"] == "completed"


@pytest.mark.parametrize("policy", ["compact", "truncate_oldest"])
@pytest.mark.parametrize("route", ["turns", "items"])
def test_an_input_that_never_fits_costs_the_history_nothing(
    app: RunningApp, policy: str, route: str
) -> None:
    context = {"max_tokens": 400, "on_overflow": policy, "compact_at": 1.0}
    session_id = app.session(instructions="Be brief.", context=context)
    path = f"/v1/sessions/{session_id}"
    app.engine.script = says("Hello there.")
    for number in range(3):
        app.turn(session_id, f"{LONG}{number}", max_output_tokens=16)
    before, num_asked = tokens(app, session_id), len(app.engine.requests)
    for text in (LONG * 8, LONG * 200):  # known from its tokens, and from its length alone
        body = {"input": text} if route == "turns" else {"items": text}
        refused = app.post(f"{path}/{route}", body)
        assert app.error(refused)[:2] == (400, "context_length_exceeded"), refused.text
    assert tokens(app, session_id) == before and len(app.engine.requests) == num_asked
    # One that fits behind the head alone gets the room, though less is kept than compact_to says.
    room = 400 - len(full_render(("system", "Be brief."))) - 60
    text = "word " * room
    while len(ids_of(text)) > room:
        text = text[:-5]
    body = {"input": text} if route == "turns" else {"items": text}
    assert app.post(f"{path}/{route}", body).status_code == 200
    after = default_assets().tokenizer.decode(tokens(app, session_id))
    assert text.strip() in after and f"{LONG}1" not in after


def test_events_tell_of_a_compaction(tmp_path: Path) -> None:
    with RunningApp(tmp_path, says("Hello there.")) as app:
        session_id = with_turns(app, 2)
        with app.http.stream("GET", f"/v1/sessions/{session_id}/events") as reply:
            events = sse_events(reply)
            next(events)
            app.post(f"/v1/sessions/{session_id}/compact", {})
            seen = []
            for event in events:
                seen.append(event["type"])
                if event["type"] == "session.compacted":
                    break
        assert "session.compaction_started" in seen and "session.history_replaced" in seen


def test_a_session_that_is_deleted_meanwhile_ends_its_compaction_as_not_found(
    app: RunningApp,
) -> None:
    session_id = with_turns(app, 2)
    num_before = len(app.engine.requests)
    app.engine.pause()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compaction = pool.submit(app.post, f"/v1/sessions/{session_id}/compact", {})
        until(lambda: len(app.engine.requests) > num_before)
        assert app.http.delete(f"/v1/sessions/{session_id}").status_code == 200
        assert app.error(compaction.result())[:2] == (404, "session_not_found")
    app.engine.resume()


def test_a_turn_that_waits_for_room_ends_with_its_session(app: RunningApp) -> None:
    context = {"max_tokens": 400, "on_overflow": "compact", "compact_at": 1.0}
    session_id = app.session(context=context)
    path = f"/v1/sessions/{session_id}"
    app.engine.script = says("Hello there.")
    while app.get(path).json()["num_tokens"] < 280:
        app.turn(session_id, LONG, max_output_tokens=16)
    app.engine.pause()
    body = {"input": LONG * 2, "stream": True, "max_output_tokens": 16}
    with app.http.stream("POST", f"{path}/turns", json=body) as reply:
        events = sse_events(reply)
        next(events)
        with httpx.Client(base_url=app.url, timeout=30) as http:
            assert http.delete(path).status_code == 200
        last = list(events)[-1]
    app.engine.resume()
    assert last["type"] in ("turn.cancelled", "turn.failed"), last


def test_of_two_compactions_at_once_one_is_told_so(app: RunningApp) -> None:
    session_id = with_turns(app, 2)
    num_before = len(app.engine.requests)
    app.engine.pause()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        path = f"/v1/sessions/{session_id}/compact"
        both = [pool.submit(app.post, path, {}) for _ in range(4)]
        done, waits = concurrent.futures.wait(both, timeout=60, return_when="FIRST_COMPLETED")
        while len(done) < 3:
            more, waits = concurrent.futures.wait(waits, return_when="FIRST_COMPLETED")
            done |= more
        app.engine.resume()
        assert {app.error(one.result())[:2] for one in done} == {(409, "compaction_in_progress")}
        assert [one.result().status_code for one in waits] == [200]
    asked = [r for r in app.engine.requests[num_before:] if SUMMARY_REQUEST in text_of(r.token_ids)]
    assert len(asked) == 1
