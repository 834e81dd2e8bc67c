# SPDX-License-Identifier: Apache-2.0
"""Steps that sample before the masks of their grammars are filled: nothing of that counts.

The masks of a step are filled when the step before it has sampled. Where a request ended by then,
or the engine stops, the step samples without: no client hears of it, no cached page holds it, and
the KV that the step computed counts all the same. What is said is compared with a plain loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.commit import DispatchedStep
from engine.loop.heart import Keeper
from engine.loop.server import EngineServer
from kvtiers.host_pool import PoolShape
from kvtiers.host_region import make_region_fd
from tests.fakes.late_runner import LateRunner
from tests.fakes.live_engine import (
    EOS,
    Collected,
    LiveEngine,
    byte_vocabulary,
    make_request,
    run,
    serve,
)
from tests.fakes.plain_loop import Answer, PlainLoop
from tests.fakes.scripted_runner import (
    Script,
    ScriptedLayout,
    ScriptedRunner,
    expected_tokens,
    hashed_script,
)

VOCAB = 300
PAGE_SIZE = 4
CHUNK = 17
CONTEXT_LEN = 96
SCRIPT: Script = hashed_script(VOCAB)
# What may come never may come next: the mask of one token is wrong for the one behind it.
TURN_BY_TURN = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="([a-d][w-z]){8}")
ENDS_SOON = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="([a-d][w-z]){2}")
RUNNERS = ["host", "device"]


def make_runner(kind: str) -> ScriptedRunner:
    sizes = {
        "vocab_size": VOCAB,
        "page_size": PAGE_SIZE,
        "num_pages": 48,
        "max_context_len": CONTEXT_LEN,
    }
    if kind == "host":
        return ScriptedRunner(SCRIPT, **sizes)
    return LateRunner(SCRIPT, delay_s=lambda: 0.0, drafts=False, **sizes)


def make_engine(run_dir: Path, runner: ScriptedRunner, l2_fd: int) -> LiveEngine:
    run_dir.mkdir(exist_ok=True)
    page_bytes = ScriptedLayout(PAGE_SIZE).page_bytes
    shape = PoolShape(num_slots=64, page_bytes=page_bytes, page_size=PAGE_SIZE)
    return LiveEngine(
        str(run_dir),
        runner,
        token_budget=CHUNK,
        wait_grammar=True,
        tiers=TiersConfig(l2_bytes=shape.num_bytes + 4096),
        keeper=Keeper(l2_fd=l2_fd),
    )


def prompt_of(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * 104729) % (VOCAB - 3) for i in range(length)]


def right_answer(request: api.GenerateRequest) -> Answer:
    plain = PlainLoop(SCRIPT, byte_vocabulary(VOCAB), VOCAB, CONTEXT_LEN)
    try:
        return plain.answer(request)
    finally:
        plain.close()


async def until(holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit_s, "it never comes to that"
        await asyncio.sleep(0.002)


async def stop_with_two_in_flight(engine: LiveEngine) -> None:
    """Both are dispatched; they run when the engine has let go of them."""
    flight = engine.server._loop._in_flight
    await until(lambda: engine.runner.is_held and len(flight) == 2)
    second = flight[1]
    assert second.sampling.bitmask is not None and not second.sampling.mask_ready.is_set()
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
    await until(second.sampling.mask_ready.is_set)
    engine.runner.gate.set()
    await stopping
    assert engine.runner.num_steps == engine.runner.hold_at + 2, "both ran"


@dataclass(frozen=True)
class Stop:
    """`hold_at`: steps before the first of the two. `computed`: tokens whose KV there is, by hand:
    the prompt's, and of the answer those that a step was given."""

    prompt_len: int
    hold_at: int
    computed: int
    others: int = 0  # tokens of a prompt, of one without a grammar, that comes before


STOPS = {
    "the last chunk of a prompt": Stop(prompt_len=2 * CHUNK - 1, hold_at=0, computed=33),
    "a prompt behind another's": Stop(prompt_len=13, hold_at=0, computed=13, others=CHUNK),
    "a token that fills a page": Stop(prompt_len=14, hold_at=1, computed=16),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("stop", STOPS)
def test_what_a_step_computes_while_an_engine_stops_goes_down_the_tiers(
    tmp_path: Path, runner: str, stop: str
) -> None:
    case, fd = STOPS[stop], make_region_fd()
    prompt = prompt_of(1, case.prompt_len)
    request = make_request("r", prompt, 20, grammar=TURN_BY_TURN)
    sequence = [*prompt, *right_answer(request).ids]
    first = make_engine(tmp_path / "first", make_runner(runner), fd)
    first.runner.hold_at = case.hold_at
    got = Collected()

    async def begin(client: EngineClient) -> None:
        readings = []
        if case.others:
            other = make_request("other", prompt_of(7, case.others), 1)
            readings.append(asyncio.create_task(Collected().read(client.generate(other))))
            await until(lambda: first.runner.is_held)
        readings.append(asyncio.create_task(got.read(client.generate(request))))
        await stop_with_two_in_flight(first)
        for reading in readings:
            reading.cancel()

    async def look(client: EngineClient) -> None:
        hit = await client.query_prefix(sequence)
        assert hit.l2 == case.computed // PAGE_SIZE * PAGE_SIZE
        # And it is the KV of these very tokens.
        history = [*sequence[: case.computed], 9]
        found = await run(client, make_request("after", history, 3))
        assert found.ids == expected_tokens(SCRIPT, history, 3, stop_ids=[EOS], banned_ids=(0, 1))
        assert found.started is not None and found.started.cache.l2 == hit.l2

    try:
        serve(first, begin)
        assert sequence[len(prompt) : len(prompt) + len(got.ids)] == got.ids
        serve(make_engine(tmp_path / "next", make_runner(runner), fd), look)
    finally:
        first.runner.gate.set()
        os.close(fd)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("stop", STOPS)
def test_a_stream_goes_on_where_it_was_when_its_engine_stopped(
    tmp_path: Path, runner: str, stop: str
) -> None:
    case, fd = STOPS[stop], make_region_fd()
    request = make_request("r", prompt_of(1, case.prompt_len), 20, grammar=TURN_BY_TURN)
    right = right_answer(request)
    first = make_engine(tmp_path, make_runner(runner), fd)
    first.runner.hold_at = case.hold_at
    got = Collected()

    async def work(client: EngineClient) -> None:
        others = []
        if case.others:
            other = make_request("other", prompt_of(7, case.others), 1)
            others.append(asyncio.create_task(Collected().read(client.generate(other))))
            await until(lambda: first.runner.is_held)
        reading = asyncio.create_task(got.read(client.generate(request)))
        await stop_with_two_in_flight(first)
        with make_engine(tmp_path, make_runner(runner), fd):
            await asyncio.wait_for(asyncio.gather(reading, *others), 30)

    try:
        serve(first, work)
    finally:
        first.runner.gate.set()
        os.close(fd)
    assert got.ids == right.ids
    assert got.finished is not None and got.finished.reason is right.reason


class Unmasked:
    """Counts the rows that sample for a request that has ended: their masks stay unfilled."""

    def __init__(self, server: EngineServer) -> None:
        self.num_rows = 0
        self._open = server._loop._open_masks
        server._loop._open_masks = self._count  # type: ignore[method-assign]

    def _count(self, step: DispatchedStep) -> None:
        ended = [request.outcome is not None for request in step.requests]
        samples: Sequence[int] = step.samples.tolist()
        self.num_rows += sum(map(bool, (a and b for a, b in zip(ended, samples, strict=True))))
        self._open(step)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("ending", ["grammar over", "stop token", "cancel"])
def test_what_a_step_samples_behind_the_end_of_its_request_counts_for_nothing(
    tmp_path: Path, runner: str, ending: str
) -> None:
    fd = make_region_fd()
    engine = make_engine(tmp_path, make_runner(runner), fd)
    prompt = prompt_of(2, 14)
    grammar = ENDS_SOON if ending == "grammar over" else TURN_BY_TURN
    request = make_request("r", prompt, 20, grammar=grammar)
    right = right_answer(request)
    ids = right.ids
    if ending == "stop token":
        ids = ids[:3]
        request = make_request(
            "r", prompt, 20, grammar=grammar, sampling={"stop_token_ids": (ids[2],)}
        )
        assert ids[2] not in ids[:2]
    elif ending == "cancel":
        engine.runner.hold_at = 2  # two of its tokens are said, two steps are held
        ids = ids[:2]
    watches: list[Unmasked] = []
    engine._prepare = lambda server: watches.append(Unmasked(server))

    async def work(client: EngineClient) -> None:
        got = Collected()
        reading = asyncio.create_task(got.read(client.generate(request)))
        if ending == "cancel":
            await until(lambda: engine.runner.is_held and len(engine.server._loop._in_flight) == 2)
            await until(lambda: len(got.ids) == 2)
            await client.abort("r")
            live = engine.server._desk.all_live
            await until(lambda: live()[0].outcome is not None)
            engine.runner.gate.set()
        await asyncio.wait_for(reading, 30)
        # On a busy machine the request may have ended before a step behind its last one began.
        least = 1 if ending == "cancel" else 0
        assert got.ids == ids and least <= watches[0].num_rows <= 1
        finished = got.finished
        assert finished is not None and finished.error_code is None
        # The last token's own KV does not count, nor does anything behind it.
        assert finished.num_cached_tokens == len(prompt) + len(ids) - (ending != "cancel")
        sequence = [*prompt, *ids]
        behind = expected_tokens(SCRIPT, sequence, 8, banned_ids=(0, 1))
        hit = await client.query_prefix([*sequence, *behind])
        assert hit.l1 + hit.l2 == finished.num_cached_tokens
        for number, history in enumerate(([*sequence, *behind], [*sequence, 9], [*prompt, 9])):
            after = await run(client, make_request(f"after {number}", history, 3))
            assert after.ids == expected_tokens(
                SCRIPT, history, 3, stop_ids=[EOS], banned_ids=(0, 1)
            )

    try:
        serve(engine, work)
    finally:
        engine.runner.gate.set()
        os.close(fd)
