# SPDX-License-Identifier: Apache-2.0
"""The Python client against the real API over HTTP, a fake engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from moorage_client import ApiError, AsyncMoorage, Moorage, ServerAwayError
from moorage_client.sse import ServerSentEvent, SseParser

from tests.fakes.appliance import RunningApp, says


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    root: Path = tmp_path_factory.mktemp("c")
    with RunningApp(root) as running:
        yield running


@pytest.fixture
def app(shared_app: RunningApp) -> RunningApp:
    shared_app.engine.script = says("Hello there.")
    shared_app.engine.hold_at = None
    return shared_app


# Cases of the WHATWG HTML standard, section 9.2.6.
UNICODE = "\u00e9\u4e16\U0001f600"
COMMENTS = (
    ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
)
CASES = [
    ("data: YHOO\ndata: +2\ndata: 10\n\n", [("", "message", "YHOO\n+2\n10")]),
    (
        COMMENTS,
        [
            ("1", "message", "first event"),
            ("", "message", "second event"),
            ("", "message", " third event"),
        ],
    ),
    ("data\n\ndata\ndata\n\ndata:", [("", "message", ""), ("", "message", "\n")]),
    ("data:test\r\n\r\ndata: test\r\r", [("", "message", "test")] * 2),
    (
        f"\ufeffevent: turn\nid: 7\ndata: {UNICODE}\n\nevent: half\ndata: x\n",
        [("7", "turn", UNICODE)],
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_events_parse_the_same_in_pieces_of_every_size(
    text: str, expected: list[tuple[str, str, str]]
) -> None:
    whole = (text + ":").encode()  # a last \r might be half of \r\n: one more byte tells
    for size in range(1, len(whole) + 1):
        parser = SseParser()
        events = [
            e for at in range(0, len(whole), size) for e in parser.push(whole[at : at + size])
        ]
        assert events == [ServerSentEvent(*one) for one in expected], size


def test_a_turn_streams_its_text_and_ends_as_the_server_keeps_it(app: RunningApp) -> None:
    with Moorage(app.url) as client:
        session = client.create_session({"model": "default"})
        stream = client.stream_turn(session["id"], {"input": "Hi"})
        assert "".join(stream.text()) == "Hello there."
        turn = stream.final_turn()
        assert turn == client.get_turn(session["id"], turn["id"])
        assert turn["id"] == stream.turn_id
        again = client.follow_turn(session["id"], turn["id"], starting_after=3)
        numbers = [event["sequence_number"] for event in again]
        assert numbers == list(range(4, stream.last_sequence + 1))
        assert [item["type"] for item in client.list_items(session["id"])["data"]] == [
            "message"
        ] * 2


def test_a_stream_goes_on_behind_a_restart_of_the_server_without_a_gap(app: RunningApp) -> None:
    app.engine.script = says("word " * 80)
    app.engine.hold_at = 20
    with Moorage(app.url) as client:
        session = client.create_session({"model": "default"})
        events = []
        for event in client.stream_turn(session["id"], {"input": "go"}):
            events.append(event)
            if app.engine.hold_at and event["type"] == "response.output_text.delta":
                app.restart()
                app.engine.hold_at = None
        assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
        text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        assert text == "word " * 80
        assert len(client.list_turns(session["id"])["data"]) == 1


def test_asyncio_clients_with_one_key_share_one_turn_and_a_cancel_ends_it(app: RunningApp) -> None:
    app.engine.script = says("word " * 200)
    app.engine.hold_at = 20

    async def main() -> None:
        async with AsyncMoorage(app.url) as client:
            session = await client.create_session({"model": "default"})
            streams = [
                client.stream_turn(session["id"], {"input": "go"}, idempotency_key="one")
                for _ in range(3)
            ]

            async def cancel_soon() -> None:
                while streams[0].last_sequence < 7:  # its first delta
                    await asyncio.sleep(0.01)
                assert (await streams[0].cancel())["status"] == "cancelled"

            *turns, _ = await asyncio.gather(*(s.final_turn() for s in streams), cancel_soon())
            assert {turn["id"] for turn in turns} == {streams[0].turn_id}
            assert {turn["status"] for turn in turns} == {"cancelled"}
            forks = await client.fork(session["id"], {"n": 2})
            assert [s["parent_session_id"] for s in forks["data"]] == [session["id"]] * 2

    asyncio.run(main())


def test_a_refusal_has_the_server_s_code_and_nobody_there_is_said_so(app: RunningApp) -> None:
    with Moorage(app.url) as client:
        with pytest.raises(ApiError) as caught:
            client.get_session("sess_none")
        assert (caught.value.status, caught.value.code) == (404, "session_not_found")
        session = client.create_session({"model": "default"})
        with pytest.raises(ApiError) as caught:
            client.stream_turn(session["id"], {"input": "x", "temperature": -1.0}).final_turn()
        assert caught.value.param == "temperature"
    away = pytest.raises(ServerAwayError, match=r"^http://127\.0\.0\.1:9: .*refused")
    with Moorage("http://127.0.0.1:9", patience_s=0.3) as nobody, away:
        nobody.get_session("sess_x")


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_what_openai_s_clients_are_given(app: RunningApp, tail: str) -> None:
    with Moorage(app.url + tail) as client:
        session = client.create_session({"model": "default"})
        assert client.get_session(session["id"])["id"] == session["id"]

    async def main() -> None:
        async with AsyncMoorage(app.url + tail) as client:
            assert (await client.get_session(session["id"]))["id"] == session["id"]

    asyncio.run(main())
