# SPDX-License-Identifier: Apache-2.0
"""Steps that read pages as they come from L2: the same tokens as without, whatever comes.

The scripted model's KV is its token ids, once a layer; it reads a layer behind what the step waits
for of it, so a layer read too early, or of another page, changes tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import api
from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.server import EngineServer
from engine.loop.step_loads import StepLoads
from engine.loop.tier_plane import Mover
from engine.transport import pack_ids
from kvtiers.device_memory import Body, DeviceMemory, Incoming, Wait
from kvtiers.host_pool import PoolShape
from kvtiers.layered_load import Fence, LayeredLoad
from kvtiers.transfer import Move, MoveKind
from tests.engine.test_tiers import PAGE_SIZE, SCRIPT, VOCAB, ask, prompt_of, settled, want
from tests.fakes.flight_watch import FlightWatch
from tests.fakes.live_engine import Collected, LiveEngine, make_request, run, serve
from tests.fakes.memory_store import MemoryStore
from tests.fakes.scripted_runner import ScriptedLayout, ScriptedRunner

NUM_LAYERS = 3
MAX_SLOTS = 4
PROMPT = prompt_of(1, 33)  # eight full pages
LATER = [*PROMPT, 5, 6, 7]


class HeldMemory:
    """L1 whose loads by layers ask `before_layer` before a layer is said to be there, and
    `at_the_end` before the load is over."""

    kind = "cpu"

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.at_the_end: Callable[[], None] = lambda: None
        self.read = memory.read

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        return self._memory.write(pages)

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        slow = LayeredLoad(load.num_layers)

        def arrived(num_layers: int, fence: Fence | None) -> None:
            self.before_layer(num_layers - 1)
            load.arrived(num_layers, fence)

        slow.arrived = arrived  # type: ignore[method-assign]
        self._memory.write_layers(pages, slow)
        self.at_the_end()


class Case:
    """A live engine whose memory can be held; `memory` is there once it serves."""

    memory: HeldMemory

    def __init__(
        self,
        tmp_path: Path,
        *,
        overlap_loads: bool = True,
        max_slots: int = MAX_SLOTS,
        **options: object,
    ) -> None:
        self.runner = ScriptedRunner(
            SCRIPT,
            vocab_size=VOCAB,
            page_size=PAGE_SIZE,
            num_pages=24,
            max_slots=MAX_SLOTS,
            max_context_len=60,
            num_layers=NUM_LAYERS,
        )
        layout = ScriptedLayout(PAGE_SIZE, NUM_LAYERS)
        shape = PoolShape(num_slots=64, page_bytes=layout.page_bytes, page_size=PAGE_SIZE)
        way = "on" if overlap_loads else "off"
        tiers = TiersConfig(l2_bytes=shape.num_bytes + 4096, overlap_loads=way)
        self.engine = LiveEngine(
            str(tmp_path),
            self.runner,
            max_slots=max_slots,
            tiers=tiers,
            prepare=self._prepare,
            **options,  # type: ignore[arg-type]
        )

    def _prepare(self, server: EngineServer) -> None:
        FlightWatch(server, self.runner, MAX_SLOTS)
        plane = server._tiers._plane
        assert plane is not None
        self.memory = HeldMemory(plane.transfers._device)
        plane.transfers._device = self.memory

    def damage(self, page: int) -> None:
        """Flip a bit of the page of `PROMPT`, in L2."""
        plane = self.engine.server._tiers._plane
        assert plane is not None
        name = plane.names.find(self.names[16 * page : 16 * page + 16])
        assert name is not None
        slot = plane._page_of[name.page_hash]
        plane.transfers.pool.slot(slot)[256 + 5] ^= 4

    async def lower(self, client: EngineClient, prompt: list[int] = PROMPT) -> None:
        """The prompt's pages lie in L2 alone."""
        first = await run(client, make_request(f"first {len(prompt)}", prompt, 1))
        assert first.finished is not None
        self.names = first.finished.page_hashes
        await settled(client)
        await client.move_prefix(pack_ids(prompt), "l2")
        stats = await settled(client)
        assert stats["cached_pages"] <= 1


async def until(holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit_s, "it never comes to that"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("overlap_loads", [True, False])
def test_a_later_turn_reads_its_history_as_it_comes(tmp_path: Path, overlap_loads: bool) -> None:
    case = Case(tmp_path, overlap_loads=overlap_loads)

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        hit = await ask(client, "later", LATER, 6)
        assert (hit.l1, hit.l2, hit.to_compute) == (0, 32, 4)
        stats = await settled(client)
        assert stats["load_back_pages"] == 8 and stats["load_back_lost"] == 0
        assert stats["load_back_layered_pages"] == (8 if overlap_loads else 0)

    serve(case.engine, work)
    assert (case.runner.num_loading_steps > 0) is overlap_loads


def test_the_step_is_under_way_before_the_last_layer_has_come(tmp_path: Path) -> None:
    case = Case(tmp_path)
    last_layer = threading.Event()
    steps_at_last: list[int] = []

    def before_layer(layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            last_layer.wait(20)
            steps_at_last.append(case.runner.num_steps)

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        case.memory.before_layer = before_layer
        num_before = case.runner.num_steps
        got = Collected()
        reading = asyncio.create_task(got.read(client.generate(make_request("r", LATER, 4))))
        await until(lambda: case.runner.num_steps > num_before)
        last_layer.set()
        await reading
        assert got.ids == want(LATER, 4)
        assert steps_at_last == [num_before + 1]

    serve(case.engine, work)


@pytest.mark.parametrize("is_lost", [False, True])
def test_no_token_is_told_before_what_it_was_computed_from_is_known_to_be_good(
    tmp_path: Path, is_lost: bool
) -> None:
    case = Case(tmp_path)
    may_end = threading.Event()

    def at_the_end() -> None:
        may_end.wait(20)
        if is_lost:
            raise RuntimeError("what the device did wrong shows at the end")

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        case.memory.at_the_end = at_the_end
        num_before = case.runner.num_steps
        got = Collected()
        reading = asyncio.create_task(got.read(client.generate(make_request("r", LATER, 6))))
        # The step, and the one behind it, have sampled all they can.
        await until(lambda: case.runner.num_steps == num_before + 2)
        await asyncio.sleep(0.05)
        assert case.runner.num_steps == num_before + 2 and got.ids == []
        assert got.started is None, "nor what of the prompt was found"
        may_end.set()
        await reading
        assert got.ids == want(LATER, 6)
        assert got.started is not None
        hit = got.started.cache
        assert (hit.l1, hit.l2, hit.to_compute) == ((0, 0, 36) if is_lost else (0, 32, 4))
        stats = await settled(client)
        assert stats["load_back_lost"] == (8 if is_lost else 0)
        assert stats["steps_failed"] == stats["retractions"] == 0

    serve(case.engine, work)


@pytest.mark.parametrize("page", range(0, 8, 3))
def test_a_page_damaged_in_l2_is_computed_anew_and_those_before_it_are_not(
    tmp_path: Path, page: int
) -> None:
    case = Case(tmp_path, token_budget=64)

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        before = await client.stats()
        case.damage(page)
        hit = await ask(client, "later", LATER, 6)
        num_there = PAGE_SIZE * page
        assert (hit.l1, hit.l2, hit.to_compute) == (0, num_there, len(LATER) - num_there)
        stats = await settled(client)
        assert stats["load_back_lost"] == 1
        assert stats["admitted_cached_tokens"] - before["admitted_cached_tokens"] == num_there
        # Once for nothing, then from the bad page on; and five tokens more.
        num_tokens = 4 + len(LATER) - PAGE_SIZE * page + 5
        assert num_tokens <= stats["step_tokens"] - before["step_tokens"] <= num_tokens + 1
        assert stats["duplicate_pages"] == 0

    serve(case.engine, work)


SAMPLINGS = {
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "drawn": {"temperature": 0.9, "seed": 11, "presence_penalty": 1.0},
}


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("page", [None, 0, 5])
def test_what_a_void_row_sampled_leaves_no_trace(
    tmp_path: Path, kind: str, page: int | None
) -> None:
    """Not in the counts of a penalty, nor in the place a draw is made from."""
    sampling = {"ignore_eos": True, **SAMPLINGS[kind]}

    async def say(client: EngineClient) -> list[int]:
        return (await run(client, make_request("later", LATER, 12, sampling=sampling))).ids

    answers: list[list[int]] = []

    async def alone(client: EngineClient) -> None:
        answers.append(await say(client))

    async def with_loads(client: EngineClient) -> None:
        await case.lower(client)
        if page is not None:
            case.damage(page)
        answers.append(await say(client))
        lost = (await settled(client))["load_back_lost"]
        assert lost == (page is not None)

    plain = Case(tmp_path / "plain", overlap_loads=False)
    serve(plain.engine, alone)
    case = Case(tmp_path / "case")
    serve(case.engine, with_loads)
    assert len(answers[0]) == 12 and answers[0] == answers[1]


def test_a_grammar_is_filled_for_what_was_said_and_not_for_what_was_void(tmp_path: Path) -> None:
    grammar = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="(ab|cd){3,5}")
    answers: list[list[int]] = []

    async def say(client: EngineClient) -> None:
        got = await run(client, make_request("later", LATER, 12, grammar=grammar))
        assert got.finished is not None and got.finished.error_code is None
        answers.append(got.ids)

    async def with_loads(client: EngineClient) -> None:
        await case.lower(client)
        case.damage(3)
        await say(client)
        assert (await settled(client))["load_back_lost"] == 1

    serve(Case(tmp_path / "plain", wait_grammar=True, overlap_loads=False).engine, say)
    case = Case(tmp_path / "case", wait_grammar=True)
    serve(case.engine, with_loads)
    assert len(answers[0]) >= 6 and answers[0] == answers[1]


@pytest.mark.parametrize("is_lost", [False, True])
def test_others_in_the_step_get_their_tokens_whatever_becomes_of_the_load(
    tmp_path: Path, is_lost: bool
) -> None:
    case = Case(tmp_path)
    may_come = threading.Event()

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        case.memory.before_layer = lambda layer: may_come.wait(20) and None
        if is_lost:
            case.damage(4)
        prompts = [prompt_of(seed, 5) for seed in (3, 4)]
        others = [
            asyncio.create_task(run(client, make_request(f"o{i}", prompt, 20)))
            for i, prompt in enumerate(prompts)
        ]
        later = asyncio.create_task(run(client, make_request("later", LATER, 6)))
        await asyncio.sleep(0.02)
        may_come.set()
        assert (await later).ids == want(LATER, 6)
        for other, prompt in zip(others, prompts, strict=True):
            assert (await other).ids == want(prompt, 20)
        await settled(client)

    serve(case.engine, work)


@pytest.mark.parametrize("when", ["before it came", "behind the step"])
def test_an_abort_while_pages_come_leaves_none_behind(tmp_path: Path, when: str) -> None:
    case = Case(tmp_path)
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        is_held.set()
        may_go_on.wait(20)

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        if when == "before it came":
            case.memory.before_layer = hold
        else:
            case.memory.at_the_end = hold
        num_before = case.runner.num_steps
        got = Collected()
        reading = asyncio.create_task(got.read(client.generate(make_request("r", LATER, 6))))
        await until(is_held.is_set)
        if when == "behind the step":
            await until(lambda: case.runner.num_steps > num_before)
        await client.abort("r")
        may_go_on.set()
        await reading
        assert got.finished is not None and got.finished.reason is api.FinishReason.ABORTED
        stats = await settled(client)
        assert stats["owned_pages"] == 0
        # What came is there for the next one.
        hit = await ask(client, "next", LATER, 3)
        assert hit.l1 >= 32

    serve(case.engine, work)


def test_an_engine_stops_while_pages_come(tmp_path: Path) -> None:
    case = Case(tmp_path)
    may_end = threading.Event()

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        case.memory.at_the_end = lambda: may_end.wait(20) and None
        num_before = case.runner.num_steps
        reading = asyncio.create_task(Collected().read(client.generate(make_request("r", LATER))))
        await until(lambda: case.runner.num_steps > num_before)
        stopping = asyncio.create_task(asyncio.to_thread(case.engine.stop))
        await asyncio.sleep(0.05)
        may_end.set()
        await stopping
        reading.cancel()

    serve(case.engine, work)


def test_a_row_whose_pages_came_with_no_step_is_refused() -> None:
    """The scheduler plans a row beside the moves it waits for; without it, nobody would wait."""
    started: list[int] = []
    loads = StepLoads(NUM_LAYERS, lambda moves, load: started.extend(m.ticket for m in moves))
    moves = [
        Move(ticket=t, kind=MoveKind.LOAD_BACK, source=t, target=t, page_hash=b"", name=None)
        for t in (7, 8)
    ]
    row = np.array([[7, 9]], np.int64)
    early: Any = SimpleNamespace(row_loads=row[:0])
    late: Any = SimpleNamespace(row_loads=np.array([[-1, -1], [7, 9]], np.int64))
    assert loads.take(early, moves) == moves and started == []
    with pytest.raises(AssertionError, match="tickets 7 to 8"):
        loads.of_rows(late)
    assert loads.take(late, moves) == [] and started == [7, 8]
    first, second = loads.of_rows(late)
    assert first is None and second is not None
    loads.note_ack(7, ok=True)
    assert loads.of_rows(late) == [None, second] and not second.is_over
    loads.note_ack(8, ok=False)
    assert second.is_over and loads.take_bad() == [second] and loads.take_bad() == []


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_engine_stops_though_pages_never_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """With one step under way behind them, or two: what else moves still gets its time."""
    monkeypatch.setattr("engine.loop.server.TIER_FLUSH_S", 0.1)
    case = Case(tmp_path)
    may_end = threading.Event()
    was_closed: list[bool] = []

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        plane = case.engine.server._tiers._plane
        assert plane is not None
        close = plane.transfers.close

        def watched(timeout_s: float = 0.0) -> None:
            was_closed.append(not may_end.is_set())
            close(timeout_s)

        plane.transfers.close = watched  # type: ignore[method-assign]
        case.memory.at_the_end = lambda: may_end.wait(20) and None
        num_before = case.runner.num_steps
        request = make_request("r", LATER, 1 if num_steps == 1 else 6)
        reading = asyncio.create_task(Collected().read(client.generate(request)))
        await until(lambda: case.runner.num_steps == num_before + num_steps)
        await asyncio.to_thread(case.engine.stop)
        may_end.set()
        reading.cancel()

    serve(case.engine, work)
    assert was_closed == [True]


class HungStore(MemoryStore):
    """Once it `hangs`, a put waits until it may answer."""

    def __init__(self) -> None:
        super().__init__(ScriptedLayout(PAGE_SIZE, NUM_LAYERS).fingerprint())
        self.hangs = False
        self.is_in = threading.Event()
        self.may_answer = threading.Event()

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        if self.hangs:
            self.is_in.set()
            self.may_answer.wait(30)
        return super().put(keys, blobs, parents)


def test_what_runs_goes_down_before_an_engine_that_stops_waits_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs may cost what it was to keep, not what L2 would have kept."""
    monkeypatch.setattr("engine.loop.server.TIER_FLUSH_S", 60.0)  # nobody gives up meanwhile
    store = HungStore()
    case = Case(tmp_path, store=store)
    may_end = threading.Event()
    were_waiting: list[bool] = []

    async def work(client: EngineClient) -> None:
        await case.lower(client)
        plane = case.engine.server._tiers._plane
        assert plane is not None
        finish = plane.finish

        def watched(control: Mover, timeout_s: float, *, may_plan: bool = True) -> None:
            were_waiting.append(not plane.transfers.wait_idle(0))
            store.may_answer.set()
            finish(control, timeout_s, may_plan=may_plan)

        plane.finish = watched  # type: ignore[method-assign]
        store.hangs = True
        await run(client, make_request("other", prompt_of(9, 5), 1))
        await until(store.is_in.is_set)
        case.memory.at_the_end = lambda: may_end.wait(20) and None
        num_before = case.runner.num_steps
        reading = asyncio.create_task(Collected().read(client.generate(make_request("r", LATER))))
        await until(lambda: case.runner.num_steps > num_before)
        stopping = asyncio.create_task(asyncio.to_thread(case.engine.stop))
        await asyncio.sleep(0.05)
        may_end.set()
        await stopping
        reading.cancel()

    serve(case.engine, work)
    assert were_waiting == [True]
