# SPDX-License-Identifier: Apache-2.0
"""Leases and hints over the wire, against the real scheduler behind a scripted runner."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.errors import QueryRefusedError
from engine.transport import pack_ids
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner, hashed_script

VOCAB = 64
PAGE = 4
PAGES = 16  # 64 tokens, of which leases may take 32


def make_runner() -> ScriptedRunner:
    return ScriptedRunner(hashed_script(VOCAB), vocab_size=VOCAB, page_size=PAGE, num_pages=PAGES)


def prompt_of(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + 7 * i) % (VOCAB - 3) for i in range(length)]


async def fill(client: EngineClient, seed: int, length: int) -> list[int]:
    """A history of `length` cached tokens."""
    name = f"r{seed}-{length}"
    prompt = prompt_of(seed, length)
    await run(client, make_request(name, prompt, 1, sampling={"ignore_eos": True}))
    return prompt


def test_a_lease_answers_what_it_covers_and_why_not_more(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        history = await fill(client, 1, 16)
        reply = await client.lease("a", pack_ids(history), 60_000)
        assert (reply.state, reply.tokens_requested, reply.tokens_granted) == ("granted", 16, 16)
        longer = pack_ids([*history, *prompt_of(9, 8)])
        reply = await client.lease("a", longer, 60_000)
        assert (reply.state, reply.tokens_granted, reply.reason) == ("clipped", 16, "not_resident")
        reply = await client.lease("b", pack_ids(prompt_of(7, 8)), 60_000)
        assert (reply.state, reply.tokens_granted, reply.reason) == ("denied", 0, "not_resident")

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_leases_stay_within_their_budget_and_a_queued_one_is_told_when_it_has_room(
    tmp_path: Path,
) -> None:
    async def work(client: EngineClient) -> None:
        changes: list[api.LeaseChanged] = []
        client.on_lease_change(changes.append)
        first = await fill(client, 1, 28)
        second = await fill(client, 2, 16)
        assert (await client.lease("a", pack_ids(first), 60_000)).tokens_granted == 28
        clipped = await client.lease("b", pack_ids(second), 60_000)
        assert (clipped.state, clipped.tokens_granted) == ("clipped", 4)
        assert clipped.reason == "budget"
        third = await client.lease("c", pack_ids(second[:4] + first), 60_000)
        assert third.state == "clipped"  # its first page is leased already
        await client.release_lease("c")
        other = await fill(client, 3, 4)
        queued = await client.lease("d", pack_ids(other), 60_000)
        assert (queued.state, queued.tokens_granted) == ("queued", 0)
        await client.release_lease("a")
        await fill(client, 4, 2)  # any step
        await client.stats()
        assert [(c.lease_id, c.kind, c.num_tokens) for c in changes] == [("d", "granted", 4)]

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_a_leased_prefix_outlives_what_came_later_and_its_end_is_told(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        changes: list[api.LeaseChanged] = []
        client.on_lease_change(changes.append)
        history = await fill(client, 1, 16)
        assert (await client.lease("a", pack_ids(history), 60_000)).state == "granted"
        for seed in range(2, 9):
            await fill(client, seed, 24)
        assert (await client.query_prefix(history)).l1 == 16
        assert (await client.lease("a", pack_ids(history), 300)).state == "granted"
        limit_s = time.monotonic() + 60
        while not changes:
            assert time.monotonic() < limit_s, "nobody says that it is over"
            await asyncio.sleep(0.02)
            await client.stats()
        assert [(c.lease_id, c.kind, c.num_tokens) for c in changes] == [("a", "expired", 0)]

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_a_hint_says_how_much_of_the_prefix_is_cached(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        history = await fill(client, 1, 16)
        assert await client.hint_prefix(pack_ids(history), 1.0) == 16
        assert await client.hint_prefix(pack_ids(history), 0.0, salt="other") == 0

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_senseless_leases_and_hints_change_nothing_and_the_engine_lives(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        history = pack_ids(await fill(client, 1, 16))
        for refused, field in (
            (client.lease("a", history, 0), "ttl_ms = 0"),
            (client.lease("a", history, 1 << 62), "ttl_ms"),
            (client.lease("a", history[:-1], 1000), "token_ids"),
            (client.lease("a", b"", 1000), "token_ids"),
            (client.lease("a", history, 1000, tier="l4"), "tier"),
            (client.hint_prefix(history, 1.5), "expected_return = 1.5"),
            (client.query_prefix(history[:-1]), "token_ids"),
            (client.move_prefix(history, "l9"), "tier"),
        ):
            with pytest.raises(QueryRefusedError, match=field) as caught:
                await refused
            assert caught.value.code == "invalid_request"
        await client.release_lease("nobody's")
        assert (await client.lease("a", history, 1000)).state == "granted"

    serve(LiveEngine(str(tmp_path), make_runner()), work)
