# SPDX-License-Identifier: Apache-2.0
"""Frames from peers -> calls. A frame that makes no sense costs its sender an answer, no more.

Does not know: steps, sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from engine import api
from engine.errors import GrammarError
from engine.grammar.compiler import CompileJob
from engine.loop.control_plane import ControlPlane
from engine.loop.counters import Counters
from engine.loop.grammar_desk import GrammarDesk
from engine.loop.lease_desk import LeaseDesk
from engine.loop.outbox import Outbox
from engine.loop.request_desk import RequestDesk
from engine.loop.tier_desk import TierDesk
from engine.loop.tier_report import TierReporter
from engine.transport import decode_input

logger = logging.getLogger(__name__)

MAX_BUDGET_MS = 600_000


class Inbox:
    """Reads one frame after the other. One thread."""

    def __init__(
        self,
        *,
        instance_id: str,
        desk: RequestDesk,
        control: ControlPlane,
        leases: LeaseDesk,
        tiers: TierDesk,
        grammars: GrammarDesk,
        outbox: Outbox,
        counters: Counters,
        reporter: TierReporter,
        now_ms: Callable[[], int],
    ) -> None:
        self._instance_id = instance_id
        self._desk = desk
        self._control = control
        self._leases = leases
        self._tiers = tiers
        self._grammars = grammars
        self._outbox = outbox
        self._counters = counters
        self._reporter = reporter
        self._now_ms = now_ms

    def take(self, peer: bytes, frame: bytes) -> None:
        """Handle one frame; never raises for what a peer may send."""
        self._outbox.heard_of(peer, self._now_ms())
        try:
            message = decode_input(frame)
        except msgspec.DecodeError as error:
            self._refuse_malformed(peer, frame, error)
            return
        try:
            self._handle(peer, message)
        except ValueError as error:
            logger.warning("%s from %s refused: %s", type(message).__name__, peer.hex(), error)
            self._counters.num_malformed += 1
            query_id = getattr(message, "query_id", None)
            if query_id is not None:
                code = getattr(error, "code", "invalid_request")  # the scheduler's have none
                self._outbox.reply(
                    peer,
                    api.QueryRefused(query_id=query_id, error_code=code, error_message=str(error)),
                )

    def _handle(self, peer: bytes, message: api.EngineInput) -> None:
        match message:
            case api.Ping():
                pong = api.Pong(sent_ms=message.sent_ms, instance_id=self._instance_id)
                self._outbox.reply(peer, pong)
            case api.GenerateRequest():
                self._desk.generate(peer, message)
            case api.AbortRequest():
                self._desk.abort(message.request_id)
            case api.AttachRequest():
                self._desk.attach(peer, message)
            case api.CompileGrammar():
                self._compile(peer, message)
            case api.QueryStats():
                self._outbox.reply(peer, self._stats(message.query_id))
            case api.QueryTree():
                self._outbox.reply(peer, self._control.tree(message))
            case api.QueryPrefix():
                self._outbox.reply(peer, self._control.query_prefix(message))
            case api.DropPrefix():
                self._control.drop_prefix(message)
            case api.LeasePrefix():
                self._outbox.reply(peer, self._leases.lease(peer, message, self._now_ms()))
            case api.ReleaseLease():
                self._leases.release(message.lease_id)
            case api.HintPrefix():
                self._outbox.reply(peer, self._control.hint_prefix(message, self._now_ms()))
            case api.MovePrefix() | api.QueryTiers() | api.DrainTiers() | api.VerifyTiers():
                self._tiers.take(peer, message, self._now_ms())
            case api.SubscribeKvEvents():
                self._outbox.subscribe_kv(peer, message.enabled)

    def _refuse_malformed(self, peer: bytes, frame: bytes, error: msgspec.DecodeError) -> None:
        self._counters.num_malformed += 1
        request_id = _request_id_of(frame)
        if request_id is not None:
            self._desk.refuse(peer, request_id, "invalid_request", str(error))
        elif self._counters.num_malformed & (self._counters.num_malformed - 1) == 0:
            # Each power of two: a peer that talks nonsense must not fill the log.
            logger.warning(
                "malformed message %d from %s: %s", self._counters.num_malformed, peer.hex(), error
            )

    def _compile(self, peer: bytes, message: api.CompileGrammar) -> None:
        def ready(job: CompileJob, was_cached: bool) -> None:
            self._outbox.reply(
                peer,
                api.GrammarCompiled(
                    compile_id=message.compile_id, compile_ms=job.compile_ms, cached=was_cached
                ),
            )

        def failed(error: GrammarError) -> None:
            self._outbox.reply(
                peer,
                api.GrammarCompiled(
                    compile_id=message.compile_id,
                    compile_ms=0.0,
                    cached=False,
                    error_code=error.code,
                    error_message=str(error),
                ),
            )

        self._grammars.ask(
            message.grammar,
            message,
            now_ms=self._now_ms(),
            budget_ms=max(1, min(message.budget_ms, MAX_BUDGET_MS)),
            on_ready=ready,
            on_error=failed,
        )

    def _stats(self, query_id: str) -> api.StatsReply:
        stats = {
            **self._control.stats(),
            **self._grammars.stats(),
            **self._counters.as_dict(),
            **self._reporter.stats(),
            "requests_live": float(self._desk.num_live),
        }
        return api.StatsReply(query_id=query_id, stats=stats)


def _request_id_of(frame: bytes) -> str | None:
    """Whom a frame with a wrong field was about, if that much of it is sound."""
    try:
        loose = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError):
        return None
    request_id = loose.get("request_id") if isinstance(loose, dict) else None
    is_request = isinstance(loose, dict) and loose.get("type") in ("generate", "attach")
    return request_id if is_request and isinstance(request_id, str) else None
