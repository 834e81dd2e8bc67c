# SPDX-License-Identifier: Apache-2.0
"""A request whose reader was told that it failed runs for nobody, whenever it reaches an engine.

What a client sends while no engine is there, the next one gets. The engine here is a bare socket,
which says what the test has it say.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from engine import api
from engine.client import EngineClient
from engine.transport import EngineSocket, decode_input, encode_outputs
from tests.fakes.live_engine import Collected, make_request

ABOUT_IT = (api.GenerateRequest, api.AbortRequest)


class BareEngine:
    """Takes messages in order; `heard`: what was said of requests."""

    def __init__(self, path: str) -> None:
        self._socket = EngineSocket(path)
        self.heard: list[str] = []
        self.peer = b""

    async def hear(self, kind: type[api.EngineInput]) -> None:
        """Wait for the next message of a kind."""
        limit_s = time.monotonic() + 30
        while True:
            received = self._socket.receive()
            if received is None:
                assert time.monotonic() < limit_s, f"no {kind.__name__} came behind {self.heard}"
                await asyncio.sleep(0.002)
                continue
            self.peer, message = received[0], decode_input(received[1])
            if isinstance(message, ABOUT_IT):
                self.heard.append(type(message).__name__)
            if isinstance(message, kind):
                return

    def say(self, *messages: api.EngineOutput) -> None:
        assert self._socket.send(self.peer, encode_outputs(list(messages)))

    def greet(self, *more: api.EngineOutput) -> None:
        hello = api.EngineHello(
            instance_id=uuid.uuid4().hex,
            model_fingerprint="bare",
            vocab_size=300,
            max_context_len=100,
            page_size=4,
            num_pages=16,
        )
        self.say(hello, *more)

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def client_of(path: str, **options: float) -> AsyncIterator[EngineClient]:
    """A client that has met an engine, which is gone by now."""
    client = EngineClient(path, ping_interval_s=0.02, **options)  # type: ignore[arg-type]
    await client.start()
    try:
        with closing(BareEngine(path)) as engine:
            await engine.hear(api.Ping)
            engine.greet()
            await client.wait_ready(20)
        yield client
    finally:
        await client.close()


def error_of(got: Collected) -> str | None:
    assert got.finished is not None and got.ids == []
    return got.finished.error_code


def test_one_refused_when_it_was_first_sent_does_not_run_when_it_was_sent_again(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        async with client_of(path) as client:
            reading = asyncio.create_task(Collected().read(client.generate(make_request("r", [5]))))
            with closing(BareEngine(path)) as engine:
                await engine.hear(api.GenerateRequest)
                full = api.Finished(
                    request_id="r",
                    reason=api.FinishReason.ERROR,
                    num_output_tokens=0,
                    error_code="queue_full",
                    error_message="full",
                )
                engine.greet(full)  # behind which the client sends it again
                assert error_of(await asyncio.wait_for(reading, 30)) == "queue_full"
                await engine.hear(api.AbortRequest)
                assert engine.heard == ["GenerateRequest", "GenerateRequest", "AbortRequest"]

    asyncio.run(main())


def test_one_that_no_engine_took_in_time_does_not_run_on_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        async with client_of(path, dead_after_s=0.1) as client:
            got = await asyncio.wait_for(
                Collected().read(client.generate(make_request("r", [5]))), 30
            )
            assert error_of(got) == "engine_unavailable"
            with closing(BareEngine(path)) as engine:
                await engine.hear(api.AbortRequest)
                assert engine.heard == ["GenerateRequest", "AbortRequest"]

    asyncio.run(main())


def test_one_whose_engines_died_too_often_does_not_run_on_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        async with client_of(path, max_resubmits=0) as client:
            reading = asyncio.create_task(Collected().read(client.generate(make_request("r", [5]))))
            with closing(BareEngine(path)) as engine:
                await engine.hear(api.GenerateRequest)
                engine.greet()
                assert error_of(await asyncio.wait_for(reading, 30)) == "engine_restarted"
                await engine.hear(api.AbortRequest)
                assert engine.heard == ["GenerateRequest", "AbortRequest"]

    asyncio.run(main())
