# SPDX-License-Identifier: Apache-2.0
"""What agents send beside plain text: images, documents, old shapes, compressed bodies."""

from __future__ import annotations

import gzip
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.fakes.appliance import Json, RunningApp, default_assets, ids_of, says
from tests.fakes.prompts import prompt_text

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

IMAGE: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
URL: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SCHEMA: Json = {"type": "object", "properties": {"path": {"type": "string"}}}
OMITTED = "[image omitted: this model reads text only]"
CALL = '<tool_call>[{"name": "read", "arguments": {"path": "a.png"}}]</tool_call>'


def messages_body(result: Any, *beside: Json) -> Json:
    """What Claude Code sends when it has read an image."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.png"}}
    return {
        "model": "default",
        "max_tokens": 50,
        "tools": [{"name": "read", "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": result},
                    *beside,
                ],
            },
        ],
    }


def chat_body(result: Any) -> Json:
    function = {"name": "read", "arguments": '{"path": "a.png"}'}
    return {
        "model": "default",
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant",
             "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": result},
        ],
    }  # fmt: skip


def responses_body(result: Any) -> Json:
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    return {
        "model": "default",
        "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
        "input": [
            {"role": "user", "content": "look"},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": result},
        ],
    }


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/messages",
         messages_body([{"type": "text", "text": "a.png:"}, IMAGE]),
         "messages[2].content[0].content[1]"),
        ("/v1/messages", messages_body("a.png:", IMAGE), "messages[2].content[1]"),
        ("/v1/chat/completions", chat_body([{"type": "text", "text": "a.png:"}, URL]),
         "messages[2].content[1]"),
        ("/v1/responses",
         responses_body([{"type": "input_text", "text": "a.png:"},
                         {"type": "input_image", "image_url": "data:x"}]),
         "input[2].output[1]"),
    ],
)  # fmt: skip
def test_an_image_in_a_tool_s_result_is_a_word_to_the_model_and_to_the_client(
    app: RunningApp, caplog: pytest.LogCaptureFixture, path: str, body: Json, where: str
) -> None:
    with caplog.at_level(logging.WARNING, "appliance.api.dialect"):
        for stream in (False, True):
            reply = app.post(path, {**body, "stream": stream})
            assert reply.status_code == 200, reply.text
            assert json.dumps({"path": where, "type": "image"}, separators=(",", ":")) in reply.text
            assert "a.png:" in prompt_text(app) and OMITTED in prompt_text(app)
            assert "iVBOR" not in prompt_text(app)
    assert sum("image" in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages",
         {"max_tokens": 9, "messages": [{"role": "user", "content": [IMAGE]}]},
         "messages[0].content[0].type"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [URL]}]},
         "messages[0].content[0]"),
        ("/v1/responses",
         {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]"),
        ("/v1/messages",
         {"max_tokens": 9, "messages": [{"role": "user", "content": [
             {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}]}]},
         "messages[0].content[0].type"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "x"},
                       {"role": "assistant", "audio": {"id": "a"}}]},
         "messages[1].audio"),
    ],
)  # fmt: skip
def test_what_the_user_shows_and_the_model_cannot_read_is_refused(
    app: RunningApp, path: str, body: Json, param: str
) -> None:
    reply = app.post(path, {"model": "default", **body})
    assert app.error(reply) == (400, "unsupported_parameter", param)
    assert param in reply.json()["error"]["message"]


def test_documents_of_text_and_search_results_are_read(app: RunningApp) -> None:
    found = {
        "type": "search_result",
        "title": "Tides",
        "source": "x",
        "content": [{"type": "text", "text": "High at noon."}],
    }
    source: Json = {"type": "text", "media_type": "text/plain", "data": "All well."}
    plain = {"type": "document", "title": "Log", "source": source}
    source = {"type": "content", "content": [{"type": "text", "text": "Berth 3"}]}
    parts = {"type": "document", "source": source}
    reply = app.post("/v1/messages", messages_body([found, plain], parts))
    assert reply.status_code == 200 and "x_omitted" not in reply.json()
    assert "Tides\nHigh at noon.\nLog\nAll well." in prompt_text(app)
    assert "Berth 3" in prompt_text(app)


def test_a_call_that_was_cut_may_come_back_in_a_history(app: RunningApp) -> None:
    """A client that was told `length` keeps what it has seen of the call."""
    app.engine.script = says(CALL)
    body = chat_body("x")
    body["messages"] = body["messages"][:1]
    cut = {**body, "max_tokens": len(ids_of(CALL[: CALL.index(".png")]))}
    choice = app.post("/v1/chat/completions", cut).json()["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "length"
    assert call["function"] == {"name": "read", "arguments": '{"path": "a'}
    body["messages"] += [
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "[aborted]"},
    ]
    assert app.post("/v1/chat/completions", body).status_code == 200
    assert '"arguments": {"path": "a' in prompt_text(app)


def test_a_refusal_is_what_the_assistant_said(app: RunningApp) -> None:
    said = {"role": "assistant", "content": None, "refusal": "I will not."}
    messages = [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]
    app.post("/v1/chat/completions", {"model": "default", "messages": messages})
    assert "assistant\nI will not.<|im_end|>" in prompt_text(app)


# Bodies and headers -----------------------------------------------------------------------


def post_bytes(app: RunningApp, body: bytes, encoding: str, path: str = "/v1/responses") -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return app.http.post(path, content=body, headers=headers)


def test_a_compressed_body_is_read(app: RunningApp) -> None:
    body = json.dumps({"model": "default", "input": "\u00e9 word " * 500}).encode()
    for encoding, packed in (
        ("gzip", gzip.compress(body)),
        ("x-gzip", gzip.compress(body)),
        ("deflate", zlib.compress(body)),
        ("identity", body),
        ("GZIP", gzip.compress(body)),
        ("zstd", zstd.compress(body, 3)),
        ("zstd", zstd.compress(body, options={zstd.CompressionParameter.checksum_flag: 1})),
    ):
        reply = post_bytes(app, packed, encoding)
        assert reply.status_code == 200, (encoding, reply.text)


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "zstd, zstd", "compress"])
def test_an_encoding_nobody_reads_is_415(app: RunningApp, encoding: str) -> None:
    reply = post_bytes(app, b"x", encoding)
    assert app.error(reply)[:2] == (415, "unsupported_encoding")
    assert "gzip" in reply.json()["error"]["message"]
    reply = post_bytes(app, b"x", encoding, "/v1/messages")
    assert reply.json()["type"] == "error"


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("encoding", PACKERS)
def test_a_compressed_body_that_is_none_is_refused(app: RunningApp, encoding: str) -> None:
    packed = PACKERS[encoding](b'{"model": "default", "input": "x"}')
    for body in (b"{}", packed[:-9], packed[:-1], packed + b"more", packed + packed, b""):
        answer = app.error(post_bytes(app, body, encoding))
        assert answer[:2] == (400, "invalid_json"), body


@pytest.mark.parametrize("encoding", PACKERS)
def test_a_compressed_body_may_come_in_any_pieces(app: RunningApp, encoding: str) -> None:
    """And with what is behind its end in a piece of its own."""
    packed = PACKERS[encoding](b'{"model": "default", "input": "x"}')
    for size in (1, 7, len(packed)):
        pieces = [packed[at : at + size] for at in range(0, len(packed), size)]
        headers = {"content-type": "application/json", "content-encoding": encoding}
        reply = app.http.post("/v1/responses", content=iter(pieces), headers=headers)
        assert reply.status_code == 200, reply.text
        reply = app.http.post("/v1/responses", content=iter([*pieces, b"x"]), headers=headers)
        assert app.error(reply)[:2] == (400, "invalid_json")


@pytest.mark.parametrize("encoding", PACKERS)
def test_what_a_compressed_body_unpacks_to_is_limited(app: RunningApp, encoding: str) -> None:
    limit = app.config.server.max_body_mb << 20
    packed = PACKERS[encoding](b'{"model": "default", "input": "' + b"x" * limit + b'"}')
    assert len(packed) < limit // 50
    assert app.error(post_bytes(app, packed, encoding))[:2] == (413, "request_too_large")


def test_a_frame_that_asks_for_more_memory_than_http_allows_is_refused(app: RunningApp) -> None:
    body = json.dumps({"model": "default", "input": "x"}).encode()
    for window_log, status in ((23, 200), (24, 400), (27, 400)):
        # Without the size of its content a frame says how large a window it needs.
        options = {
            zstd.CompressionParameter.window_log: window_log,
            zstd.CompressionParameter.content_size_flag: 0,
        }
        packer = zstd.ZstdCompressor(options=options)
        packed = packer.compress(body) + packer.flush()
        assert zstd.get_frame_info(packed).decompressed_size is None
        assert post_bytes(app, packed, "zstd").status_code == status, window_log


@pytest.mark.parametrize("header", ["X-Request-Id", "x-client-request-id"])
def test_a_request_s_id_is_said_back_where_each_client_looks(app: RunningApp, header: str) -> None:
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        message = client.messages.create(
            model="default",
            max_tokens=9,
            messages=[{"role": "user", "content": "Hi"}],
            extra_headers={header: "mine-1"},
        )
        assert message._request_id == "mine-1"
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(
                model="x",
                max_tokens=9,
                messages=[{"role": "user", "content": "Hi"}],
                extra_headers={header: "mine-2"},
            )
        assert refused.value.request_id == "mine-2"
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as client_o:
        reply = client_o.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            extra_headers={header: "mine-3"},
        )
        assert reply._request_id == "mine-3"


# Models and tokens ------------------------------------------------------------------------


def test_models_are_listed_for_both_vendors_clients(app: RunningApp) -> None:
    names = [default_assets().name, "default"]
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        listed = list(client.models.list())
        assert [model.id for model in listed] == names
        assert listed[0].type == "model" and listed[0].created_at.year >= 2026
        assert client.models.retrieve("default").display_name == "default"
    shown = app.get("/v1/models/default").json()
    assert shown["object"] == "model" and shown["owned_by"] and shown["created"] > 1.7e9
    assert shown["max_model_len"] == shown["context_length"] == 8192


def test_tokens_are_shown_as_text_and_their_fields_are_checked(app: RunningApp) -> None:
    asked = {"prompt": "a \u4e2d", "return_token_strs": True, "model": "default"}
    reply = app.post("/tokenize", asked).json()
    assert reply["tokens"] == ids_of("a \u4e2d") and len(reply["token_strs"]) == reply["count"]
    assert reply["token_strs"][0] == "a"
    assert app.post("/tokenize", {"prompt": "a"}).json()["token_strs"] is None
    assert app.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    user = [{"role": "user", "content": "x"}]
    for body, error in (
        ({"prompt": "a", "model": "gpt-9"}, (404, "model_not_found", "model")),
        ({"prompt": "a", "tools": [{}]}, (400, "unsupported_parameter", "tools")),
        ({"messages": user, "add_special_tokens": True},
         (400, "unsupported_parameter", "add_special_tokens")),
        ({"messages": user, "continue_final_message": True},
         (400, "unsupported_parameter", "continue_final_message")),
        ({"messages": user, "chat_template_kwargs": {"mood": 1}},
         (400, "unsupported_parameter", "chat_template_kwargs.mood")),
    ):  # fmt: skip
        assert app.error(app.post("/tokenize", body)) == error
    gone = app.post("/detokenize", {"tokens": [1], "model": "gpt-9"})
    assert app.error(gone) == (404, "model_not_found", "model")
    assert app.error(app.post("/detokenize", {"tokens": [1, -3]})) == (
        400,
        "invalid_value",
        "tokens[1]",
    )


USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    settings = {"server": {"heartbeat_s": 0.05}}
    with RunningApp(tmp_path_factory.mktemp("l"), settings=settings) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/v1/messages", {"messages": USER, "max_tokens": 9}, "event: ping"),
        ("/v1/chat/completions", {"messages": USER}, ": heartbeat"),
        ("/v1/responses", {"input": "Hi"}, ": heartbeat"),
        ("/v1/completions", {"prompt": "Hi"}, ": heartbeat"),
    ],
)
def test_a_stream_that_waits_for_its_model_is_kept_alive(
    lively: RunningApp, path: str, body: Json, line: str
) -> None:
    body = {**body, "model": "default", "stream": True}
    lively.engine.pause()
    with lively.http.stream("POST", path, json=body) as reply:
        lines = reply.iter_lines()
        assert next(found for found in lines if found == line)
        lively.engine.resume()
        assert "Hello" in "\n".join(lines)
