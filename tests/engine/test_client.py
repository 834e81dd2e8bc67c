# SPDX-License-Identifier: Apache-2.0
"""The client against an engine that is scripted, slow, dead, or another one than before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.client_streams import OutputStream, Pace
from engine.errors import EngineUnavailableError
from engine.transport import pack_ids, unpack_ids
from tests.fakes.engine import FakeEngine

PROMPT = [11, 12, 13, 14]


def count_up(request: api.GenerateRequest) -> list[int]:
    """100, 101, ...: the position is visible in each id."""
    return list(range(100, 100 + request.sampling.max_new_tokens - 1))


def make_request(request_id: str, max_new_tokens: int = 8, **extra: object) -> api.GenerateRequest:
    return api.GenerateRequest(
        request_id=request_id,
        token_ids=pack_ids(PROMPT),
        sampling=api.SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0),
        **extra,  # type: ignore[arg-type]
    )


async def collect(
    stream: AsyncIterator[object], ids: list[int] | None = None
) -> tuple[list[int], api.Finished]:
    """All ids of a stream, put into `ids` as they come, and its end."""
    ids = [] if ids is None else ids
    base: int | None = None
    async for item in stream:
        if isinstance(item, api.Tokens):
            base = item.start if base is None else base
            assert item.start == base + len(ids), "tokens are contiguous"
            ids += unpack_ids(item.token_ids).tolist()
        if isinstance(item, api.Finished):
            return ids, item
    raise AssertionError("the stream ended without Finished")


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "engine.sock")


def test_many_generates_share_one_socket_and_keep_their_outputs_apart(socket_path: str) -> None:
    async def main() -> None:
        client = EngineClient(socket_path)
        await client.start()
        await client.wait_ready(10)
        sizes = [2 + i % 7 for i in range(50)]
        results = await asyncio.gather(
            *(collect(client.generate(make_request(f"r{i}", n))) for i, n in enumerate(sizes))
        )
        for n, (ids, finished) in zip(sizes, results, strict=True):
            assert ids == [*range(100, 100 + n - 1), 2]
            assert finished.reason is api.FinishReason.STOP
            assert finished.num_output_tokens == n
        await client.close()

    with FakeEngine(socket_path, count_up):
        asyncio.run(main())


def test_a_request_sent_before_the_engine_is_there_runs_when_it_comes(socket_path: str) -> None:
    engine = FakeEngine(socket_path, count_up)

    async def main() -> None:
        client = EngineClient(socket_path, ping_interval_s=0.05)
        await client.start()
        was_ready = client.is_ready
        task = asyncio.create_task(collect(client.generate(make_request("early"))))
        await asyncio.sleep(0.1)
        engine.start()
        ids, _ = await asyncio.wait_for(task, 10)
        assert ids == [*range(100, 107), 2]
        assert not was_ready
        while not client.is_ready:  # what it heard last may be long ago
            await asyncio.sleep(0.01)
        await client.close()

    try:
        asyncio.run(main())
    finally:
        engine.stop()


def test_a_stream_goes_on_where_it_was_when_another_engine_takes_over(socket_path: str) -> None:
    engine = FakeEngine(socket_path, count_up, tokens_per_s=0.1, burst=7)
    restarts: list[str] = []
    got: list[list[int]] = [[] for _ in range(3)]

    async def main() -> None:
        client = EngineClient(socket_path, ping_interval_s=0.05)
        client.on_restart(lambda hello: restarts.append(hello.instance_id))
        await client.start()
        await client.wait_ready(10)
        streams = [
            asyncio.create_task(collect(client.generate(make_request(f"r{i}", 60)), got[i]))
            for i in range(3)
        ]
        while not all(got):
            await asyncio.sleep(0.01)
        engine.tokens_per_s = 0.0
        engine.restart()
        for task in streams:
            ids, finished = await asyncio.wait_for(task, 20)
            assert ids == [*range(100, 159), 2]
            assert finished.reason is api.FinishReason.STOP
        await client.close()

    with engine:
        asyncio.run(main())
    assert restarts == [engine.instance_id]
    resumed = [r for r in engine.requests if r.resume_token_ids]
    assert len(resumed) == 3
    for request in resumed:
        ids = unpack_ids(request.resume_token_ids).tolist()
        assert ids == list(range(100, 100 + len(ids)))
        assert request.sampling.seed is not None, "a second life must draw the same tokens"


def test_a_request_that_outlives_too_many_engines_fails(socket_path: str) -> None:
    engine = FakeEngine(socket_path, count_up)
    engine.pause()

    async def main() -> None:
        client = EngineClient(socket_path, ping_interval_s=0.02, max_resubmits=2)
        await client.start()
        task = asyncio.create_task(collect(client.generate(make_request("cursed"))))
        for _ in range(3):
            await client.wait_ready(10)
            instance = engine.instance_id
            while client.hello is None or client.hello.instance_id != instance:
                await asyncio.sleep(0.01)
            if task.done():
                break
            engine.stop()
            engine.pause()
            engine.start()
        _, finished = await asyncio.wait_for(task, 10)
        assert finished.reason is api.FinishReason.ERROR
        assert finished.error_code == "engine_restarted"
        await client.close()

    with engine:
        asyncio.run(main())


def test_without_an_engine_requests_end_in_engine_unavailable(socket_path: str) -> None:
    async def main() -> None:
        client = EngineClient(socket_path, ping_interval_s=0.02, dead_after_s=0.2)
        await client.start()
        _, finished = await asyncio.wait_for(collect(client.generate(make_request("lost"))), 10)
        assert finished.error_code == "engine_unavailable"
        with pytest.raises(EngineUnavailableError, match="within 0.05 s"):
            await client.wait_ready(0.05)
        with pytest.raises(EngineUnavailableError, match="QueryStats"):
            await client.stats(timeout_s=0.05)
        await client.close()

    asyncio.run(main())


class Clock:
    """The clock of a machine that stands still for a while."""

    shift_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.shift_s

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)


def test_a_machine_that_stood_still_has_not_lost_its_engine(
    socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("engine.client.time", clock)

    async def main() -> None:
        client = EngineClient(socket_path, ping_interval_s=0.02)
        await client.start()
        stream = client.generate(make_request("r"))
        assert isinstance(await anext(stream), api.Started)
        clock.shift_s = 10_000.0  # no frame of the engine is read between this and the next look
        await asyncio.sleep(0.2)
        engine.resume()
        _, finished = await asyncio.wait_for(collect(stream), 20)
        assert finished.reason is api.FinishReason.STOP
        await client.close()

    engine = FakeEngine(socket_path, count_up)
    with engine:
        engine.pause()
        asyncio.run(main())


def test_a_reader_that_sleeps_blocks_no_other_and_gets_everything_at_once(
    socket_path: str,
) -> None:
    async def main() -> None:
        client = EngineClient(socket_path)
        await client.start()
        slow = client.generate(make_request("slow", 1000))
        first = await anext(slow)
        assert isinstance(first, api.Started)
        ids, _ = await asyncio.wait_for(collect(client.generate(make_request("fast", 1000))), 20)
        assert len(ids) == 1000
        await asyncio.sleep(0.2)
        items = [item async for item in slow]
        got = [i for t in items if isinstance(t, api.Tokens) for i in unpack_ids(t.token_ids)]
        assert got == [*range(100, 1099), 2]
        assert len(items) < 10, "what a slow reader missed is one item, not a queue"
        await client.close()

    with FakeEngine(socket_path, count_up):
        asyncio.run(main())


def test_another_client_attaches_to_a_running_request_and_to_a_finished_one(
    socket_path: str,
) -> None:
    async def main() -> None:
        first = EngineClient(socket_path)
        await first.start()
        stream = first.generate(make_request("turn", 50), abort_on_close=False)
        async for item in stream:
            if isinstance(item, api.Tokens):
                break
        await stream.aclose()
        await first.close()

        second = EngineClient(socket_path)
        await second.start()
        ids, finished = await asyncio.wait_for(collect(second.attach("turn", 5)), 10)
        assert ids == [*range(105, 149), 2]
        assert finished.num_output_tokens == 50
        ids, _ = await asyncio.wait_for(collect(second.attach("turn")), 10)
        assert ids == [*range(100, 149), 2]
        _, finished = await asyncio.wait_for(collect(second.attach("never heard of")), 10)
        assert finished.error_code == "unknown_request"
        await second.close()

    with FakeEngine(socket_path, count_up, tokens_per_s=300) as engine:
        asyncio.run(main())
    assert engine.aborted == []


def test_closing_a_stream_early_aborts_its_request(socket_path: str) -> None:
    async def main() -> None:
        client = EngineClient(socket_path)
        await client.start()
        stream = client.generate(make_request("left", 1000))
        async for item in stream:
            if isinstance(item, api.Tokens):
                break
        await stream.aclose()
        await client.stats()  # answered after the abort: one socket keeps the order
        await client.close()

    with FakeEngine(socket_path, count_up, tokens_per_s=50) as engine:
        asyncio.run(main())
        assert engine.aborted == ["left"]


def test_an_abort_ends_the_stream_with_what_was_sampled(socket_path: str) -> None:
    async def main() -> None:
        client = EngineClient(socket_path)
        await client.start()
        ids: list[int] = []
        async for item in client.generate(make_request("stopped", 1000)):
            if isinstance(item, api.Tokens):
                ids += unpack_ids(item.token_ids).tolist()
                await client.abort("stopped")
            if isinstance(item, api.Finished):
                assert item.reason is api.FinishReason.ABORTED
                assert item.num_output_tokens == len(ids)
        await client.close()

    with FakeEngine(socket_path, count_up, tokens_per_s=50):
        asyncio.run(main())


def test_kv_events_arrive_in_order_and_a_restart_says_reset(socket_path: str) -> None:
    async def main(engine: FakeEngine) -> None:
        client = EngineClient(socket_path, ping_interval_s=0.02)
        await client.start()
        await client.wait_ready(10)
        seen: list[api.KvEvent] = []

        async def watch() -> None:
            async for batch in client.kv_events():
                seen.extend(batch.events)

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0.05)
        await collect(client.generate(make_request("a", 130)))
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        assert [e.kind for e in seen] == ["stored", "stored"]
        assert seen[1].parent_hash == seen[0].page_hash
        engine.restart()
        while seen[-1].kind != "reset":
            await asyncio.sleep(0.01)
        await collect(client.generate(make_request("b", 130)))
        while len(seen) < 5:
            await asyncio.sleep(0.01)
        assert [e.kind for e in seen[2:]] == ["reset", "stored", "stored"]
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await client.close()

    with FakeEngine(socket_path, count_up) as engine:
        asyncio.run(main(engine))


def test_queries_are_answered_and_asked_again_of_the_next_engine(socket_path: str) -> None:
    async def main(engine: FakeEngine) -> None:
        client = EngineClient(socket_path, ping_interval_s=0.02)
        await client.start()
        await client.wait_ready(10)
        await collect(client.generate(make_request("a", 10)))
        hit = await client.query_prefix(PROMPT)
        assert (hit.l1, hit.to_compute) == (4, 0)
        assert (await client.stats())["running"] == 0
        assert (await client.tree()).nodes == ()
        spec = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="a+")
        assert (await client.compile(spec)).error_code is None
        engine.stop()
        question = asyncio.create_task(client.stats())
        await asyncio.sleep(0.05)
        engine.start()
        assert (await asyncio.wait_for(question, 10))["running"] == 0
        await client.close()

    with FakeEngine(socket_path, count_up) as engine:
        asyncio.run(main(engine))


def test_two_requests_with_one_id_are_refused_by_the_client(socket_path: str) -> None:
    async def main() -> None:
        client = EngineClient(socket_path)
        await client.start()
        stream = client.generate(make_request("same"))
        await anext(stream)
        with pytest.raises(ValueError, match="already in flight"):
            await anext(client.generate(make_request("same")))
        await stream.aclose()
        await client.close()

    with FakeEngine(socket_path, count_up, tokens_per_s=50):
        asyncio.run(main())


def test_a_reader_gets_the_first_token_at_once_and_then_what_has_come_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits is woken: by tokens in time, by all else at once."""

    def tokens(start: int) -> api.Tokens:
        return api.Tokens(request_id="a", start=start, token_ids=pack_ids([start]))

    async def main() -> None:
        stream = OutputStream("a", Pace(), request=None, base=0)
        stream.feed(tokens(0))
        assert await stream.news() == [tokens(0)]
        for start in (1, 2, 3):
            stream.feed(tokens(start))
        together = api.Tokens(request_id="a", start=1, token_ids=pack_ids([1, 2, 3]))
        assert await asyncio.wait_for(stream.news(), 20) == [together]
        monkeypatch.setattr("engine.client_streams.TOKENS_EVERY_S", 3600.0)
        stream.feed(tokens(4))
        waiting = asyncio.ensure_future(stream.news())
        await asyncio.sleep(0)
        finished = api.Finished(request_id="a", reason=api.FinishReason.STOP, num_output_tokens=5)
        stream.feed(finished)
        assert await asyncio.wait_for(waiting, 20) == [tokens(4), finished]

    asyncio.run(main())
