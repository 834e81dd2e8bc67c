# SPDX-License-Identifier: Apache-2.0
"""LiveEngine: the real loop, scheduler, sampler and sockets in a thread, around a fake runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig, GrammarConfig, SchedulerLimits, TiersConfig
from engine.execution.batch import ModelRunner
from engine.grammar.compiler import GrammarCompiler
from engine.loop.heart import Keeper
from engine.loop.server import EngineServer, Vocabulary, WakeSignal
from engine.transport import EngineSocket, pack_ids, unpack_ids
from kvtiers.store import Store

EOS = 2
NUM_CONTROL = 3


def byte_vocabulary(vocab_size: int) -> Vocabulary:
    """Ids 0-2 are control tokens (2 ends a turn); id i from 3 on spells the byte i + 29."""
    spelled = [bytes([i + 29]) if i + 29 < 256 else f"<{i}>".encode() for i in range(vocab_size)]
    spelled[:NUM_CONTROL] = [b""] * NUM_CONTROL
    return Vocabulary(
        token_bytes=tuple(spelled), eos_ids=(EOS,), control_ids=tuple(range(NUM_CONTROL))
    )


def spell(text: str) -> list[int]:
    """The ids of `text` in `byte_vocabulary`."""
    return [byte - 29 for byte in text.encode()]


class LiveEngine:
    """A context manager; `stop` drains for `drain_s`. `prepare` sees the server before it runs."""

    def __init__(
        self,
        run_dir: str,
        runner: ModelRunner,
        *,
        max_slots: int = 4,
        token_budget: int = 16,
        lone_token_budget: int = 0,
        max_waiting: int = 1024,
        keep_outputs_s: float = 600.0,
        keep_outputs_bytes: int = 1 << 20,
        grammar: GrammarConfig | None = None,
        wait_grammar: bool = False,
        vocabulary: Vocabulary | None = None,
        tiers: TiersConfig | None = None,
        speculation: str = "none",
        keeper: Keeper | None = None,
        store: Store | None = None,
        max_draft_tokens: int = 8,
        step_trace: str = "",
        prepare: Callable[[EngineServer], object] = lambda server: None,
    ) -> None:
        self._prepare = prepare
        self.config = EngineConfig(
            run_dir=run_dir,
            max_slots=max_slots,
            token_budget=token_budget,
            lone_token_budget=lone_token_budget,
            page_size=runner.page_size,
            speculation=speculation,
            max_draft_tokens=max_draft_tokens,
            step_trace=step_trace,
            # A busy machine may take its time to compile one.
            grammar=grammar if grammar is not None else GrammarConfig(budget_ms=60_000),
            scheduler=SchedulerLimits(
                max_waiting=max_waiting,
                keep_outputs_s=keep_outputs_s,
                keep_outputs_bytes=keep_outputs_bytes,
            ),
            tiers=tiers if tiers is not None else TiersConfig(),
        )
        self._keeper = keeper
        self._store = store
        self.runner = runner
        self._wait_grammar = wait_grammar
        self._vocabulary = vocabulary or byte_vocabulary(runner.vocab_size)
        self.error: BaseException | None = None

    @property
    def socket_path(self) -> str:
        return self.config.socket_path

    def __enter__(self) -> LiveEngine:
        vocabulary = self._vocabulary
        wake = WakeSignal()
        compiler = GrammarCompiler(
            vocabulary.token_bytes,
            vocabulary.eos_ids,
            self.runner.vocab_size,
            self.config.grammar,
            wake.set,
            control_ids=vocabulary.control_ids,
        )
        if self._wait_grammar:
            compiler.wait_warm()
        socket = EngineSocket(self.config.socket_path)
        try:
            self.server = EngineServer(
                self.config,
                self.runner,
                compiler,
                vocabulary,
                socket,
                wake,
                keeper=self._keeper,
                store=self._store,
            )
        except BaseException:
            compiler.close()
            socket.close(linger_ms=0)
            wake.close()
            raise
        self._prepare(self.server)
        self._thread = threading.Thread(target=self._run, name="live-engine", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.error = error

    def stop(self, drain_s: float = 0.0) -> None:
        self.server.stop(drain_s)
        self._thread.join()

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self.stop()


def make_request(
    request_id: str, prompt: list[int], max_new_tokens: int = 12, **extra: object
) -> api.GenerateRequest:
    """A greedy request; `sampling` overrides its parameters, the rest goes to the request."""
    sampling = {"temperature": 0.0, **extra.pop("sampling", {})}  # type: ignore[dict-item]
    return api.GenerateRequest(
        request_id=request_id,
        token_ids=pack_ids(prompt),
        sampling=api.SamplingParams(max_new_tokens=max_new_tokens, **sampling),  # type: ignore[arg-type]
        **extra,  # type: ignore[arg-type]
    )


class Collected:
    """All that one stream said."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[api.TokenLogprobs] = []
        self.progress: list[int] = []
        self.started: api.Started | None = None
        self.finished: api.Finished | None = None

    async def read(self, stream: AsyncIterator[object]) -> Collected:
        async for item in stream:
            match item:
                case api.Started():
                    self.started = item
                case api.PrefillProgress():
                    self.progress.append(item.done)
                case api.Tokens():
                    self.ids += unpack_ids(item.token_ids).tolist()
                    self.logprobs += item.logprobs or ()
                case api.Finished():
                    self.finished = item
        return self


async def run(client: EngineClient, request: api.GenerateRequest) -> Collected:
    """Everything one request says."""
    return await asyncio.wait_for(Collected().read(client.generate(request)), 30)


def serve(engine: LiveEngine, work: Callable[[EngineClient], Awaitable[None]]) -> None:
    """Run `work` with a client of `engine`, then check that the engine is sound."""

    async def main() -> None:
        client = EngineClient(engine.socket_path)
        await client.start()
        await client.wait_ready(20)
        try:
            await work(client)
        finally:
            await client.close()

    with engine:
        asyncio.run(main())
    assert engine.error is None
