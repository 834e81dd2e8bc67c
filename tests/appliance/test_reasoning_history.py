# SPDX-License-Identifier: Apache-2.0
"""Reasoning in a history: kept as sampled, or dropped once the user speaks; how much, by effort."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from engine.text.assets import TextAssets
from engine.text.chat_template import ChatTemplate
from tests.fakes.appliance import Json, RunningApp, default_assets, says

# ChatML as reasoning models have it: reasoning is shown only behind the last message of a user.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call></tool_call> XML tags"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
THOUGHT = "They greet me, so I greet them.\n</think>\n\nHello there."
CALL = (
    'I must look first.\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {"b":1, "a": 2}}\n'
    "</tool_call>"
)
TOOL: Json = {"type": "function", "name": "ls", "parameters": {"type": "object"}}


def thinking_assets() -> TextAssets:
    assets = default_assets()
    template = ChatTemplate(TEMPLATE, assets.tokenizer)
    return dataclasses.replace(assets, chat_template=template)


@pytest.fixture(scope="module")
def shared_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    with RunningApp(tmp_path_factory.mktemp("h"), assets=thinking_assets()) as running:
        yield running


@pytest.fixture
def app(shared_thinker: RunningApp) -> RunningApp:
    shared_thinker.engine.script = says(THOUGHT)
    return shared_thinker


def text_of(app: RunningApp, session_id: str) -> str:
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    return default_assets().tokenizer.decode(ids, with_control=True)


def session(app: RunningApp, history: str, **fields: object) -> str:
    return app.session(reasoning={"history": history}, **fields)


def test_kept_reasoning_stays_as_it_was_sampled(app: RunningApp) -> None:
    session_id = session(app, "keep")
    for text in ("Hi", "Again"):
        turn = app.turn(session_id, text)
        assert turn["cache"]["miss"] is None
    assert text_of(app, session_id).count("They greet me") == 2
    cache = app.get(f"/v1/sessions/{session_id}/cache").json()["reasoning"]
    total = app.get(f"/v1/sessions/{session_id}").json()["num_tokens"]
    assert cache["history"] == "keep" and cache["recompute_tokens"] == total
    assert 2 * 7 <= cache["tokens"] < total / 2


def test_reasoning_before_the_last_user_is_dropped_as_a_full_render_drops_it(
    app: RunningApp,
) -> None:
    session_id = session(app, "drop_before_last_user")
    app.turn(session_id, "Hi")
    assert "They greet me" in text_of(app, session_id)
    turn = app.turn(session_id, "Again")
    assert turn["cache"]["miss"]["reason"] == "reasoning_dropped"
    ids = app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"]
    whole = app.services.assets.chat_template.render(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello there."},
            {"role": "user", "content": "Again"},
        ],
        add_generation_prompt=True,
    )
    assert ids[: len(whole)] == whole
    assert text_of(app, session_id).count("They greet me") == 1
    # The transcript keeps what was thought.
    items = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    assert [i["type"] for i in items].count("reasoning") == 2
    assert app.get(f"/v1/sessions/{session_id}").json()["revision"] == 2


def test_reasoning_in_a_tool_loop_stays_until_the_user_speaks(app: RunningApp) -> None:
    app.engine.script = says(CALL, THOUGHT)
    session_id = session(app, "drop_before_last_user", tools=[TOOL])
    turn = app.turn(session_id, "Look")
    call = turn["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    turn = app.turn(session_id, [output])
    assert turn["cache"]["miss"] is None
    assert "I must look first" in text_of(app, session_id)
    turn = app.turn(session_id, "Thanks", expect_revision=2)
    text = text_of(app, session_id)
    assert "I must look first" not in text and text.count("They greet me") == 1
    assert '{"name": "ls", "arguments": {"b":1, "a": 2}}' in text  # as it was sampled
    assert turn["revision"] == 3
    first = app.get(f"/v1/sessions/{session_id}/turns").json()["data"][0]
    fork = app.post(f"/v1/sessions/{session_id}/fork", {"at": first["id"]}).json()["data"][0]
    assert fork["open_calls"][0]["call_id"] == call["call_id"]


def test_a_user_s_message_that_is_appended_drops_it_too(app: RunningApp) -> None:
    session_id = session(app, "drop_before_last_user")
    app.turn(session_id, "Hi")
    items = [{"role": "user", "content": "Again"}]
    reply = app.post(f"/v1/sessions/{session_id}/items", {"items": items})
    assert reply.status_code == 200 and "They greet me" not in text_of(app, session_id)
    app.turn(session_id, [])
    assert text_of(app, session_id).count("They greet me") == 1


def test_the_miss_of_dropped_reasoning_comes_once(app: RunningApp) -> None:
    session_id = session(app, "drop_before_last_user")
    app.turn(session_id, "Hi")
    app.engine.script = says("</think>\n\nNo thought.")
    app.turn(session_id, "Again")
    assert app.turn(session_id, "And again")["cache"]["miss"] is None


def test_an_update_says_what_dropping_costs(app: RunningApp) -> None:
    session_id = session(app, "keep", instructions="Be brief.")
    app.turn(session_id, "Hi")
    known = app.get(f"/v1/sessions/{session_id}/cache").json()["reasoning"]["recompute_tokens"]
    body = {"reasoning": {"history": "drop_before_last_user"}}
    reply = app.post(f"/v1/sessions/{session_id}", body).json()
    assert reply["x_invalidated_tokens"] == known > 0
    assert reply["reasoning"]["history"] == "drop_before_last_user"
    assert app.post(f"/v1/sessions/{session_id}", body).json()["x_invalidated_tokens"] == 0
    app.turn(session_id, "Again")
    assert text_of(app, session_id).count("They greet me") == 1


def test_an_answer_that_was_cut_is_still_closed_once(app: RunningApp) -> None:
    session_id = session(app, "drop_before_last_user")
    num = len(default_assets().tokenizer.encode(THOUGHT)) - 1
    turn = app.turn(session_id, "Hi", max_output_tokens=num)
    assert turn["status"] == "incomplete"
    app.turn(session_id, "Again")
    text = text_of(app, session_id)
    assert "Hello there<|im_end|>\n<|im_start|>user\nAgain" in text
    assert text.count("They greet me") == 1


def test_effort_reaches_the_template(app: RunningApp) -> None:
    app.engine.script = says("Hello there.")
    session_id = app.session(reasoning={"effort": "none"})
    turn = app.turn(session_id, "Hi")
    assert [item["type"] for item in turn["output"]] == ["message"]
    assert "<think>\n\n</think>" in text_of(app, session_id)
    app.engine.script = says(THOUGHT)
    reply = app.post(f"/v1/sessions/{session_id}", {"reasoning": {"effort": "high"}}).json()
    assert (reply["reasoning"]["effort"], reply["x_invalidated_tokens"]) == ("high", 0)
    turn = app.turn(session_id, "Again")
    assert [item["type"] for item in turn["output"]] == ["reasoning", "message"]
    assert turn["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    reply = app.post("/v1/sessions", {"model": "default", "reasoning": {"effort": "most"}})
    assert app.error(reply) == (400, "invalid_value", "reasoning.effort")
