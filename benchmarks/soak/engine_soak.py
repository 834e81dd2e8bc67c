# SPDX-License-Identifier: Apache-2.0
"""Random loads on the live engine, everything on at once, around a model whose KV is token ids.

    python -m benchmarks.soak.engine_soak [--minutes 10] [--seed 0] [--runs N] [--dump DIR]
                                          [--overlap-loads]

A run draws an engine (pools, slots, L2, a store that is slow, loses, damages or hangs, drafts,
late steps and copies, when a step gets its successor, steps that read pages as they come, loads
that fail then, restarts over the same L2 and store) and talks to it: turns that branch
from shared stems, with grammars, penalties, logprobs, priorities, aborts, readers that leave and
come back, moves, leases, hints, rollbacks between them. Checked: every token, ending and logprob
against a plain loop; no transfer meets a step or another transfer (`FlightWatch`), whether or not
it did harm this time; the scheduler's integrity before each step; every page in its one place at
the end. One JSON line a minute and one at the end; exit 1 with the seeds that broke, and with
what was dispatched, moved and asked in DIR. Does not know how the engine does any of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import api
from engine.client import EngineClient
from engine.config import GrammarConfig, TiersConfig
from engine.errors import EngineError
from engine.loop.event_loop import RunAhead
from engine.loop.heart import Keeper
from engine.loop.server import EngineServer
from engine.transport import pack_ids
from kvtiers.breaker import BreakerLimits, BreakerStore
from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.file_store import FileStore
from kvtiers.host_pool import PoolShape
from kvtiers.host_region import make_region_fd
from kvtiers.layout import KvLayout
from kvtiers.store import Store
from tests.fakes.flight_watch import FlightWatch
from tests.fakes.late_runner import Delays, HarshRunner, LaggingMemory, LateRunner
from tests.fakes.live_engine import Collected, LiveEngine, byte_vocabulary
from tests.fakes.memory_store import MemoryStore
from tests.fakes.plain_loop import Answer, PlainLoop
from tests.fakes.scripted_runner import (
    Script,
    ScriptedLayout,
    hashed_script,
    repeating_script,
)

VOCAB = 130
NUM_LAYERS = 3
RUN_LIMIT_S = 120.0
GRAMMARS = [
    api.GrammarSpec(kind=api.GrammarKind.REGEX, text=text)
    for text in ("[a-f]{1,12}", '(\\{"p": "[a-c/]{1,8}"\\}){1,3}', "(ab|cd)*[0-9]{2,5}")
]
# Endings that a fault of the run explains; the tokens before them must be right all the same.
CODES_BY_FAULT = {
    "overflow": {"queue_full"},
    "restarts": {"engine_draining", "engine_restarted", "unknown_request"},
    "failing steps": {"step_failed"},
    "short memory": {"unknown_request"},
}


def remembered(script: Script, nan_one_in: int) -> Script:
    """The same logits, found once for engine and plain loop; NaN behind some histories."""

    @functools.lru_cache(maxsize=100_000)
    def find(raw: bytes) -> torch.Tensor:
        if nan_one_in and zlib.crc32(raw) % nan_one_in == 1:
            return torch.full((VOCAB,), torch.nan)
        return script(np.frombuffer(raw, np.int32).tolist())

    return lambda history: find(np.asarray(history, np.int32).tobytes())


class Setting:
    """What one run's engines are, drawn from its seed."""

    def __init__(self, seed: int, overlap_loads: bool) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.page_size = rng.choice([2, 4, 4, 8])
        self.max_context_len = rng.choice([48, 96, 128])
        self.num_pages = rng.choice([14, 20, 30, 80])
        self.most_tokens = min(self.max_context_len, self.num_pages * self.page_size)
        self.max_slots = rng.choice([1, 2, 4, 4, 6])
        self.token_budget = rng.choice([4, 16, 16, 64])
        self.max_waiting = rng.choice([6, 1024, 1024])
        self.keep_outputs_bytes = rng.choice([600, 1 << 20, 1 << 20])
        self.num_l2_pages = rng.choice([0, 1, 8, 30, 200, 200])
        self.store_kind = rng.choice(["none", "memory", "memory", "file"])
        self.store_fault = rng.choice(["", "", "slow", "loses", "damages", "hangs"])
        self.l3_wait_ms = rng.choice([0, 20, 500])
        self.speculation = rng.choice(["none", "ngram", "mtp"])
        self.is_late = rng.random() < 0.7
        self.step_delays = rng.choice([[0.0], [0.0, 0.004], [0.001, 0.02]])
        self.copy_delays = rng.choice([[0.0], [0.0, 0.004], [0.0, 0.03]])
        self.repeats = rng.random() < (0.3 if self.speculation == "none" else 0.8)
        self.nan_one_in = rng.choice([0, 0, 400])
        self.num_restarts = rng.choice([0, 0, 0, 1, 2])
        self.failing_steps = set(range(15, 400, 9)) if rng.random() < 0.15 else set()
        # Half of the runs are short branches off short stems, many at once: steps copy, and loads
        # want the room.
        self.is_crowded = rng.random() < 0.5
        self.num_talks = rng.randrange(15, 30) if self.is_crowded else rng.randrange(3, 14)
        self.most_turns = 2 if self.is_crowded else 5
        self.most_stem = 24 if self.is_crowded else 40
        self.grammar_budget_ms = GrammarConfig().budget_ms
        self.most_new = 8  # tokens of a turn's prompt behind what it goes on from
        self.overlap_loads = rng.random() < 0.5 or overlap_loads
        self.load_fails_one_in = rng.choice([0, 0, 6])
        # As it is no step of so small a model is long, nor does one say what a token costs.
        self.run_ahead = rng.choice(
            [
                RunAhead(),
                RunAhead(tokens=3, ms=3, timed_tokens=4),
                RunAhead(tokens=1, ms=20, timed_tokens=2),
                RunAhead(tokens=1, ms=0, timed_tokens=1),
            ]
        )
        self.lone_token_budget = rng.choice([0, 0, 40, 200])

    @property
    def excused(self) -> set[str]:
        faults = {
            "overflow": self.max_waiting < self.num_talks,
            "restarts": self.num_restarts > 0,
            "failing steps": bool(self.failing_steps),
            "short memory": self.keep_outputs_bytes < 1000,
        }
        return set().union(*(CODES_BY_FAULT[name] for name, is_on in faults.items() if is_on))


class Run:
    """One seeded run. Times are the machine's own, so a seed repeats the load, not its order."""

    def __init__(self, seed: int, directory: Path, overlap_loads: bool) -> None:
        self.setting = setting = self._make_setting(seed, overlap_loads)
        self.directory = directory
        self.script = self._make_script()
        self.vocabulary = byte_vocabulary(VOCAB)
        self.plain = PlainLoop(self.script, self.vocabulary, VOCAB, setting.max_context_len)
        self.layout = self._make_layout()
        self.l2_fd = make_region_fd()
        self.memory_store = MemoryStore(self.layout.fingerprint())
        self.store = self._make_store()
        rng = random.Random(seed + 1)
        self.stems = [ids_of(rng, rng.randrange(4, setting.most_stem)) for _ in range(3)]
        self.histories = list(self.stems)
        self.watches: list[FlightWatch] = []
        self.asked: list[dict[str, Any]] = []
        self.num_tokens = 0
        self.num_lower_tokens = 0
        self.runners: list[HarshRunner] = []
        self.engine = self._make_engine()

    def _make_setting(self, seed: int, overlap_loads: bool) -> Setting:
        return Setting(seed, overlap_loads)

    def _make_script(self) -> Script:
        setting = self.setting
        script = repeating_script(VOCAB) if setting.repeats else hashed_script(VOCAB)
        return remembered(script, setting.nan_one_in)

    def _make_layout(self) -> KvLayout:
        return ScriptedLayout(self.setting.page_size, NUM_LAYERS)

    def _make_talk(self, number: int) -> Talk:
        return Talk(self, number)

    @property
    def _store_bytes(self) -> int:
        return 1 << 20

    def _make_store(self) -> Store | None:
        kind, layout = self.setting.store_kind, self.layout.fingerprint()
        if kind == "none" or not self.setting.num_l2_pages:
            return None
        bare: Store = self.memory_store
        if kind == "file":
            bare = FileStore(self.directory / "store", self._store_bytes, layout)
        deadlines = Deadlines(probe_s=0.1, call_s=0.1, bytes_per_s=1e9, close_s=0.1)
        limits = BreakerLimits(first_pause_s=0.1, max_pause_s=0.3)
        self._set_fault(self.setting.store_fault)
        return BreakerStore(DeadlineStore(bare, deadlines), layout, limits)

    def _set_fault(self, fault: str) -> None:
        store, rng = self.memory_store, random.Random(self.setting.seed)

        def lose() -> None:
            for key in [key for key in list(store.objects) if rng.random() < 0.05]:
                store.objects.pop(key, None)

        def damage() -> None:
            for key in [key for key in list(store.objects) if rng.random() < 0.05]:
                blob = store.objects.get(key, b"\0")
                store.objects[key] = blob[:-1] + bytes([blob[-1] ^ 4])

        store.before_call = {
            "": lambda: None,
            "slow": lambda: time.sleep(rng.random() * 0.02),
            "loses": lose,
            "damages": damage,
            "hangs": lambda: time.sleep(0.3 if rng.random() < 0.1 else 0.0),
        }[fault]

    def _make_runner(self) -> HarshRunner:
        setting = self.setting
        sizes = dict(
            vocab_size=VOCAB,
            page_size=setting.page_size,
            num_pages=setting.num_pages,
            max_slots=setting.max_slots,
            max_context_len=setting.max_context_len,
            num_layers=NUM_LAYERS,
        )
        kind = LateRunner if setting.is_late else HarshRunner
        runner = kind(
            self.script,
            delay_s=Delays(setting.seed, setting.step_delays),
            drafts=setting.speculation == "mtp",
            **sizes,
        )
        runner.bad_steps = set(setting.failing_steps)
        self.runners.append(runner)
        return runner

    def _make_engine(self) -> LiveEngine:
        setting, runner = self.setting, self._make_runner()
        num = setting.num_l2_pages
        shape = PoolShape(
            num_slots=num, page_bytes=self.layout.page_bytes, page_size=setting.page_size
        )

        def prepare(server: EngineServer) -> None:
            server._loop.run_ahead = setting.run_ahead
            self._watch(server, runner)

        return LiveEngine(
            str(self.directory),
            runner,
            max_slots=setting.max_slots,
            token_budget=setting.token_budget,
            lone_token_budget=setting.lone_token_budget,
            max_waiting=setting.max_waiting,
            keep_outputs_bytes=setting.keep_outputs_bytes,
            vocabulary=self.vocabulary,
            grammar=GrammarConfig(budget_ms=setting.grammar_budget_ms),
            tiers=TiersConfig(
                l2_bytes=shape.num_bytes + 4096 if num else 0,
                l3_wait_ms=setting.l3_wait_ms,
                overlap_loads="on" if setting.overlap_loads else "off",
            ),
            speculation=setting.speculation,
            keeper=Keeper(l2_fd=self.l2_fd),
            store=self.store,
            prepare=prepare,
        )

    def _watch(self, server: EngineServer, runner: HarshRunner) -> None:
        setting = self.setting
        self.watches.append(FlightWatch(server, runner, setting.max_slots))
        plane = server._tiers._plane
        if plane is not None:
            delays = Delays(setting.seed + 2, setting.copy_delays)
            odds = random.Random(setting.seed + 4)
            one_in = setting.load_fails_one_in

            def fails() -> bool:
                return one_in > 0 and odds.randrange(one_in) == 0

            memory = LaggingMemory(plane.transfers._device, delays, fails)
            plane.transfers._device = memory

    # The run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises whatever is wrong."""
        try:
            self.engine.__enter__()
            asyncio.run(self._main())
        finally:
            self.engine.__exit__()
            self.plain.close()
            os.close(self.l2_fd)
        if self.engine.error is not None:
            raise self.engine.error

    async def _main(self) -> None:
        work = asyncio.create_task(self._work())
        end_s = time.monotonic() + RUN_LIMIT_S
        while not work.done():
            await asyncio.wait([work], timeout=0.1)
            if self.engine.error is not None:
                work.cancel()
                raise self.engine.error
            if time.monotonic() > end_s:
                stats = await self.client.stats()
                open_ids = list(self.client._streams)
                work.cancel()
                raise AssertionError(f"stuck: {open_ids} {stats}")
        work.result()

    async def _work(self) -> None:
        client = self.client = EngineClient(self.engine.socket_path, reconcile_s=1.0)
        other = self.other = EngineClient(self.engine.socket_path, reconcile_s=1.0)
        await client.start()
        await other.start()
        await client.wait_ready(20)
        events = asyncio.create_task(self._follow_events())
        try:
            talks = [self._make_talk(number) for number in range(self.setting.num_talks)]
            restarts = asyncio.create_task(self._restart())
            await asyncio.gather(*(talk.run() for talk in talks))
            await restarts
            await self._settle()
        finally:
            events.cancel()
            await client.close()
            await other.close()

    async def _follow_events(self) -> None:
        async for _ in self.other.kv_events():
            pass

    async def _restart(self) -> None:
        rng = random.Random(self.setting.seed + 3)
        for _ in range(self.setting.num_restarts):
            await asyncio.sleep(rng.random() * 0.4)
            old = self.engine
            await asyncio.to_thread(old.stop, rng.choice([0.0, 0.05]))
            if old.error is not None:
                return
            self.engine = self._make_engine()
            await asyncio.to_thread(self.engine.__enter__)

    async def _settle(self) -> None:
        """Nothing runs or moves any more: every page is in its one place, and sound."""
        self._set_fault("")
        limit_s = time.monotonic() + 60
        while True:
            await self.client.drain_tiers(timeout_s=2)
            stats = await self.client.stats()
            is_moving = stats.get("transfers_in_flight", 0) or stats.get("move_orders", 0)
            if not is_moving and stats["requests_live"] == 0:
                break
            assert time.monotonic() < limit_s, f"the engine does not come to rest: {stats}"
            await asyncio.sleep(0.02)
        for tier, total in (("", "num_pages"), ("_l2", "num_l2_pages")):
            assert stats[f"in_flight{tier}_pages"] == 0, stats
            held = stats[f"free{tier}_pages"] + stats[f"cached{tier}_pages"]
            assert held == stats[total], stats
        assert stats["owned_pages"] == 0, stats
        if self.setting.store_kind != "file" and self.setting.store_fault == "":
            verified = await self.client.verify_tiers()
            assert not any(verified.bad.values()), verified

    def dump(self, path: Path) -> None:
        """What led to a failure: steps and moves of each engine, and what was asked and said."""
        lives = [list(watch.log) for watch in self.watches]
        with path.open("w") as file:
            json.dump(
                {"setting": vars(self.setting), "asked": self.asked, "lives": lives},
                file,
                default=lambda value: sorted(value) if isinstance(value, set) else repr(value),
            )


class Talk:
    """A session: turns one after the other, and what its owner does between them."""

    def __init__(self, run: Run, number: int) -> None:
        self.owner = run
        self.number = number
        self.rng = random.Random(run.setting.seed * 1000 + number)
        self.turn = 0

    async def run(self) -> None:
        rng, setting = self.rng, self.owner.setting
        await asyncio.sleep(rng.random() * 0.3)
        history = self._branch()
        for self.turn in range(rng.randrange(setting.most_turns) + 1):
            most = setting.most_tokens - 4
            new = setting.most_new
            if len(history) > most - new or rng.random() < 0.2:
                history = self._branch()
            prompt = [*history[: most - new], *ids_of(rng, rng.randrange(1, new + 1))]
            history = [*prompt, *await self._ask(prompt)]
            self.owner.histories.append(history)
            await self._between(history)

    def _branch(self) -> list[int]:
        stems, histories = self.owner.stems, self.owner.histories[-12:]
        found = self.rng.choice(stems if self.owner.setting.is_crowded else histories + stems)
        return found[: self.rng.randrange(1, len(found) + 1)]

    # A turn -----------------------------------------------------------------------------------

    def _request(self, prompt: list[int]) -> api.GenerateRequest:
        rng = self.rng
        most = self.owner.setting.most_tokens - len(prompt)
        num = rng.randrange(1, min(most, rng.choice([8, 40])) + 1)
        sampling: dict[str, Any] = {"max_new_tokens": num, "temperature": 0.0}
        if rng.random() < 0.3:
            sampling |= {"temperature": rng.choice([0.5, 1.2]), "seed": rng.randrange(1 << 40)}
            sampling |= {"top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.8])}
        if rng.random() < 0.15:
            sampling |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
        if rng.random() < 0.15:
            sampling |= {"logit_bias": {rng.randrange(3, VOCAB): 4.0}}
        if rng.random() < 0.2:
            sampling |= {"num_logprobs": rng.randrange(3)}
        if rng.random() < 0.2:
            sampling |= {"min_new_tokens": rng.randrange(num + 1)}
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.25 else None
        if grammar is None and rng.random() < 0.3:
            sampling |= {"ignore_eos": True}
        return api.GenerateRequest(
            request_id=f"r{self.number}.{self.turn}",
            token_ids=pack_ids(prompt),
            sampling=api.SamplingParams(**sampling),
            grammar=grammar,
            priority=rng.randrange(3),
            tenant=rng.choice(["a", "b"]),
            salt=rng.choice(["", "", "", "s"]),
        )

    async def _ask(self, prompt: list[int]) -> list[int]:
        wire = self._request(prompt)
        want = self._expected(wire)
        record: dict[str, Any] = {"id": wire.request_id, "prompt": prompt, "want": want.ids}
        record["grammar"] = None if wire.grammar is None else wire.grammar.text
        self.owner.asked.append(record)
        how = self.rng.choice(["read", "read", "read", "abort", "leave", "come back", "two"])
        record["how"] = how
        got = await self._read(wire, how)
        record["got"], record["finished"] = got.ids, repr(got.finished)
        self._check(wire, want, got, how)
        self.owner.num_tokens += len(got.ids)
        if got.started is not None:
            self.owner.num_lower_tokens += got.started.cache.l2 + got.started.cache.l3
        return got.ids

    def _expected(self, wire: api.GenerateRequest) -> Answer:
        return self.owner.plain.answer(wire)

    async def _read(self, wire: api.GenerateRequest, how: str) -> Collected:
        client, other, rng = self.owner.client, self.owner.other, self.rng
        got = Collected()
        if how == "abort":
            reading = asyncio.create_task(got.read(client.generate(wire)))
            await asyncio.sleep(rng.random() * 0.08)
            await client.abort(wire.request_id)
            return await reading
        if how in ("leave", "come back"):
            stays = how == "come back"
            stream = client.generate(wire, abort_on_close=not stays)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.08):
                    await got.read(stream)
            await stream.aclose()
            if not stays or got.finished is not None:
                return got
            await asyncio.sleep(rng.random() * 0.05)
            reader = rng.choice([client, other])
            return await got.read(reader.attach(wire.request_id, len(got.ids)))
        if how == "two":
            second = Collected()
            reading = asyncio.create_task(got.read(client.generate(wire)))
            await asyncio.sleep(rng.random() * 0.03)
            await second.read(other.attach(wire.request_id))
            await reading
            self._check_second(wire, got, second)
            return got
        return await got.read(client.generate(wire))

    def _check_second(self, wire: api.GenerateRequest, got: Collected, second: Collected) -> None:
        """A second reader hears the same. Of a request that was refused when it was sent first, and
        taken when it was sent again to a new engine, it may hear more than who sent it."""
        said = (wire.request_id, second.ids, got.ids, got.finished, second.finished)
        finished = got.finished
        if finished is not None and finished.error_code in self.owner.setting.excused:
            assert second.ids[: len(got.ids)] == got.ids[: len(second.ids)], said
        else:
            assert second.ids == got.ids[: len(second.ids)], said

    def _check(self, wire: api.GenerateRequest, want: Answer, got: Collected, how: str) -> None:
        name, finished = wire.request_id, got.finished
        num = len(got.ids)
        assert got.ids == want.ids[:num], f"{name} ({how}): {got.ids} is not {want.ids}"
        if finished is None:
            assert how == "leave", f"{name} ({how}) did not end"
            return
        code = finished.error_code
        if code != want.error_code and code in self.owner.setting.excused:
            return
        if how == "come back" and code == "unknown_request" and got.started is None:
            return  # the question overtook the request
        if finished.reason is api.FinishReason.ABORTED:
            self._check_aborted(name, how)
            return
        said = (finished.reason, code, got.ids)
        assert said == (want.reason, want.error_code, want.ids), (
            f"{name} ({how}): {said} {finished.error_message} is not {want}"
        )
        if wire.sampling.num_logprobs >= 0 and how == "read":
            assert len(got.logprobs) == num, f"{name}: {len(got.logprobs)} logprobs of {num}"
            for place, (mine, right) in enumerate(zip(got.logprobs, want.logprobs, strict=False)):
                assert abs(mine.logprob - right.logprob) < 1e-4, (name, place, mine, right)
                assert self._is_same_top(mine, right), (name, place, mine, right)

    def _is_same_top(self, mine: api.TokenLogprobs, right: api.TokenLogprobs) -> bool:
        return mine.top_ids == right.top_ids

    def _check_aborted(self, name: str, how: str) -> None:
        """By who asked; or taken back, as one engine had refused it when it ended and the next was
        sent it again, while its reader was on the way from one client to the other."""
        is_withdrawn = {"queue_full", "engine_restarted"} <= self.owner.setting.excused
        is_wanted = how == "abort" or (how == "come back" and is_withdrawn)
        assert is_wanted, f"{name} ({how}) was aborted by nobody"

    # Between turns ----------------------------------------------------------------------------

    async def _between(self, history: list[int]) -> None:
        rng, client = self.rng, self.owner.client
        raw = pack_ids(history[: rng.randrange(1, len(history) + 1)])
        salt = rng.choice(["", "", "s"])
        what = rng.choice(["", "", "move", "suspend", "drop", "lease", "hint", "look"])
        with contextlib.suppress(EngineError):  # an engine that is not there just now
            if what == "move":
                tier = rng.choice(["l1", "l2", "l3", "none"])
                moving = asyncio.create_task(client.move_prefix(raw, tier, salt=salt))
                await asyncio.wait([moving], timeout=rng.random() * 0.1)
            elif what == "suspend":
                moving = asyncio.create_task(client.move_prefix(pack_ids(history), "l3"))
                await asyncio.wait([moving], timeout=rng.random() * 0.3)
                again = asyncio.create_task(client.move_prefix(pack_ids(history), "l1"))
                await asyncio.wait([again], timeout=rng.random() * 0.1)
            elif what == "drop":
                await client.drop_prefix(raw, rng.randrange(len(raw) // 4 + 1), salt=salt)
            elif what == "lease":
                lease_id = f"lease{rng.randrange(3)}"
                tier = rng.choice(["l1", "l2", "l3"])
                await client.lease(lease_id, raw, rng.choice([5, 100, 2000]), tier=tier, salt=salt)
                if rng.random() < 0.5:
                    await client.release_lease(lease_id)
            elif what == "hint":
                hold_ms = (rng.choice([0, 20, 500]), rng.choice([0, 50]), rng.choice([0, 80]))
                await client.hint_prefix(raw, rng.random(), salt=salt, hold_ms=hold_ms)
            elif what == "look":
                await client.query_prefix(raw, salt=salt)
                await client.tree()
        await asyncio.sleep(rng.choice([0.0, 0.0, rng.random() * 0.1]))


def ids_of(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(num)]


def soak(
    seeds: Callable[[], int | None],
    dump_dir: Path | None,
    make_run: Callable[[int, Path], Run],
    case: str = "engine_soak",
) -> dict[str, Any]:
    """Run until there are no more seeds. The result has what was done, and which seeds broke."""
    start_s = said_s = time.monotonic()
    names = ("runs", "tokens", "tokens_from_l2_l3", "steps", "steps_ahead", "loading_steps")
    totals = dict.fromkeys(names, 0)
    broken: list[int] = []
    while (seed := seeds()) is not None:
        with tempfile.TemporaryDirectory() as directory:
            run = make_run(seed, Path(directory))
            try:
                run.run()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                broken.append(seed)
                last = "".join(traceback.format_exception(error))[-3000:]
                print(json.dumps({"broken_seed": seed, "why": repr(error)[:800]}), flush=True)
                print(last, file=sys.stderr, flush=True)
                if dump_dir is not None:
                    run.dump(dump_dir / f"{case}_{seed}.json")
        totals["runs"] += 1
        totals["tokens"] += run.num_tokens
        totals["tokens_from_l2_l3"] += run.num_lower_tokens
        totals["steps"] += sum(watch.num_steps for watch in run.watches)
        totals["steps_ahead"] += sum(watch.num_steps_ahead for watch in run.watches)
        totals["loading_steps"] += sum(runner.num_loading_steps for runner in run.runners)
        if time.monotonic() - said_s > 60:
            said_s = time.monotonic()
            print(json.dumps(totals), flush=True)
    seconds = round(time.monotonic() - start_s)
    return {"case": case, **totals, "seconds": seconds, "broken": broken}


def soak_options(doc: str | None, *, minutes: float) -> argparse.ArgumentParser:
    """What every soak by seeds is asked."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1 << 40, help="at most so many")
    parser.add_argument("--dump", type=Path, help="where to write what led to a failure")
    return parser


def seeds_of(asked: argparse.Namespace) -> Callable[[], int | None]:
    """From `--seed` on; None from when its minutes or runs are over."""
    end_s = time.monotonic() + asked.minutes * 60
    numbers = iter(range(asked.seed, asked.seed + asked.runs))
    return lambda: next(numbers, None) if time.monotonic() < end_s else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = soak_options(__doc__, minutes=10.0)
    parser.add_argument(
        "--overlap-loads", action="store_true", help="in every run, not in each second one"
    )
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    result = soak(
        seeds_of(asked),
        asked.dump,
        lambda seed, directory: Run(seed, directory, asked.overlap_loads),
    )
    print(json.dumps(result), flush=True)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
