# SPDX-License-Identifier: Apache-2.0
"""The life of requests outside of steps: taken in, given a grammar, submitted, attached to, ended.

Does not know: plans, the executor, other kinds of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from _scheduler import Abort, Admission, Ended
from engine import api
from engine.config import EngineConfig
from engine.errors import GrammarError, RequestError
from engine.grammar.compiler import CompileJob
from engine.grammar.matcher import GrammarMatcher
from engine.loop.commit import failure, finish_of
from engine.loop.control_plane import ControlPlane
from engine.loop.counters import Counters
from engine.loop.grammar_desk import GrammarDesk
from engine.loop.intake import Intake, ModelLimits
from engine.loop.outbox import Outbox
from engine.loop.requests import Outcome, Request, RequestTable
from engine.loop.step_loads import StepLoad


class RequestDesk:
    """Owns the table of requests. One thread."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        limits: ModelLimits,
        control: ControlPlane,
        grammars: GrammarDesk,
        outbox: Outbox,
        counters: Counters,
        now_ms: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._max_live = config.scheduler.max_waiting
        self._grammar_budget_ms = config.grammar.budget_ms
        self._control = control
        self._grammars = grammars
        self._outbox = outbox
        self._counters = counters
        self._now_ms = now_ms
        self._intake = Intake(limits)
        self._table = RequestTable(
            keep_s=config.scheduler.keep_outputs_s,
            keep_bytes=config.scheduler.keep_outputs_bytes,
        )
        self._is_draining = False
        # What a prompt found, until it is known whether all of it came whole.
        self._untold: dict[Request, api.Started] = {}

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._table.num_live

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    def all_live(self) -> list[Request]:
        """Every request that has not ended."""
        return self._table.all_live()

    def live(self, index: int) -> Request:
        """The request behind a scheduler index."""
        return self._table.live(index)

    def generate(self, peer: bytes, wire: api.GenerateRequest) -> None:
        """Take in a request; one whose id is known is attached to instead."""
        if self._table.find(wire.request_id) is not None:
            self.attach(peer, api.AttachRequest(request_id=wire.request_id))
            return
        try:
            self._check_open()
            request = self._intake.accept(wire, self._now_ms())
        except RequestError as error:
            self.refuse(peer, wire.request_id, error.code, str(error))
            return
        request.subscribers[peer] = None
        self._table.add(request)
        self._counters.num_requests += 1
        if request.grammar is None:
            self._submit(request)
            return
        self._grammars.ask(
            request.grammar,
            request,
            now_ms=self._now_ms(),
            budget_ms=self._grammar_budget_ms,
            on_ready=lambda job, _: self._begin_grammar(request, job),
            on_error=lambda error: self._end_now(request, _grammar_failure(error)),
        )

    def abort(self, request_id: str) -> None:
        """Stop a request; its memory is free once no step touches it. Unknown ids are ignored."""
        request = self._table.find(request_id)
        if request is None or request.outcome is not None:
            return
        outcome = Outcome(reason=api.FinishReason.ABORTED)
        if not request.is_submitted:
            self._grammars.withdraw(request)
            self._end_now(request, outcome)
            return
        request.outcome = outcome
        for ended in self._control.advance([Abort(request_id=request.index)]):
            self.end(ended)

    def attach(self, peer: bytes, message: api.AttachRequest) -> None:
        """Let `peer` read a request from an output token on."""
        request = self._table.find(message.request_id)
        if request is None:
            text = f"request_id = {message.request_id!r}: not running, nor recently ended"
            self.refuse(peer, message.request_id, "unknown_request", text)
            return
        if request.finished is None:
            request.subscribers[peer] = None
        if request.started is not None:
            self._outbox.reply(peer, request.started)
        tokens = request.tokens_from(max(0, message.from_output))
        if tokens is not None:
            self._outbox.reply(peer, tokens)
        if request.finished is not None:
            self._outbox.reply(peer, request.finished)

    def admit(self, admission: Admission) -> Request:
        """The scheduler gave a request a slot: prepare its sampling, note what its prompt found.

        Its readers are told by `tell_starts`.
        """
        request = self._table.live(admission.request_id)
        self.renew_row(request)
        if admission.readmitted:
            return request
        cached = admission.cached_l1 + admission.cached_l2 + admission.cached_l3
        hit = api.CacheHit(
            l1=admission.cached_l1,
            l2=admission.cached_l2,
            l3=admission.cached_l3,
            to_compute=admission.prompt_len - cached,
        )
        queued_ms = float(self._now_ms() - request.received_ms)
        self._untold[request] = api.Started(
            request_id=request.request_id, cache=hit, queued_ms=queued_ms
        )
        return request

    def tell_starts(
        self,
        requests: Iterable[Request],
        loads: Iterable[StepLoad | None],
        nums_there: Iterable[int],
    ) -> None:
        """Tell readers what prompts found, of the rows of a step whose loads are over and good.

        Args:
            nums_there: tokens of each row's sequence whose KV is in place. What was found behind
                them came back damaged, and is computed.
        """
        if not self._untold:
            return
        for request, load, num_there in zip(requests, loads, nums_there, strict=True):
            if load is not None and (load.is_bad or not load.is_over):
                continue
            started = self._untold.pop(request, None)
            if started is None:
                continue
            hit = _first_of(started.cache, num_there)
            self._counters.note_admission(hit)
            request.started = msgspec.structs.replace(started, cache=hit)
            self._outbox.publish(request, request.started)

    def renew_row(self, request: Request) -> None:
        """Parameters of a running request, made of the output it has now."""
        request.row = self._intake.make_row(request)

    def end(self, ended: Ended) -> None:
        """The scheduler let go of a request: say how it ended."""
        request = self._table.live(ended.request_id)
        if request.outcome is None:  # the scheduler's own verdict
            request.outcome = failure("scheduler_failed", ended.message)
        self._control.name_pages(request)
        self._finish(request, ended.num_cached_tokens, ended.page_hashes)

    def refuse(self, peer: bytes, request_id: str, code: str, text: str) -> None:
        """Answer a request that is not taken in."""
        self._counters.num_refused += 1
        self._outbox.reply(
            peer,
            api.Finished(
                request_id=request_id,
                reason=api.FinishReason.ERROR,
                num_output_tokens=0,
                error_code=code,
                error_message=text,
            ),
        )

    def forget_old(self, now_ms: int) -> None:
        """Drop the output of requests that ended long ago."""
        self._table.forget_old(now_ms)

    def _check_open(self) -> None:
        if self._is_draining:
            raise RequestError("engine", "draining", "a running engine", code="engine_draining")
        if self._table.num_live >= self._max_live:
            raise RequestError(
                "engine.scheduler.max_waiting",
                self._table.num_live,
                f"fewer than {self._max_live} requests at once",
                code="queue_full",
            )

    def _begin_grammar(self, request: Request, job: CompileJob) -> None:
        limits = self._limits
        matcher = GrammarMatcher(job.compiled, limits.eos_ids, limits.vocab_size)
        for place, token_id in enumerate(request.resumed_ids.tolist()):
            if matcher.is_over or not matcher.accept(token_id):
                text = f"resume_token_ids[{place}] = {token_id}: not allowed by the grammar"
                self._end_now(request, failure("grammar_rejected", text))
                return
        request.matcher = matcher
        self._submit(request)

    def _submit(self, request: Request) -> None:
        if request.num_output:
            # The earlier life may have ended between its last token and its last message.
            outcome = finish_of(request, int(request.resumed_ids[-1]))
            if outcome is not None:
                self._end_now(request, outcome)
                return
        try:
            self._control.submit(request)
        except ValueError as error:
            self._end_now(request, failure("invalid_request", str(error)))
            return
        request.is_submitted = True

    def _end_now(self, request: Request, outcome: Outcome) -> None:
        """End a request that the scheduler has not seen."""
        request.outcome = outcome
        self._finish(request, 0, b"")

    def _finish(self, request: Request, num_cached_tokens: int, page_hashes: bytes) -> None:
        outcome = request.outcome
        assert outcome is not None
        self._untold.pop(request, None)
        request.finished = api.Finished(
            request_id=request.request_id,
            reason=outcome.reason,
            num_output_tokens=request.num_output,
            stop_token_id=outcome.stop_token_id,
            num_cached_tokens=num_cached_tokens,
            page_hashes=page_hashes,
            error_code=outcome.error_code,
            error_message=outcome.error_message,
        )
        self._counters.num_finished[outcome.reason] += 1
        self._outbox.publish(request, request.finished)
        request.subscribers.clear()
        self._table.end(request, self._now_ms())


def _first_of(hit: api.CacheHit, num_tokens: int) -> api.CacheHit:
    """What of it lies in the first tokens: those of L1 come before those of L2, then L3's."""
    l1 = min(hit.l1, num_tokens)
    l2 = min(hit.l2, num_tokens - l1)
    l3 = min(hit.l3, num_tokens - l1 - l2)
    total = hit.l1 + hit.l2 + hit.l3 + hit.to_compute
    return api.CacheHit(l1=l1, l2=l2, l3=l3, to_compute=total - l1 - l2 - l3)


def _grammar_failure(error: GrammarError) -> Outcome:
    return failure(error.code, str(error))
