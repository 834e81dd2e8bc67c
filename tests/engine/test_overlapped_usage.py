# SPDX-License-Identifier: Apache-2.0
"""What a request says it found, where its pages come from L2 while its step runs: told once, when
they are known to be good, and never of a page that was not. Wanted values are counted by hand: a
prompt of eight pages of four tokens, of which some lie in L1, the rest in L2.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.transport import pack_ids
from tests.engine.test_overlapped_loads import LATER, PROMPT, Case, until
from tests.engine.test_tiers import PAGE_SIZE, prompt_of, settled, want
from tests.fakes.live_engine import Collected, make_request, serve


async def all_of(client: EngineClient, request: api.GenerateRequest) -> list[object]:
    """Every item of a stream."""
    return [item async for item in client.generate(request)]


@pytest.mark.parametrize("token_budget", [5, 64])
@pytest.mark.parametrize("num_in_l1", [0, 3])
@pytest.mark.parametrize("bad_page", [None, 3, 4, 7])
def test_tokens_found_are_those_before_the_first_bad_page(
    tmp_path: Path, token_budget: int, num_in_l1: int, bad_page: int | None
) -> None:
    """In a prefill of one step, and of several."""
    case = Case(tmp_path, token_budget=token_budget)
    prompt = [*LATER, *prompt_of(6, 8)]

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        if num_in_l1:
            await client.move_prefix(pack_ids(PROMPT[: PAGE_SIZE * num_in_l1]), "l1")
            await settled(client)
        if bad_page is not None:
            case.damage(bad_page)
        items = await all_of(client, make_request("later", prompt, 3))
        starts = [item for item in items if isinstance(item, api.Started)]
        assert len(starts) == 1 and items[0] is starts[0]
        hit, num_there = starts[0].cache, PAGE_SIZE * (8 if bad_page is None else bad_page)
        num_l1 = PAGE_SIZE * num_in_l1
        assert (hit.l1, hit.l2, hit.l3) == (num_l1, num_there - num_l1, 0)
        assert hit.to_compute == len(prompt) - num_there
        again = await Collected().read(client.attach("later"))
        assert again.ids == want(prompt, 3) and again.started == starts[0]

    serve(case.engine, work)
    assert case.runner.num_loading_steps > 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_an_aborted_request_found_is_told_if_it_was_good(
    tmp_path: Path, is_lost: bool
) -> None:
    case = Case(tmp_path)
    may_end = threading.Event()

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        before = await client.stats()
        if is_lost:
            case.damage(2)
        case.memory.at_the_end = lambda: may_end.wait(20) and None
        num_before = case.runner.num_steps
        got = Collected()
        reading = asyncio.create_task(got.read(client.generate(make_request("r", LATER, 6))))
        await until(lambda: case.runner.num_steps > num_before)
        await client.abort("r")
        await client.stats()  # the engine has heard of it
        may_end.set()
        await reading
        assert got.finished is not None and got.finished.reason is api.FinishReason.ABORTED
        hit = got.started.cache if got.started is not None else None
        assert hit == (None if is_lost else api.CacheHit(l2=32, to_compute=4))
        stats = await settled(client)
        num_found = 0 if is_lost else 32
        assert stats["admitted_cached_tokens"] - before["admitted_cached_tokens"] == num_found

    serve(case.engine, work)


@pytest.mark.parametrize(
    ("bad_page", "is_forgotten", "num_found"),
    [(None, False, 32), (5, False, 20), (5, True, 0), (0, False, 0)],
)
def test_a_request_that_gave_way_while_its_pages_came_says_what_was_good_and_is_still_there(
    tmp_path: Path, bad_page: int | None, is_forgotten: bool, num_found: int
) -> None:
    """Between the bad load and its next row it is retracted, and what it had may be gone."""
    case = Case(tmp_path, max_slots=1)
    may_end = threading.Event()

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        before = await client.stats()
        if bad_page is not None:
            case.damage(bad_page)
        case.memory.at_the_end = lambda: may_end.wait(20) and None
        num_before = case.runner.num_steps
        # One token: no row behind the first one, so the loop plans on while the pages come.
        later = asyncio.create_task(all_of(client, make_request("later", LATER, 1, priority=2)))
        await until(lambda: case.runner.num_steps > num_before)
        urgent = asyncio.create_task(all_of(client, make_request("urgent", prompt_of(9, 9), 3)))
        while (await client.stats())["retractions"] == 0:
            await asyncio.sleep(0.002)
        case.runner.gate.clear()
        may_end.set()
        await until(lambda: case.runner.is_held)  # the urgent one's step
        if is_forgotten:
            await client.move_prefix(pack_ids(PROMPT), "none")
        case.runner.gate.set()
        starts = [item for item in await later if isinstance(item, api.Started)]
        assert [start.cache for start in starts] == [
            api.CacheHit(l2=num_found, to_compute=len(LATER) - num_found)
        ]
        got = await Collected().read(client.attach("later"))
        assert got.ids == want(LATER, 1) and got.started == starts[0]
        await urgent
        stats = await settled(client)
        assert stats["retractions"] == 1
        assert stats["admitted_cached_tokens"] - before["admitted_cached_tokens"] == num_found

    serve(case.engine, work)
