# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of an engine together around one model runner, and sleeps between its turns.

Does not know: how the runner was built, signals, exit codes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass

import zmq

from _scheduler import Scheduler
from engine import api
from engine.config import EngineConfig
from engine.execution.batch import ModelRunner
from engine.execution.executor import Executor
from engine.grammar.compiler import GrammarCompiler
from engine.loop.batch_builder import BatchBuilder
from engine.loop.control_plane import ControlPlane, build_scheduler
from engine.loop.counters import Counters
from engine.loop.event_loop import EngineLoop
from engine.loop.grammar_desk import GrammarDesk
from engine.loop.heart import Heart, Keeper
from engine.loop.inbox import Inbox
from engine.loop.intake import ModelLimits, unspeakable_ids
from engine.loop.lease_desk import LeaseDesk
from engine.loop.log_file import open_log_file
from engine.loop.outbox import Outbox
from engine.loop.page_names import PageNames
from engine.loop.request_desk import RequestDesk
from engine.loop.speculation import Speculation
from engine.loop.step_trace import StepTrace
from engine.loop.tier_desk import TierDesk
from engine.loop.tier_plane import TierPlane, adopt_survivors
from engine.loop.tier_report import TierReporter
from engine.loop.tier_setup import LowerTiers, build_lower_tiers
from engine.transport import EngineSocket
from kvtiers.store import Store

logger = logging.getLogger(__name__)

MAX_FRAMES_A_TURN = 256
NAMES_PER_SLOT = 2  # names of pages remembered, for each page of L1 and L2
TIER_FLUSH_S = 5.0  # at the end: for what was promised to L2 and L3


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The text side of the model, as far as the engine needs it."""

    token_bytes: tuple[bytes, ...]  # per id; b"" for control tokens and holes
    eos_ids: tuple[int, ...]
    control_ids: tuple[int, ...]


class WakeSignal:
    """Wakes a poll from any thread or signal handler; a worker may outlive the poll."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True
        self._lock = threading.RLock()  # a signal handler may come while its thread holds it

    def set(self) -> None:
        """Wake the poll, now or at its next start; nothing once closed."""
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Sleep again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            self._is_open = False
            os.close(self.fd)


class EngineServer:
    """One engine instance. `run` belongs to one thread; `stop` may be called from any."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        grammar_compiler: GrammarCompiler,
        vocabulary: Vocabulary,
        socket: EngineSocket,
        wake: WakeSignal,
        *,
        keeper: Keeper | None = None,
        store: Store | None = None,
    ) -> None:
        """Takes over `socket`; `wake` is what `grammar_compiler` was told to set.

        Args:
            keeper: what a process that outlives this one keeps for it.
            store: used as L3 instead of the configured one.

        Raises: ConfigError where the configured tiers cannot be, or a file cannot be written.
        """
        keeper = keeper if keeper is not None else Keeper()
        self._config = config
        self._wake = wake
        self._compiler = grammar_compiler
        self.instance_id = uuid.uuid4().hex
        self._socket = socket
        self._log = open_log_file("engine.tiers.record_inputs", config.tiers.record_inputs)
        self._steps = open_log_file("engine.step_trace", config.step_trace, appends=True)
        outbox = Outbox(self._socket, self._hello(runner))
        counters = Counters()
        lower = build_lower_tiers(config, runner, wake.set, l2_fd=keeper.l2_fd, store=store)
        scheduler = build_scheduler(
            config,
            runner,
            num_l2_pages=lower.num_l2_pages,
            use_l3=lower.has_l3,
            log=self._log,
        )
        control = ControlPlane(scheduler, outbox, page_size=runner.page_size)
        leases = LeaseDesk(scheduler, outbox)
        grammars = GrammarDesk(grammar_compiler)
        limits = ModelLimits(
            vocab_size=runner.vocab_size,
            max_context_len=runner.max_context_len,
            eos_ids=vocabulary.eos_ids,
            unspeakable_ids=unspeakable_ids(
                vocabulary.token_bytes, vocabulary.control_ids, runner.vocab_size
            ),
        )
        self._desk = RequestDesk(
            config=config,
            limits=limits,
            control=control,
            grammars=grammars,
            outbox=outbox,
            counters=counters,
            now_ms=_now_ms,
        )
        plane = self._tier_plane(lower, scheduler, control, runner)
        reporter = TierReporter(scheduler, lower.transfers, lower.facts)
        tiers = TierDesk(scheduler, outbox, plane, reporter, runner.page_size)
        self._inbox = Inbox(
            instance_id=self.instance_id,
            desk=self._desk,
            control=control,
            leases=leases,
            tiers=tiers,
            grammars=grammars,
            outbox=outbox,
            counters=counters,
            reporter=reporter,
            now_ms=_now_ms,
        )
        self._leases = leases
        self._tiers = tiers
        self._executor = Executor(runner, wake.set, stamps_steps=self._steps is not None)
        self._heart = Heart(keeper.heartbeat_fd, self._executor.work_ns)
        self._loop = EngineLoop(
            desk=self._desk,
            control=control,
            grammars=grammars,
            outbox=outbox,
            counters=counters,
            executor=self._executor,
            builder=BatchBuilder(
                max_slots=config.max_slots,
                max_context_len=runner.max_context_len,
                page_size=runner.page_size,
            ),
            speculation=Speculation(config, control, counters),
            trace=StepTrace(self._steps) if self._steps is not None else None,
            max_samples=config.rows_per_step,
            vocab_size=runner.vocab_size,
            now_ms=_now_ms,
        )
        self._stop_at_s: float | None = None

    def run(self) -> None:
        """Serve until `stop`. Raises: StepsKeepFailingError."""
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        try:
            while not self._is_over():
                poller.poll(self._wait_ms())
                self._wake.clear()
                for _ in range(MAX_FRAMES_A_TURN):
                    received = self._socket.receive()
                    if received is None:
                        break
                    self._inbox.take(*received)
                self._loop.turn()
                self._tiers.serve(_now_ms())
                self._leases.tell()
                self._heart.beat(_now_ms(), self._loop.oldest_step_ms)
        finally:
            self._close()

    def stop(self, drain_s: float) -> None:
        """Take no new requests; end when the running ones have, or after `drain_s`.

        Requests that are still running then get no last message: their clients wait for the next
        engine and go on there.
        """
        self._desk.drain()
        self._stop_at_s = time.monotonic() + drain_s
        self._wake.set()

    def _wait_ms(self) -> int:
        """How long nothing needs a turn, if nobody wakes the loop."""
        wait_ms = self._loop.wait_ms()
        deadline_ms = self._tiers.next_deadline_ms
        return wait_ms if deadline_ms is None else max(0, min(wait_ms, deadline_ms - _now_ms()))

    def _tier_plane(
        self,
        lower: LowerTiers,
        scheduler: Scheduler,
        control: ControlPlane,
        runner: ModelRunner,
    ) -> TierPlane | None:
        """What moves pages between tiers, with what an older process left taken in."""
        if lower.transfers is None:
            return None
        names = PageNames(
            page_size=runner.page_size,
            model_fingerprint=runner.model_fingerprint,
            most=NAMES_PER_SLOT * (lower.num_l2_pages + runner.num_pages),
        )
        plane = TierPlane(
            scheduler,
            lower.transfers,
            names,
            self._desk.all_live,
            self._wake.set,
            num_layers=lower.num_layers,
        )
        survivors = adopt_survivors(scheduler, lower.transfers.pool, has_l3=lower.has_l3)
        plane.note_adopted(survivors)
        control.attach_tiers(plane)
        return plane

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        return self._desk.num_live == 0 or time.monotonic() >= self._stop_at_s

    def _close(self) -> None:
        self._loop.abandon()
        self._executor.close()
        try:
            self._loop.finish_tiers(TIER_FLUSH_S)
        finally:
            self._compiler.close()
            self._socket.close()
            self._wake.close()
            for log in (self._log, self._steps):
                if log is not None:
                    log.close()

    def _hello(self, runner: ModelRunner) -> api.EngineHello:
        return api.EngineHello(
            instance_id=self.instance_id,
            model_fingerprint=runner.model_fingerprint,
            vocab_size=runner.vocab_size,
            max_context_len=runner.max_context_len,
            page_size=runner.page_size,
            num_pages=runner.num_pages,
        )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
