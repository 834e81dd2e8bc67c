# SPDX-License-Identifier: Apache-2.0
"""The wire: codec, sockets that come and go, peers that vanish."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import api
from engine.errors import EngineError
from engine.transport import (
    ClientSocket,
    EngineSocket,
    decode_input,
    decode_outputs,
    encode_input,
    encode_outputs,
    pack_ids,
    unpack_ids,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    raw = pack_ids(ids)
    assert raw == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    assert unpack_ids(raw).tolist() == ids


def test_every_message_survives_the_wire() -> None:
    request = api.GenerateRequest(
        request_id="r",
        token_ids=pack_ids([1, 2]),
        sampling=api.SamplingParams(
            max_new_tokens=3, logit_bias={5: -1.5}, stop_token_ids=(7,), seed=2**63 - 1
        ),
        grammar=api.GrammarSpec(kind=api.GrammarKind.EBNF, text='root ::= "x"'),
    )
    for message in (request, api.Ping(sent_ms=5), api.SubscribeKvEvents(enabled=False)):
        assert decode_input(encode_input(message)) == message
    event = api.KvEvent(
        kind="stored", tier="l1", page_hash=b"a" * 16, parent_hash=b"", num_tokens=4
    )
    finished = api.Finished(
        request_id="r", reason=api.FinishReason.ABORTED, num_output_tokens=0, page_hashes=b"\0\xff"
    )
    logprobs = (api.TokenLogprobs(logprob=-0.5, top_ids=(1,), top_logprobs=(-0.5,)),)
    tokens = api.Tokens(request_id="r", start=0, token_ids=pack_ids([9]), logprobs=logprobs)
    outputs = [api.KvEventBatch(events=(event,)), finished, tokens]
    assert decode_outputs(encode_outputs(outputs)) == outputs


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x80", encode_outputs([api.Pong(sent_ms=1, instance_id="")])]
)
def test_what_is_no_input_message_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_input(frame)


def receive(server: EngineSocket) -> tuple[bytes, bytes]:
    assert server.socket.poll(60_000)
    received = server.receive()
    assert received is not None
    return received


def test_a_client_reconnects_to_an_engine_that_comes_back(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "engine.sock")

    async def main() -> None:
        frames: asyncio.Queue[bytes] = asyncio.Queue()
        client = ClientSocket(path, frames.put_nowait)
        for life in range(3):
            server = EngineSocket(path)
            client.send(api.Ping(sent_ms=life))
            peer, frame = await asyncio.to_thread(receive, server)
            assert decode_input(frame) == api.Ping(sent_ms=life)
            assert server.send(peer, encode_outputs([api.Pong(sent_ms=life, instance_id="x")]))
            answer = decode_outputs(await asyncio.wait_for(frames.get(), 60))
            assert answer == [api.Pong(sent_ms=life, instance_id="x")]
            server.close()
            assert not Path(path).exists()
        client.close()

    asyncio.run(main())


def test_the_socket_is_for_its_owner_only_and_for_one_engine_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "engine.sock")
    server = EngineSocket(path)
    assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o700
    with pytest.raises(EngineError, match="another engine listens here"):
        EngineSocket(path)
    server.close()
    EngineSocket(path).close()


def test_a_frame_for_a_peer_that_is_gone_is_refused_not_raised(tmp_path: Path) -> None:
    server = EngineSocket(str(tmp_path / "engine.sock"))
    assert not server.send(b"never seen", b"frame")
    server.close()


def test_messages_of_more_than_one_frame_are_skipped(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        server = EngineSocket(path)
        client = ClientSocket(path, lambda frame: None)
        client._socket.send_multipart([b"one", b"two"])
        client.send(api.Ping(sent_ms=1))
        _, frame = await asyncio.to_thread(receive, server)
        assert decode_input(frame) == api.Ping(sent_ms=1)
        client.close()
        server.close()

    asyncio.run(main())


def test_every_frame_of_a_flood_arrives_in_order_whatever_a_reader_raises(tmp_path: Path) -> None:
    """Frames that come while the client looks away, sends or fails are neither lost nor late."""
    path = str(tmp_path / "engine.sock")
    num = 2000

    async def main() -> None:
        loop, got, all_there = asyncio.get_running_loop(), list[int](), asyncio.Event()
        loop.set_exception_handler(lambda loop, context: None)
        server = EngineSocket(path)

        def take(frame: bytes) -> None:
            (pong,) = decode_outputs(frame)
            assert isinstance(pong, api.Pong)
            got.append(pong.sent_ms)
            if pong.sent_ms % 3 == 0:
                client.send(api.Ping(sent_ms=pong.sent_ms))
            if pong.sent_ms == num:
                all_there.set()
            if pong.sent_ms % 7 == 0:
                raise RuntimeError("a reader's own trouble")

        def flood(peer: bytes) -> None:
            for number in range(1, num + 1):
                assert server.send(peer, encode_outputs([api.Pong(sent_ms=number, instance_id="")]))
                if number % 100 == 0:
                    time.sleep(0.001)

        client = ClientSocket(path, take)
        client.send(api.Ping(sent_ms=0))
        peer, _ = await asyncio.to_thread(receive, server)
        await asyncio.to_thread(flood, peer)
        await asyncio.wait_for(all_there.wait(), 60)
        assert got == list(range(1, num + 1))
        client.close()
        server.close()

    asyncio.run(main())
