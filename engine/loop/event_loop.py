# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: receive -> plan -> forward -> commit, two steps under way at a time.

Step N is dispatched before the result of step N - 1 is in. When that result arrives, grammar
matchers take their tokens and fill the masks of step N while its forward runs; then everything
else follows (the scheduler, the readers). The loop's thread never waits for the model: it sleeps
until a message, a finished step or a compiled grammar wakes it. Does not know: what a session is,
how tokens are computed or chosen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from _scheduler import Abort, Plan
from engine import api
from engine.execution.executor import Executor, Step, StepResult
from engine.grammar.matcher import GrammarMatcher
from engine.loop.batch_builder import BatchBuilder, ModelRows, model_rows
from engine.loop.commit import DispatchedStep, commit, remember
from engine.loop.control_plane import ControlPlane
from engine.loop.counters import Counters
from engine.loop.grammar_desk import GrammarDesk
from engine.loop.outbox import Outbox
from engine.loop.request_desk import RequestDesk
from engine.loop.requests import Outcome, Request
from engine.loop.speculation import Speculation
from engine.loop.step_trace import StepTrace
from engine.sampling.params import ALREADY_SET, RowSampling, SampleBatch

MAX_STEPS_IN_FLIGHT = 2
# Running ahead hides the loop's time (0.4 ms) behind a decode step of 5 ms. Whoever comes meanwhile
# waits for one step more, so behind a prefill chunk of 100 ms a device gets its next step only
# when it is nearly done.
RUN_AHEAD_TOKENS = 64
RUN_AHEAD_MS = 8
# A decode row takes the device far longer than a token of prefill does: only a step with so many of
# these says what one costs.
PREFILL_STEP_TOKENS = 64
MAX_FAILED_STEPS_IN_A_ROW = 3
HOUSEKEEPING_MS = 1000


class StepsKeepFailingError(RuntimeError):
    """Step after step fails in the executor; only a new process may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAhead:
    """When a step gets its successor before its result is in: behind one of few `tokens` at once,
    behind a longer one `ms` before its end. Steps with `timed_tokens` of prefill say how long."""

    tokens: int = RUN_AHEAD_TOKENS
    ms: int = RUN_AHEAD_MS
    timed_tokens: int = PREFILL_STEP_TOKENS


class EngineLoop:
    """Steps, from plan to commit. One thread calls all of it."""

    def __init__(
        self,
        *,
        desk: RequestDesk,
        control: ControlPlane,
        grammars: GrammarDesk,
        outbox: Outbox,
        counters: Counters,
        executor: Executor,
        builder: BatchBuilder,
        speculation: Speculation,
        trace: StepTrace | None,
        max_samples: int,
        vocab_size: int,
        now_ms: Callable[[], int],
    ) -> None:
        self._desk = desk
        self._control = control
        self._grammars = grammars
        self._outbox = outbox
        self._counters = counters
        self._executor = executor
        self._builder = builder
        self._speculation = speculation
        self._trace = trace
        self._now_ms = now_ms
        self.run_ahead = RunAhead()
        self._in_flight: deque[DispatchedStep] = deque()
        self._held: StepResult | None = None  # of a step that read what is not known to be good
        self._unmasked: set[int] = set()  # steps that sampled before their masks were filled
        # One is enough: a step's masks are filled after the step before it has sampled.
        self._bitmask = np.full((max_samples, -(-vocab_size // 32)), -1, dtype=np.int32)
        self._num_failed_steps = 0
        self._next_housekeeping_ms = 0
        self._last_result_ms = 0  # a step begins to compute when the one before it has ended
        self._last_look_ms = 0  # whether the newest step may get its successor

    def turn(self) -> None:
        """One round: commit what is finished, dispatch what can run. Never blocks.

        Raises: StepsKeepFailingError.
        """
        now_ms = self._now_ms()
        self._grammars.serve(now_ms)
        for ended in self._control.take_acks():  # first: results count only behind some of them
            self._desk.end(ended)
        self._forget_void_samples()
        while (result := self._next_result()) is not None:
            self._commit(result)
        while self._may_dispatch() and self._dispatch_next():
            pass
        if now_ms >= self._next_housekeeping_ms:
            self._next_housekeeping_ms = now_ms + HOUSEKEEPING_MS
            self._desk.forget_old(now_ms)
            self._outbox.forget_silent(now_ms)
            self._control.tell_costs(self._counters.prefill_us_per_token)
            if self._trace is not None:
                self._trace.flush()
        self._outbox.flush()

    def wait_ms(self) -> int:
        """How long nothing needs a turn, if nobody wakes the loop."""
        deadline_ms, now_ms = self._grammars.next_deadline_ms, self._now_ms()
        until_ms = self._next_housekeeping_ms
        if deadline_ms is not None:
            until_ms = min(until_ms, deadline_ms)
        nearly_ms = self._nearly_done_ms() if len(self._in_flight) == 1 else None
        if nearly_ms is not None and nearly_ms > self._last_look_ms:  # else it was tried then
            until_ms = min(until_ms, nearly_ms)
        return max(0, until_ms - now_ms)

    def abandon(self) -> None:
        """Let the steps under way run to their end; nobody is told of their tokens.

        A step behind another samples with its masks unfilled, for nothing: see `finish_tiers`.
        """
        for step in self._in_flight:
            if not step.sampling.mask_ready.is_set():
                self._unmasked.add(step.step_id)
                step.sampling.mask_ready.set()

    def finish_tiers(self, timeout_s: float) -> None:
        """After `abandon`, once the executor has ended: what was computed goes down the tiers.

        Running requests end here, for the scheduler alone; their clients go on elsewhere.
        """
        if any(step.is_loading for step in self._in_flight):
            for ended in self._control.wait_for_loads(timeout_s):
                self._desk.end(ended)
        while (result := self._next_result()) is not None:
            step = self._in_flight.popleft()
            if step.step_id in self._unmasked:
                self._end_constrained(step)
            for ended in self._control.advance([commit(step, result).step_done]):
                self._desk.end(ended)
        # The scheduler plans nothing behind two steps that never came to their end.
        may_plan = len(self._in_flight) < MAX_STEPS_IN_FLIGHT
        self._control.finish_tiers(self._desk.all_live(), timeout_s, may_plan=may_plan)

    def _end_constrained(self, step: DispatchedStep) -> None:
        """What a step computed for requests with a grammar counts, what it sampled does not.

        The grammar would refuse some of it, and a request that fails loses its newest KV.
        """
        for request in step.requests:
            if request.matcher is not None and request.outcome is None:
                request.outcome = Outcome(reason=api.FinishReason.ABORTED)
                self._control.advance([Abort(request_id=request.index)])

    def _forget_void_samples(self) -> None:
        """What rows sample that read a bad page is not output, and must not be penalised as such:
        their requests go on with new parameters, made of what was said so far."""
        for load in self._control.take_bad_loads():
            for step in self._in_flight:
                for request, its_load in zip(step.requests, step.loads, strict=True):
                    if its_load is load and request.outcome is None:
                        self._desk.renew_row(request)

    def _next_result(self) -> StepResult | None:
        """The oldest result, once what its step read is known to be good or bad."""
        if self._held is None:
            self._held = self._executor.take()
        if self._held is None or self._in_flight[0].is_loading:
            return None
        result, self._held = self._held, None
        return result

    @property
    def oldest_step_ms(self) -> int | None:
        """When the oldest step under way was dispatched."""
        return self._in_flight[0].dispatched_ms if self._in_flight else None

    def _may_dispatch(self) -> bool:
        self._last_look_ms = self._now_ms()
        if not self._in_flight:
            return True
        if len(self._in_flight) >= MAX_STEPS_IN_FLIGHT:
            return False
        if self._in_flight[-1].num_tokens <= self.run_ahead.tokens:
            return True
        nearly_ms = self._nearly_done_ms()
        return nearly_ms is not None and self._last_look_ms >= nearly_ms

    def _nearly_done_ms(self) -> int | None:
        """When the one step under way may get its successor, by what the last step took; None:
        unknown, or it runs on the host, which has nothing to do beside it.

        Not by the mean of several: a long prompt's tokens cost ever more, and who comes while a
        step runs waits for its successor too, if that was there too early."""
        us_per_token = self._counters.last_us_per_token
        if not self._executor.is_async or not us_per_token:
            return None
        newest = self._in_flight[-1]
        start_ms = max(newest.dispatched_ms, self._last_result_ms)
        return start_ms + int(us_per_token * newest.num_tokens / 1e3) - self.run_ahead.ms

    def _dispatch_next(self) -> bool:
        """Plan a step and hand it to the executor; False if there is nothing to run."""
        start_ns = time.thread_time_ns()
        plan = self._control.next_plan(self._now_ms())
        for admission in plan.admissions:
            self._speculation.begin(self._desk.admit(admission))
        if plan.step_id < 0:
            self._builder.keep_deltas(plan)
            return False
        requests = [self._desk.live(index) for index in plan.row_request_ids.tolist()]
        granted = self._speculation.grant(plan, requests)
        rows = model_rows(plan, granted)
        behind = self._speculation.known_behind(plan, requests, granted)
        loads = self._control.loads_of(plan)
        self._desk.tell_starts(requests, loads, plan.row_starts.tolist())
        layers = list({id(load): load.layers for load in loads if load is not None}.values())
        forward, page_deltas = self._builder.build(plan, rows, behind, layers)
        drafts = [ids.tolist() for ids in granted] if granted is not None else [[]] * len(requests)
        sampling = self._sampling_of(plan, rows, requests, drafts)
        dispatched_ms = self._now_ms()  # first: it may run, to its end, before this goes on
        self._executor.dispatch(Step(forward=forward, page_deltas=page_deltas, sampling=sampling))
        step = remember(plan, rows, requests, sampling, drafts, dispatched_ms, loads)
        self._in_flight.append(step)
        if len(self._in_flight) == 1:
            self._open_masks(step)
        self._counters.note_plan(step.num_tokens, time.thread_time_ns() - start_ns)
        return True

    def _sampling_of(
        self,
        plan: Plan,
        rows: ModelRows,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]],
    ) -> SampleBatch:
        sampled: list[Request] = []
        draft_places: list[int] = []
        for row in np.flatnonzero(plan.row_samples).tolist():
            num = 1 + len(drafts[row])
            sampled += [requests[row]] * num
            draft_places += range(num)
        places = np.flatnonzero(rows.samples)
        prompt_lens = np.array([request.prompt_len for request in sampled], dtype=np.int64)
        has_grammar = any(request.matcher is not None for request in sampled)
        return SampleBatch(
            rows=[_row_of(request) for request in sampled],
            slots=rows.slots[places].astype(np.int64),
            positions=(rows.starts + rows.lens)[places] - prompt_lens,
            draft_places=np.array(draft_places, dtype=np.int64),
            bitmask=self._bitmask[: len(sampled)] if has_grammar else None,
            mask_ready=threading.Event() if has_grammar else ALREADY_SET,
        )

    def _open_masks(self, step: DispatchedStep) -> None:
        """Fill the masks of a step whose predecessors are committed, and let it sample."""
        bitmask = step.sampling.bitmask
        if bitmask is None:
            return
        bitmask[:] = -1
        sample = 0
        for row, (request, drafts) in enumerate(zip(step.requests, step.drafts, strict=True)):
            if not step.samples[row]:
                continue
            if request.matcher is not None and request.outcome is None:
                _fill_masks(request, request.matcher, drafts, bitmask, sample)
            sample += 1 + len(drafts)
        step.sampling.mask_ready.set()

    def _commit(self, result: StepResult) -> None:
        start_ns = time.thread_time_ns()
        self._last_result_ms = self._now_ms()
        step = self._in_flight.popleft()
        assert step.step_id == result.step_id
        committed = commit(step, result)
        self._desk.tell_starts(step.requests, step.loads, step.num_done.tolist())
        if self._in_flight:
            self._open_masks(self._in_flight[0])
        for request, message in committed.messages:
            self._outbox.publish(request, message)
        self._outbox.flush()  # tokens first; the scheduler and the next plan can wait
        for ended in self._control.advance([committed.step_done]):
            self._desk.end(ended)
        for taken in committed.tokens:
            self._speculation.note(taken)
        spent_ns = time.thread_time_ns() - start_ns
        # Nor does a step say it that waited for pages.
        is_timed = step.num_prefill_tokens >= self.run_ahead.timed_tokens and not any(step.loads)
        num_timed = step.num_tokens if is_timed else 0
        self._counters.note_commit(result, num_timed, committed.num_sampled, spent_ns)
        if self._trace is not None:
            self._trace.note(step, result, committed.num_sampled)
        self._num_failed_steps = 0 if result.error is None else self._num_failed_steps + 1
        if self._num_failed_steps >= MAX_FAILED_STEPS_IN_A_ROW:
            raise StepsKeepFailingError(result.error)


def _fill_masks(
    request: Request,
    matcher: GrammarMatcher,
    drafts: Sequence[int],
    bitmask: NDArray[np.int32],
    first: int,
) -> None:
    """Masks of a request's samples, each as if the drafts before it were taken.

    Behind a draft that the grammar does not take nothing is used: the sample before it, under a
    mask of its own, is another token.
    """
    num_taken = 0
    for place in range(1 + len(drafts)):
        is_early = request.num_output + place < request.params.min_new_tokens
        matcher.fill(bitmask, first + place, forbid_stop=is_early)
        if place == len(drafts) or not matcher.accept(drafts[place]):
            break
        num_taken += 1
        if matcher.is_over:
            break
    matcher.rollback(num_taken)


def _row_of(request: Request) -> RowSampling:
    assert request.row is not None, "a row samples only after its request was admitted"
    return request.row
