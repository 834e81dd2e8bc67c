# SPDX-License-Identifier: Apache-2.0
"""Cancelling: what is kept, what never is, and that the next turn reuses it."""

from __future__ import annotations

import pytest

from tests.fakes.appliance import Json, RunningApp, ids_of, says, sse_events, until

TOOL = {
    "type": "function",
    "name": "ls",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}


def run_until(
    app: RunningApp, session_id: str, is_enough: str, **fields: object
) -> tuple[Json, list[Json]]:
    """Stream a turn, cancel it at the first event of this type; (cancel's answer, all events)."""
    path = f"/v1/sessions/{session_id}/turns"
    events: list[Json] = []
    answer: Json = {}
    body = {"input": "go", "stream": True, **fields}
    with app.http.stream("POST", path, json=body) as reply:
        for event in sse_events(reply):
            events.append(event)
            if event["type"] == is_enough and not answer:
                answer = app.post(f"{path}/{event['turn_id']}/cancel").json()
    return answer, events


def test_a_cancelled_turn_keeps_its_text_and_the_next_turn_reuses_it(app: RunningApp) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    session_id = app.session()
    answer, events = run_until(app, session_id, "response.output_text.delta")
    assert events[-1]["type"] == "turn.cancelled" and events[-1]["turn"] == answer
    assert answer["committed_tokens"] == answer["usage"]["output_tokens"] > 0
    assert answer["output"][0]["status"] == "incomplete"
    assert app.engine.aborted[-1] == answer["id"]
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert (session["status"], session["revision"]) == ("idle", 1)
    known = session["num_tokens"]
    app.engine.script, app.engine.hold_at = says("ok"), None
    turn = app.turn(session_id, "and now?")
    assert turn["x_cache"]["l1"] == known - 1 and turn["cache"]["miss"] is None


def test_cancel_is_idempotent_and_harmless_after_the_end(app: RunningApp) -> None:
    session_id = app.session()
    turn = app.turn(session_id)
    path = f"/v1/sessions/{session_id}/turns/{turn['id']}/cancel"
    assert app.post(path).json() == turn == app.post(path).json()


@pytest.mark.parametrize(
    ("done", "num_calls"), [("response.output_item.added", 0), ("response.output_item.done", 1)]
)
def test_a_cancelled_turn_keeps_no_call_whole_or_half(
    app: RunningApp, done: str, num_calls: int
) -> None:
    call = '{"name": "ls", "arguments": {"path": "src"}}'
    app.engine.script = says(f"Let me look. <tool_call>[{call}, {call}, {call}]</tool_call>")
    # In the midst of a call, behind so many whole ones.
    said = "Let me look. <tool_call>[" + f"{call}, " * num_calls + call[:32]
    app.engine.hold_at = len(ids_of(said))
    session_id = app.session(tools=[TOOL])
    path = f"/v1/sessions/{session_id}/turns"
    with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
        for event in sse_events(reply):
            if event["type"] == done and event["item"]["type"] == "function_call":
                answer = app.post(f"{path}/{event['turn_id']}/cancel").json()
                break
    assert answer["status"] == "cancelled"
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["output"][0]["content"][0]["text"] == "Let me look."
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert (session["status"], session["open_calls"]) == ("idle", [])
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    text = app.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nLet me look.")
    app.engine.script, app.engine.hold_at = says("ok"), None
    turn = app.turn(session_id, "again")
    assert turn["status"] == "completed" and turn["cache"]["miss"] is None


def test_store_partial_false_leaves_the_history_as_it_was(app: RunningApp) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    session_id = app.session()
    answer, _ = run_until(app, session_id, "response.output_text.delta", store_partial=False)
    assert (answer["status"], answer["committed"]) == ("cancelled", False)
    assert (answer["committed_tokens"], answer["output"]) == (0, [])
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert (session["revision"], session["num_tokens"], session["status"]) == (0, 0, "idle")


def test_a_turn_can_be_cancelled_before_its_first_token(app: RunningApp) -> None:
    app.engine.prefill_s = 3600.0  # whoever waited for it would wait in vain
    session_id = app.session()
    answer, events = run_until(app, session_id, "turn.queued")
    assert answer["status"] == "cancelled"
    assert answer["output"] == [] and answer["committed_tokens"] == 0
    app.engine.prefill_s = 0.0
    assert app.turn(session_id, "again")["status"] == "completed"


def test_closing_a_session_stops_its_turn_and_is_idempotent(app: RunningApp) -> None:
    app.engine.script = says("word " * 400)
    app.engine.hold_at = 5
    session_id = app.session()
    path = f"/v1/sessions/{session_id}/turns"
    with app.http.stream("POST", path, json={"input": "go", "stream": True}) as reply:
        events = sse_events(reply)
        turn_id = next(events)["turn_id"]
        for _ in range(2):
            closed = app.http.delete(f"/v1/sessions/{session_id}")
            assert closed.json() == {"id": session_id, "object": "session", "deleted": True}
        assert list(events)[-1]["type"] == "turn.cancelled"
    until(lambda: turn_id in app.engine.aborted)  # the engine may not have had it yet
    assert app.get(f"/v1/sessions/{session_id}").status_code == 404
    assert app.get(f"{path}/{turn_id}/events").status_code == 404


def history_of(app: RunningApp, session_id: str) -> str:
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    return str(app.post("/detokenize", {"tokens": ids}).json()["prompt"])


CALL = '<tool_call>[{"name": "ls", "arguments": {"path": "src"}}]</tool_call>'


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["}"]},
        {"stop": ["src"]},
        {"stop": ["call"]},
        {"max_output_tokens": 1},
        {"max_output_tokens": 3},
        {"max_output_tokens": 12},
    ],
    ids=str,
)
def test_a_turn_that_ends_inside_its_call_commits_none_of_it_and_the_next_one_closes_it(
    app: RunningApp, fields: Json
) -> None:
    app.engine.script = says(CALL, "ok")
    session_id = app.session(tools=[TOOL])
    turn = app.turn(session_id, "go", tool_choice="required", **fields)
    assert (turn["output"], turn["committed_tokens"]) == ([], 0)
    assert history_of(app, session_id).endswith("go<|im_end|>\n<|im_start|>assistant\n")
    assert app.turn(session_id, "next")["status"] == "completed"
    assert (
        "go<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n"
    ) in history_of(app, session_id)


def test_a_turn_cancelled_before_its_first_token_leaves_an_empty_answer_that_is_closed(
    app: RunningApp,
) -> None:
    app.engine.prefill_s = 3600.0
    session_id = app.session()
    run_until(app, session_id, "turn.queued")
    app.engine.prefill_s = 0.0
    app.turn(session_id, "again")
    assert (
        "go<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n"
    ) in history_of(app, session_id)
