# SPDX-License-Identifier: Apache-2.0
"""A client that sends its history back gets the server's own tokens as the prefix."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from appliance.recall import ANSWER_BYTES, Recall, Recalled, chain_keys, next_key, root_key
from sessions.token_codec import decode_ids
from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says

SCHEMA: Json = {"type": "object", "properties": {"path": {"type": "string"}}}
# The spacing is the model's own: no client sends it back like this.
CALL = '<tool_call>[{"name": "ls", "arguments": {  "path":"a" }}]</tool_call>'
ANSWER = f"I look.\n {CALL}"


def ids(app: RunningApp, index: int) -> list[int]:
    return decode_ids(app.engine.requests[index].token_ids)


def prompt_text(app: RunningApp) -> str:
    return default_assets().tokenizer.decode(ids(app, -1), with_control=True)


def assert_continues(app: RunningApp) -> None:
    """The last prompt starts with the one before it and the tokens that answered it."""
    before = [*ids(app, -2), *ids_of(ANSWER), app.engine.eos_id]
    assert ids(app, -1)[: len(before)] == before
    assert "<tool_response>\nx.py\n</tool_response>" in prompt_text(app)


def chat(app: RunningApp, messages: list[Json], **fields: Any) -> Json:
    tools = [{"type": "function", "function": {"name": "ls", "parameters": SCHEMA}}]
    body = {"model": "default", "messages": messages, "tools": tools, **fields}
    reply = app.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def compacted(message: Json) -> Json:
    """As clients send a message back: arguments re-serialised, empty content."""
    call = message["tool_calls"][0]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    call = {**call, "function": {"name": "ls", "arguments": arguments}}
    return {"role": "assistant", "content": message["content"], "tool_calls": [call]}


def test_chat_history_keeps_its_sampled_tokens(app: RunningApp) -> None:
    app.engine.script = says(ANSWER)
    history: list[Json] = [{"role": "user", "content": "chat"}]
    for _ in range(3):
        message = compacted(chat(app, history)["choices"][0]["message"])
        call_id = message["tool_calls"][0]["id"]
        history += [message, {"role": "tool", "tool_call_id": call_id, "content": "x.py"}]
    assert_continues(app)
    usage = chat(app, history)["usage"]
    known = len(ids(app, -2)) + len(ids_of(ANSWER)) + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 1


def test_messages_history_keeps_its_sampled_tokens(app: RunningApp) -> None:
    app.engine.script = says(ANSWER)
    history: list[Json] = [{"role": "user", "content": "messages"}]
    body: Json = {"model": "default", "max_tokens": 99, "messages": history}
    body["tools"] = [{"name": "ls", "input_schema": SCHEMA}]
    for _ in range(2):
        content = app.post("/v1/messages", body).json()["content"]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "x.py"}
        history += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]
    assert_continues(app)


def test_responses_history_keeps_its_sampled_tokens(app: RunningApp) -> None:
    app.engine.script = says(ANSWER)
    body: Json = {"model": "default", "input": "responses"}
    body["tools"] = [{"type": "function", "name": "ls", "parameters": SCHEMA}]
    first = app.post("/v1/responses", body).json()
    result = {
        "type": "function_call_output",
        "call_id": first["output"][-1]["call_id"],
        "output": "x.py",
    }
    user = {"role": "user", "content": "responses"}
    app.post("/v1/responses", {**body, "input": [user, *first["output"], result]})
    assert_continues(app)
    del app.engine.requests[-1]
    app.post("/v1/responses", {**body, "input": [result], "previous_response_id": first["id"]})
    assert_continues(app)


def test_what_a_client_changed_is_rendered_anew(app: RunningApp) -> None:
    app.engine.script = says(ANSWER)
    history: list[Json] = [{"role": "user", "content": "changed"}]
    message = compacted(chat(app, history)["choices"][0]["message"])
    message["tool_calls"][0]["function"]["arguments"] = '{"path": "b"}'
    call_id = message["tool_calls"][0]["id"]
    chat(app, [*history, message, {"role": "tool", "tool_call_id": call_id, "content": "x"}])
    assert '{"path": "b"}' in prompt_text(app) and '"path":"a"' not in prompt_text(app)


def test_a_cut_answer_is_rendered_as_the_client_sends_it(app: RunningApp) -> None:
    app.engine.script = says("one two three")
    history: list[Json] = [{"role": "user", "content": "cut"}]
    message = chat(app, history, max_tokens=2)["choices"][0]["message"]
    chat(app, [*history, message, {"role": "user", "content": "go on"}])
    assert f"{message['content']}<|im_end|>\n<|im_start|>user\ngo on" in prompt_text(app)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({"session-id": "s1"}, {"prompt_cache_key": "k"}, "s1"),
        ({"x-claude-code-session-id": "s2"}, {}, "s2"),
        ({}, {"prompt_cache_key": "k"}, "k"),
        ({}, {"prompt_cache_key": "two\r\nlines"}, None),
        ({}, {}, None),
    ],
)
def test_the_name_a_client_gives_its_conversation_is_said_back(
    app: RunningApp, path: str, headers: Json, fields: Json, name: str | None
) -> None:
    user = [{"role": "user", "content": "Hi"}]
    body: Json = {"model": "default", "max_tokens": 9, "messages": user, "input": "Hi", **fields}
    for stream in (False, True):
        reply = app.post(f"/v1/{path}", {**body, "stream": stream}, headers=headers)
        assert (reply.status_code, reply.headers.get("x-session-id")) == (200, name)


def test_a_session_in_the_user_s_id_is_a_name_too(app: RunningApp) -> None:
    user = [{"role": "user", "content": "Hi"}]
    body: Json = {"model": "default", "max_tokens": 9, "messages": user}
    for user_id, name in (('{"session_id":"u1"}', "u1"), ("{", None), ("someone", None)):
        reply = app.post("/v1/messages", {**body, "metadata": {"user_id": user_id}})
        assert reply.headers.get("x-session-id") == name


@pytest.mark.parametrize(
    ("sampled", "sent_back"),
    [("12345678901234567890", "12345678901234567000"), ("-0.0", "0"), ("1E+2", "100")],
)
def test_numbers_are_compared_as_clients_with_doubles_write_them(
    sampled: str, sent_back: str
) -> None:
    keys = [
        next_key(b"", {"role": "assistant", "tool_calls": [{"function": f}]})
        for f in ({"name": "f", "arguments": f'{{"n": {n}}}'} for n in (sampled, sent_back))
    ]
    assert keys[0] == keys[1]


def test_another_tenant_has_another_tree() -> None:
    message = {"role": "user", "content": "x"}
    assert next_key(root_key("a", ""), message) != next_key(root_key("b", ""), message)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"arguments": '{"b":[1,2],"a":"\\u00e9"}'}, True),
        ({"arguments": '{"b":[2,1],"a":"é"}'}, False),
        ({"arguments": '{"a":"é","b":[1.0,2e0]}'}, True),
        ({"arguments": '{"a":"é","b":[1.5,2]}'}, False),
        ({"arguments": '{"a":"é","b":[1e999,2]}'}, False),
        ({"name": "g"}, False),
    ],
)
def test_calls_are_compared_as_parsed_json(change: Json, is_same: bool) -> None:
    function = {"name": "f", "arguments": '{"a": "é", "b": [1, 2]}'}
    keys = [
        chain_keys(b"", [{"role": "assistant", "tool_calls": [{"id": "c", "function": f}]}])
        for f in (function, {**function, **change})
    ]
    assert (keys[0] == keys[1]) is is_same


def test_recall_is_bounded_and_forgets_what_was_not_used_for_longest() -> None:
    recall = Recall(max_bytes=2 * ANSWER_BYTES + 8)
    for name in (b"a", b"b"):
        recall.put([name], Recalled(token_ids=b"1234", is_closed=True))
    assert recall.longest([b"a"]) is not None
    recall.put([b"c"], Recalled(token_ids=b"1234", is_closed=True))
    assert recall.longest([b"b"]) is None
    found = recall.longest([b"a", b"c", b"z"])
    assert found is not None and found[0] == 2


def test_a_long_conversation_is_remembered_once_not_once_a_turn() -> None:
    recall = Recall()
    keys, ids = [], b""
    for turn in range(200):
        keys += [b"asked%d" % turn, b"said%d" % turn]
        ids += bytes(400)
        recall.put(keys, Recalled(token_ids=ids, is_closed=True))
    assert recall.num_bytes == len(ids) + 200 * ANSWER_BYTES
    assert recall.longest([*keys, b"new"]) == (400, Recalled(token_ids=ids, is_closed=True))


def test_an_answer_whose_prompt_was_rendered_anew_stands_for_itself() -> None:
    """The same words under other ids: what is built on them keeps the ids it was sampled behind."""
    recall = Recall()
    recall.put([b"k1"], Recalled(token_ids=b"aaaa", is_closed=True))
    recall.put([b"k1", b"k2"], Recalled(token_ids=b"bbbbcccc", is_closed=False))
    recall.put([b"k1"], Recalled(token_ids=b"bbbb", is_closed=True))
    found = recall.longest([b"k1", b"k2"])
    assert found == (2, Recalled(token_ids=b"bbbbcccc", is_closed=False))


@pytest.mark.parametrize("seed", range(20))
def test_a_random_tree_is_remembered_as_it_was_put(seed: int) -> None:
    """Against a plain table of whole conversations, with room for some of them."""
    random = Random(seed)
    recall = Recall(max_bytes=40 * ANSWER_BYTES)
    lines: list[tuple[list[bytes], bytes]] = [([], b"")]
    whole: dict[bytes, bytes] = {}
    for step in range(300):
        keys, ids = random.choice(lines[-30:])
        keys = [*keys, b"%d" % step]
        found = recall.longest(keys)
        if found is not None:
            assert whole[keys[found[0] - 1]] == found[1].token_ids
            ids = found[1].token_ids
        ids += random.randbytes(4 * random.randint(1, 9))
        recall.put(keys, Recalled(token_ids=ids, is_closed=True))
        whole[keys[-1]] = ids
        lines.append((keys, ids))
        assert recall.num_bytes <= recall.max_bytes
        newest = recall.longest(keys)
        assert newest is not None and newest[1].token_ids == ids
