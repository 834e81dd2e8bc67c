# SPDX-License-Identifier: Apache-2.0
"""A store lets pages go and tells nobody: what is said to be suspended is in it all the same, and a
session that lives on gets its pages back into it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import api
from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.page_names import PageNames
from engine.loop.store_checks import ASK_AGAIN_S, StoreChecks
from engine.transport import pack_ids
from kvtiers.store import StoreState, resolve_parents
from tests.engine.test_tiers import PAGE_SIZE, ask, make_runner, prompt_of, settled
from tests.fakes.live_engine import LiveEngine, serve
from tests.fakes.memory_store import MemoryStore
from tests.fakes.scripted_runner import ScriptedLayout

PROMPT = prompt_of(1, 33)
NUM_PAGES = 8
TIERS = TiersConfig(l3_wait_ms=60_000)


class ChainStore(MemoryStore):
    """As real stores do, it takes no page whose head is not there."""

    def __init__(self) -> None:
        super().__init__(ScriptedLayout(PAGE_SIZE).fingerprint())
        self.parents: dict[str, str] = {}

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        kept = []
        for key, blob, parent in zip(keys, blobs, resolve_parents(keys, parents), strict=True):
            self.parents[key] = parent
            is_kept = not parent or parent in self.objects
            kept.append(is_kept and super().put([key], [blob], [parent])[0])
        return kept

    def evict(self, count: int) -> list[str]:
        """So many pages go, tails first; their keys."""
        gone: list[str] = []
        while len(gone) < count:
            followed = {self.parents[key] for key in self.objects}
            end = next(key for key in self.objects if key not in followed)
            del self.objects[end]
            gone.append(end)
        return gone


def serve_with(tmp_path: Path, store: MemoryStore, work: object) -> None:
    engine = LiveEngine(str(tmp_path), make_runner(24), token_budget=64, tiers=TIERS, store=store)
    serve(engine, work)  # type: ignore[arg-type]


def test_a_suspended_prefix_is_in_the_store_though_that_had_let_some_of_it_go(
    tmp_path: Path,
) -> None:
    store = ChainStore()

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPT, 1)
        await settled(client)
        assert len(store.objects) == NUM_PAGES
        gone = store.evict(5)
        moved = await client.move_prefix(pack_ids(PROMPT), "l3")
        assert moved.cache == api.CacheHit(l3=32, to_compute=1)
        assert set(gone) <= set(store.objects) and len(store.objects) == NUM_PAGES
        assert await ask(client, "b", [*PROMPT, 9]) == api.CacheHit(l3=32, to_compute=2)

    serve_with(tmp_path, store, work)


def test_what_went_while_it_was_suspended_is_said_to_be_computed_again(tmp_path: Path) -> None:
    store = ChainStore()

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPT, 1)
        await client.move_prefix(pack_ids(PROMPT), "l3")
        store.evict(3)
        moved = await client.move_prefix(pack_ids(PROMPT), "l3")
        assert moved.cache == api.CacheHit(l3=20, to_compute=13)
        assert await ask(client, "b", [*PROMPT, 9]) == api.CacheHit(l3=20, to_compute=14)

    serve_with(tmp_path, store, work)


def test_a_store_that_is_not_well_is_not_believed_to_have_lost_anything(tmp_path: Path) -> None:
    store = ChainStore()

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPT, 1)
        await client.move_prefix(pack_ids(PROMPT), "l3")
        for state in (StoreState.DOWN, StoreState.DEGRADED):
            store.state = state
            moved = await client.move_prefix(pack_ids(PROMPT), "l3")
            assert moved.cache == api.CacheHit(l3=32, to_compute=1)
        store.state = StoreState.UP
        assert len(store.objects) == NUM_PAGES
        assert await ask(client, "b", [*PROMPT, 9]) == api.CacheHit(l3=32, to_compute=2)

    serve_with(tmp_path, store, work)


def test_a_session_that_grows_past_what_the_store_let_go_gets_it_back_there(
    tmp_path: Path,
) -> None:
    store = ChainStore()

    async def work(client: EngineClient) -> None:
        await ask(client, "a", PROMPT, 1)
        await settled(client)
        gone = set(store.evict(3))
        limit_s = time.monotonic() + 60
        await ask(client, "b", [*PROMPT, *prompt_of(2, 4)], 1)
        while not gone <= set(store.objects):
            assert time.monotonic() < limit_s, "pages that were let go are not stored again"
            await asyncio.sleep(0.005)
        for num_more in (8, 12, 16, 20):  # what was refused meanwhile goes with the next page
            await settled(client)
            await ask(client, f"c{num_more}", [*PROMPT, *prompt_of(2, num_more)], 1)
        await settled(client)
        assert len(store.objects) >= NUM_PAGES + 4
        heads = [store.parents[key] for key in store.objects]
        assert all(head in store.objects for head in heads if head)

    serve_with(tmp_path, store, work)


class Asked:
    """Stands for the transfers: questions to a store, not answered yet."""

    def __init__(self) -> None:
        self.store = ChainStore()
        self.questions: list[tuple[Sequence[bytes], Callable[[int], None]]] = []

    def probe(self, page_hashes: Sequence[bytes], answer: Callable[[int], None]) -> None:
        self.questions.append((page_hashes, answer))


def make_checks(num_pages: int) -> tuple[Asked, StoreChecks, list[bytes], list[float]]:
    names = PageNames(page_size=PAGE_SIZE, model_fingerprint="m", most=100)
    hashes: list[bytes] = []
    token_ids = np.arange(PAGE_SIZE * num_pages, dtype=np.int32)
    for num in range(1, num_pages + 1):
        hashes.append(names.note(token_ids[: PAGE_SIZE * num], ""))
    asked, now_s = Asked(), [0.0]
    return asked, StoreChecks(asked, names, lambda: now_s[0]), hashes, now_s  # type: ignore[arg-type]


def test_what_is_stored_while_the_store_is_asked_is_not_gone() -> None:
    asked, checks, hashes, _ = make_checks(6)
    checks.note_stored(hashes[3])
    check = checks.ask(hashes[5])
    ((pages, answer),) = asked.questions
    assert list(pages) == hashes
    checks.note_stored(hashes[4])
    answer(2)
    assert not check.is_done and checks.take() == [check] and check.is_done
    assert list(check.gone) == [hashes[2], hashes[3], hashes[5]]
    assert checks.take() == []


@pytest.mark.parametrize("trouble", ["fails", "goes down"])
def test_an_answer_of_a_store_that_fails_meanwhile_says_nothing(trouble: str) -> None:
    asked, checks, hashes, _ = make_checks(3)
    check = checks.ask(hashes[2])
    if trouble == "fails":
        asked.store.counters["failures"] += 1
    else:
        asked.store.state = StoreState.DOWN
    asked.questions[0][1](0)
    assert checks.take() == [check] and list(check.gone) == []


def test_doubt_asks_once_in_a_while_and_one_question_at_a_time() -> None:
    asked, checks, hashes, now_s = make_checks(3)
    checks.doubt(bytes(16))
    assert asked.questions == []
    for _ in range(3):
        checks.doubt(hashes[2])
        now_s[0] += ASK_AGAIN_S
    assert len(asked.questions) == 1
    asked.questions[0][1](3)
    checks.take()
    checks.doubt(hashes[1])
    checks.doubt(hashes[2])
    assert [list(pages) for pages, _ in asked.questions] == [hashes, hashes[:2]]
