# SPDX-License-Identifier: Apache-2.0
"""Processes are killed; streams go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig, GrammarConfig
from tests.fakes.engine_process import EngineProcess
from tests.fakes.held_engine import HOLD_AT
from tests.fakes.live_engine import Collected, make_request, run
from tests.fakes.tiny_model import byte_ids, write_tiny_model

SCHEMA = api.GrammarSpec(
    kind=api.GrammarKind.JSON_SCHEMA,
    text=json.dumps({"type": "array", "items": {"enum": ["ab", "cd", 5]}, "minItems": 60}),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("tiny")
    return EngineConfig(
        model=str(write_tiny_model(directory / "model")),
        run_dir=str(directory),
        kv_pool_tokens=8192,
        page_size=16,
        num_threads=1,
        grammar=GrammarConfig(budget_ms=60_000),
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[EngineProcess]:
    with EngineProcess(config, module="tests.fakes.held_engine") as process:
        yield process


def requests(prefix: str) -> list[api.GenerateRequest]:
    """A greedy, a sampled with penalties, and a grammar request; none ends early."""
    free = {"ignore_eos": True}
    drawn = {**free, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.3, "top_p": 0.9}
    return [
        make_request(f"{prefix}-greedy", byte_ids("greedy"), 400, sampling=free),
        make_request(f"{prefix}-drawn", byte_ids("drawn"), 400, sampling=drawn),
        make_request(
            f"{prefix}-grammar",
            byte_ids("grammar"),
            400,
            sampling={"temperature": 1.0, "seed": 6},
            grammar=SCHEMA,
        ),
    ]


def test_streams_survive_kill_9_of_the_engine_token_by_token(
    config: EngineConfig, engine: EngineProcess
) -> None:
    async def main() -> None:
        client = EngineClient(config.socket_path)
        await client.start()
        await client.wait_ready(60)
        undisturbed = [
            result.ids
            for result in await asyncio.gather(*map(lambda r: run(client, r), requests("a")))
        ]
        engine.kill()
        engine.start({HOLD_AT: "3:30"})
        assert (await client.compile(SCHEMA, budget_ms=60_000)).error_code is None
        streams = [Collected() for _ in range(3)]
        tasks = [
            asyncio.create_task(stream.read(client.generate(request)))
            for stream, request in zip(streams, requests("b"), strict=True)
        ]
        while min(len(stream.ids) for stream in streams) < 20:
            await asyncio.sleep(0.005)
        engine.kill()
        at_death = [len(stream.ids) for stream in streams]
        assert max(at_death) < 400
        engine.start()
        await asyncio.wait_for(asyncio.gather(*tasks), 90)
        assert [stream.ids for stream in streams] == undisturbed
        for stream in streams:
            assert stream.finished is not None and stream.finished.error_code is None
        await client.close()

    asyncio.run(main())


def test_a_request_goes_on_while_its_client_is_gone_and_the_next_client_reads_it_all(
    config: EngineConfig, engine: EngineProcess
) -> None:
    async def main() -> None:
        first = EngineClient(config.socket_path)
        await first.start()
        await first.wait_ready(60)
        request = requests("c")[0]
        stream = first.generate(request, abort_on_close=False)
        got = Collected()
        async for item in stream:
            if isinstance(item, api.Tokens):
                break
        await stream.aclose()
        await first.close()

        second = EngineClient(config.socket_path)
        await second.start()
        got = await asyncio.wait_for(Collected().read(second.attach(request.request_id)), 60)
        want = await run(second, requests("d")[0])
        assert got.ids == want.ids and len(got.ids) == 400
        again = await asyncio.wait_for(Collected().read(second.attach(request.request_id, 399)), 60)
        assert again.ids == got.ids[399:]
        await second.close()

    asyncio.run(main())
