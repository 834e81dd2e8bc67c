# SPDX-License-Identifier: Apache-2.0
"""Tool calls through the session API: grammar text sent, calls parsed, arguments validated."""

from __future__ import annotations

import json

from engine import api
from tests.fakes.appliance import Json, RunningApp, default_assets, says

TOOLS: list[Json] = [
    {
        "type": "function",
        "name": "ls",
        "description": "List a folder",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
    {
        "type": "function",
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 3}},
            "required": ["n"],
        },
    },
]


def calls_text(*calls: tuple[str, str]) -> str:
    inner = ", ".join(f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls)
    return f"<tool_call>[{inner}]</tool_call>"


def test_a_required_call_is_forced_by_grammar_and_leaves_the_session_waiting(
    app: RunningApp,
) -> None:
    app.engine.script = says(calls_text(("ls", '{"path": "src"}')))
    session_id = app.session(tools=TOOLS)
    events = app.stream(session_id, "look", tool_choice="required")
    final = events[-1]
    assert final["stop_reason"] == "tool_use"
    call = final["items"][0]
    assert (call["name"], call["arguments"]) == ("ls", '{"path": "src"}')
    deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert "".join(deltas) == call["arguments"]
    done = next(e for e in events if e["type"].endswith("arguments.done"))
    assert done["arguments"] == call["arguments"]
    grammar = app.engine.requests[-1].grammar
    assert grammar is not None and grammar.kind is api.GrammarKind.STRUCTURAL_TAG
    assert "<tool_call>" in json.dumps(json.loads(grammar.text))
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert session["status"] == "requires_action"
    assert session["open_calls"] == [{"call_id": call["call_id"], "name": "ls"}]


def test_two_parallel_calls_get_ids_of_their_own_and_results_go_back_in_one_message(
    app: RunningApp,
) -> None:
    app.engine.script = says(
        calls_text(("ls", '{"path": "a"}'), ("count", '{"n": 4}')), "All done."
    )
    session_id = app.session(tools=TOOLS)
    turn = app.turn(session_id, "both", tool_choice="required", min_tool_calls=2)
    first, second = turn["output"]
    assert first["call_id"] != second["call_id"] and first["id"] != second["id"]
    outputs = [
        {"type": "function_call_output", "call_id": first["call_id"], "output": "x.py"},
        {"type": "function_call_output", "call_id": second["call_id"], "output": "4"},
    ]
    assert app.turn(session_id, outputs)["stop_reason"] == "end_turn"
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    text = default_assets().tokenizer.decode(ids)
    assert "<tool_response>\nx.py\n</tool_response>\n<tool_response>\n4\n</tool_response>" in text
    assert app.get(f"/v1/sessions/{session_id}").json()["status"] == "idle"


def test_arguments_are_kept_exactly_as_they_were_sampled(app: RunningApp) -> None:
    odd = '{ "path" :"a\\u0062c" }'
    app.engine.script = says(calls_text(("ls", odd)))
    session_id = app.session(tools=TOOLS)
    assert app.turn(session_id, "x")["output"][0]["arguments"] == odd
    listed = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    assert listed[-1]["arguments"] == odd


def test_arguments_are_validated_against_the_original_schema_and_the_report_names_the_path(
    app: RunningApp,
) -> None:
    app.engine.script = says(calls_text(("count", '{"n": 1}')))
    events = app.stream(app.session(tools=TOOLS), "x")
    report = events[-1]["turn"]["x_invalid_calls"]
    assert report[0]["call_id"] == events[-1]["items"][0]["call_id"]
    assert report[0]["problems"][0]["path"] == "arguments.n"
    done = [e for e in events if e["type"] == "response.output_item.done"][-1]
    assert done["x_invalid_arguments"] == report[0]["problems"]


def test_a_schema_the_grammar_cannot_hold_gets_a_looser_one_announced_for_that_tool_alone(
    app: RunningApp,
) -> None:
    def refuse_count(spec: api.GrammarSpec) -> tuple[str, str] | None:
        is_strict = '"minimum":5' in spec.text.replace(" ", "")
        return ("grammar_budget_exceeded", "too slow") if is_strict else None

    app.engine.grammar_check = refuse_count
    app.engine.script = says(calls_text(("count", '{"n": "many"}')))
    tools = json.loads(json.dumps(TOOLS).replace('"minimum": 3', '"minimum": 5'))
    turn = app.turn(app.session(tools=tools), "x", tool_choice="required")
    assert {entry["tool"] for entry in turn["x_grammar_fallback"]} == {"count"}
    grammar = app.engine.requests[-1].grammar
    assert grammar is not None and '"path"' in grammar.text and "minimum" not in grammar.text
    assert turn["x_invalid_calls"][0]["problems"][0]["path"] == "arguments.n"


def test_tool_choice_none_reads_markup_as_text(app: RunningApp) -> None:
    text = calls_text(("ls", '{"path": "a"}'))
    app.engine.script = says(text)
    turn = app.turn(app.session(tools=TOOLS), "x", tool_choice="none")
    assert turn["stop_reason"] == "end_turn"
    assert turn["output"][0]["content"][0]["text"] == text


def test_a_call_cut_by_the_output_limit_is_no_call_and_whole_ones_before_it_stay(
    app: RunningApp,
) -> None:
    app.engine.script = says(calls_text(*[("ls", '{"path": "src/lib"}')] * 3))
    session_id = app.session(tools=TOOLS)
    events = app.stream(session_id, "x", max_output_tokens=40)
    final = events[-1]
    assert (final["type"], final["reason"]) == ("turn.incomplete", "max_output_tokens")
    num_calls = len(final["items"])
    assert num_calls in (1, 2)
    assert all(json.loads(item["arguments"]) == {"path": "src/lib"} for item in final["items"])
    assert final["turn"]["committed_tokens"] < 40
    cut = [e for e in events if e["type"] == "response.output_item.done"][-1]
    assert cut["item"]["status"] == "incomplete"
    assert len(app.get(f"/v1/sessions/{session_id}").json()["open_calls"]) == num_calls
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "y"}
        for item in final["items"]
    ]
    app.engine.script = says("ok")
    turn = app.turn(session_id, outputs)
    assert turn["status"] == "completed" and turn["cache"]["miss"] is None


def test_results_may_be_appended_one_by_one_before_the_turn(app: RunningApp) -> None:
    app.engine.script = says(
        calls_text(("ls", '{"path": "a"}'), ("ls", '{"path": "b"}')), "Thanks."
    )
    session_id = app.session(tools=TOOLS)
    first, second = app.turn(session_id, "both")["output"]

    def output(call: Json) -> Json:
        return {"type": "function_call_output", "call_id": call["call_id"], "output": "z"}

    appended = app.post(f"/v1/sessions/{session_id}/items", {"items": [output(second)]}).json()
    assert appended["open_calls"] == [first["call_id"]]
    assert app.get(f"/v1/sessions/{session_id}").json()["status"] == "requires_action"
    reply = app.post(f"/v1/sessions/{session_id}/items", {"items": [output(second)]})
    assert app.error(reply) == (422, "unknown_call_id", "items[0].call_id")
    assert app.turn(session_id, [output(first)])["status"] == "completed"


def test_a_response_format_reaches_the_engine_as_a_grammar(app: RunningApp) -> None:
    app.engine.script = says('{"ok": true}')
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    turn = app.turn(
        app.session(),
        "x",
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": schema}},
    )
    assert turn["output"][0]["content"][0]["text"] == '{"ok": true}'
    grammar = app.engine.requests[-1].grammar
    assert grammar is not None and '"boolean"' in grammar.text
