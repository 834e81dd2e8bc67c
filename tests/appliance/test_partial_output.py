# SPDX-License-Identifier: Apache-2.0
"""Tool output in pieces: the history is that of one append, its KV is there before the end."""

from __future__ import annotations

import random

import pytest

from engine.transport import unpack_ids
from tests.appliance.test_tool_calls import TOOLS, calls_text
from tests.fakes.appliance import Json, RunningApp, says, until

WORDS = "def read(path): return open(path).read()  # naive cafe \u00e9\u4e2d\n"
OUTPUT = "".join(f"{n:4d}: {WORDS}" for n in range(40))


def waiting_session(app: RunningApp, num_calls: int = 1) -> tuple[str, list[str]]:
    """A session that waits for outputs, and the ids of its calls."""
    calls = [("ls", f'{{"path": "p{n}"}}') for n in range(num_calls)]
    app.engine.script = says(calls_text(*calls), "Fine.")
    session_id = app.session(tools=TOOLS)
    turn = app.turn(session_id, "look")
    return session_id, [item["call_id"] for item in turn["output"]]


def send(app: RunningApp, session_id: str, text: str, call_id: str, **fields: object) -> Json:
    body = {"items": text, "call_id": call_id, "partial": True, **fields}
    reply = app.post(f"/v1/sessions/{session_id}/items", body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def tokens(app: RunningApp, session_id: str) -> list[int]:
    return list(app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"])


@pytest.mark.parametrize("seed", range(4))
def test_pieces_become_the_ids_of_one_append(app: RunningApp, seed: int) -> None:
    whole_id, (call_id,) = waiting_session(app)
    item = {"type": "function_call_output", "call_id": call_id, "output": OUTPUT}
    whole = app.post(f"/v1/sessions/{whole_id}/items", {"items": [item]}).json()
    pieces_id, (call_id,) = waiting_session(app)
    before = tokens(app, pieces_id)
    rng, start = random.Random(seed), 0
    while start < len(OUTPUT):
        end = start + rng.randint(1, 700)
        answer = send(app, pieces_id, OUTPUT[start:end], call_id)
        assert answer["partial"] == {"call_id": call_id, "num_chars": min(end, len(OUTPUT))}
        assert tokens(app, pieces_id) == before
        start = end
    sealed = send(app, pieces_id, "", call_id, final=True)
    assert sealed["added_tokens"] == whole["added_tokens"]
    assert sealed["revision"] == whole["revision"] and sealed["open_calls"] == []
    assert tokens(app, pieces_id) == tokens(app, whole_id)
    last = app.get(f"/v1/sessions/{pieces_id}/items").json()["data"][-1]
    assert (last["output"], last["status"]) == (OUTPUT, "completed")


def test_most_of_the_output_is_in_the_cache_before_the_tool_has_ended(app: RunningApp) -> None:
    session_id, (call_id,) = waiting_session(app)
    num_before = len(app.engine.requests)
    for start in range(0, len(OUTPUT), 500):
        send(app, session_id, OUTPUT[start : start + 500], call_id)
    until(lambda: len(app.engine.requests) >= num_before + 3)
    prefills = app.engine.requests[num_before:]
    send(app, session_id, "the end", call_id, final=True)
    history = tokens(app, session_id)
    computed = [unpack_ids(r.token_ids).tolist() for r in prefills]
    for ids in computed:
        assert history[: len(ids)] == ids  # nothing was computed that is not used
    turn = app.turn(session_id, [], max_output_tokens=8)
    assert turn["x_cache"]["l1"] >= max(map(len, computed)) - 1
    assert turn["x_cache"]["l1"] > len(history) - 250


def test_a_piece_that_is_sent_again_counts_once(app: RunningApp) -> None:
    session_id, (call_id,) = waiting_session(app)
    send(app, session_id, "abc", call_id, offset=0)
    send(app, session_id, "abc", call_id, offset=0)
    send(app, session_id, "def", call_id, offset=3)
    assert send(app, session_id, "bc", call_id, offset=1)["partial"]["num_chars"] == 6
    assert send(app, session_id, "efg", call_id, offset=4)["partial"]["num_chars"] == 7
    for offset, piece, param in ((9, "x", "offset"), (0, "other", "items")):
        body = {"items": piece, "call_id": call_id, "partial": True, "offset": offset}
        reply = app.post(f"/v1/sessions/{session_id}/items", body)
        assert app.error(reply) == (400, "invalid_value", param)
    send(app, session_id, "h", call_id, offset=7, final=True)
    last = app.get(f"/v1/sessions/{session_id}/items").json()["data"][-1]
    assert last["output"] == "abcdefgh"


def test_pieces_of_two_calls_and_a_restart_do_not_mix(app: RunningApp) -> None:
    session_id, (one, two) = waiting_session(app, 2)
    send(app, session_id, "one ", one)
    send(app, session_id, "two ", two)
    app.restart()
    send(app, session_id, "more", two, final=True)
    assert app.get(f"/v1/sessions/{session_id}").json()["status"] == "requires_action"
    final: Json = {"type": "function_call_output", "call_id": one, "output": "x"}
    final["status"] = "failed"
    body = {"items": [final], "call_id": one, "final": True}
    assert app.post(f"/v1/sessions/{session_id}/items", body).status_code == 200
    items = app.get(f"/v1/sessions/{session_id}/items").json()["data"][-2:]
    assert [(i["output"], i["status"]) for i in items] == [
        ("two more", "completed"),
        ("one x", "failed"),
    ]


def test_a_call_that_is_closed_for_the_client_keeps_what_it_had_put_out(app: RunningApp) -> None:
    session_id, (call_id,) = waiting_session(app)
    send(app, session_id, "half of it", call_id)
    reply = app.post(f"/v1/sessions/{session_id}/turns", {"input": "stop that"})
    assert app.error(reply)[:2] == (422, "unresolved_tool_calls")
    turn = app.turn(session_id, "stop that", auto_close_calls=True)
    output = turn["input"][0]
    assert (output["output"], output["status"]) == ("half of it", "interrupted")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"items": "x", "partial": True}, 400, "missing_field", "call_id"),
        ({"items": "x", "partial": True, "call_id": "call_x"}, 422, "unknown_call_id", "call_id"),
        ({"items": "x", "final": True, "call_id": "call_x"}, 422, "unknown_call_id", "call_id"),
        ({"items": "x", "call_id": "call_x"}, 400, "invalid_value", "call_id"),
        ({"items": [], "offset": 1}, 400, "invalid_value", "offset"),
        ({"items": [{"role": "user", "content": "x"}], "partial": True, "call_id": "c"}, 400,
         "invalid_value", "items"),
        ({"items": [{"type": "function_call_output", "call_id": "d", "output": ""}],
          "partial": True, "call_id": "c"}, 400, "invalid_value", "items[0].call_id"),
        ({"items": "word " * 400_000, "partial": True, "call_id": None}, 400,
         "context_length_exceeded", "items"),
    ],
)  # fmt: skip
def test_a_bad_piece_is_refused(
    app: RunningApp, body: Json, status: int, code: str, param: str
) -> None:
    session_id, (call_id,) = waiting_session(app)
    if body.get("call_id", "") is None:
        body = {**body, "call_id": call_id}
    reply = app.post(f"/v1/sessions/{session_id}/items", body)
    assert app.error(reply) == (status, code, param)
    assert send(app, session_id, "ok", call_id)["partial"]["num_chars"] == 2
