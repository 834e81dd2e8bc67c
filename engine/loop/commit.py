# SPDX-License-Identifier: Apache-2.0
"""Results of a step -> tokens of its requests, the scheduler's StepDone, and who is over.

Does not know: sockets, when steps run. A row whose request ended while its step was already under
way counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from _scheduler import Plan, StepDone
from engine import api
from engine.execution.executor import StepResult
from engine.loop.batch_builder import ModelRows
from engine.loop.requests import Outcome, Request
from engine.loop.step_loads import StepLoad
from engine.sampling.params import SampleBatch, Sampled
from engine.transport import pack_ids

Message = tuple[Request, api.Tokens | api.PrefillProgress]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchedStep:
    """What the loop remembers of a step until its result is in; rows in plan order."""

    step_id: int
    requests: Sequence[Request]
    samples: NDArray[np.uint8]  # [R]
    num_done: NDArray[np.int32]  # [R] tokens of the row's sequence after the step
    sampling: SampleBatch
    drafts: Sequence[Sequence[int]]  # [R] that each row was run with
    num_tokens: int
    num_prefill_tokens: int  # of them, those of rows with more than one
    dispatched_ms: int
    loads: Sequence[StepLoad | None]  # [R] that the row read as they came

    @property
    def is_loading(self) -> bool:
        """Its result does not count yet: whether what it read was good is not known."""
        return any(load is not None and not load.is_over for load in self.loads)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TakenTokens:
    """What one request got. `guess`: what the model drafts behind the last, -1: nothing."""

    request: Request
    drafts: Sequence[int]  # that it was run with
    token_ids: list[int]
    guess: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Committed:
    """What a step's result means."""

    step_done: StepDone
    messages: list[Message]
    num_sampled: int
    tokens: Sequence[TakenTokens]


def remember(
    plan: Plan,
    rows: ModelRows,
    requests: Sequence[Request],
    sampling: SampleBatch,
    drafts: Sequence[Sequence[int]],
    now_ms: int,
    loads: Sequence[StepLoad | None],
) -> DispatchedStep:
    """Copy what is needed of a plan whose views die with the next one."""
    return DispatchedStep(
        step_id=plan.step_id,
        requests=requests,
        samples=np.array(plan.row_samples),
        num_done=plan.row_starts + plan.row_lens,
        sampling=sampling,
        drafts=drafts,
        num_tokens=len(rows.input_ids),
        num_prefill_tokens=int(rows.lens[rows.lens > 1].sum()),
        dispatched_ms=now_ms,
        loads=loads,
    )


def commit(step: DispatchedStep, result: StepResult) -> Committed:
    """Give every row its token, decide who is over; `request.outcome` says how.

    A row that read a bad page gets nothing and is not over: the scheduler plans it anew.
    Requires: not step.is_loading.
    """
    num_rows = len(step.requests)
    accepted = np.zeros(num_rows, dtype=np.int32)
    most_drafts = max(map(len, step.drafts), default=0)
    token_ids = np.full((num_rows, 1 + most_drafts), -1, dtype=np.int32)
    finished = np.zeros(num_rows, dtype=np.uint8)
    failed = np.zeros(num_rows, dtype=np.uint8)
    messages: list[Message] = []
    tokens: list[TakenTokens] = []
    next_sample = 0
    for row, (request, drafts) in enumerate(zip(step.requests, step.drafts, strict=True)):
        first_sample = next_sample
        next_sample += (1 + len(drafts)) if step.samples[row] else 0
        load = step.loads[row]
        if load is not None and load.is_bad:
            continue
        if request.outcome is not None:
            # It was aborted, say: the scheduler keeps what KV it still computed, if that is sound.
            failed[row] = _has_failed(result, row, first_sample if step.samples[row] else None)
            continue
        error = result.error_of(row)
        if error is not None:
            request.outcome = failure("step_failed", f"the step failed: {error}")
        elif not step.samples[row]:
            _report_progress(messages, request, int(step.num_done[row]))
        else:
            taken = _take(messages, request, result.sampled, first_sample, drafts)
            accepted[row] = len(taken)
            token_ids[row, : len(taken)] = taken
            guess = _guess(result.sampled, first_sample + len(taken) - 1) if taken else -1
            tokens.append(TakenTokens(request=request, drafts=drafts, token_ids=taken, guess=guess))
        if request.outcome is not None:
            is_failure = request.outcome.reason is api.FinishReason.ERROR
            (failed if is_failure else finished)[row] = 1
    return Committed(
        step_done=StepDone(
            step_id=step.step_id,
            num_accepted=accepted,
            token_ids=token_ids,
            finished=finished,
            failed=failed,
        ),
        messages=messages,
        num_sampled=int(accepted.sum()),
        tokens=tokens,
    )


def _take(
    messages: list[Message],
    request: Request,
    sampled: Sampled | None,
    first_sample: int,
    drafts: Sequence[int],
) -> list[int]:
    """Give a request its tokens: the drafts that were sampled, and what was sampled behind them.

    Those before the one that failed a row are given too, as without drafts.
    """
    assert sampled is not None
    start = request.num_output
    taken: list[int] = []
    logprobs: list[api.TokenLogprobs] = []
    for place in range(1 + len(drafts)):
        token_id = int(sampled.token_ids[first_sample + place])
        problem = _problem(request, token_id)
        if problem is not None:
            request.outcome = problem
            break
        logprob = sampled.logprobs.get(first_sample + place)
        request.append(token_id, logprob)
        taken.append(token_id)
        if logprob is not None:
            logprobs.append(logprob)
        request.outcome = finish_of(request, token_id)
        if request.outcome is not None or place == len(drafts) or token_id != drafts[place]:
            break
    if taken:
        tokens = api.Tokens(
            request_id=request.request_id,
            start=start,
            token_ids=pack_ids(taken),
            logprobs=tuple(logprobs) or None,
        )
        messages.append((request, tokens))
    return taken


def _has_failed(result: StepResult, row: int, sample: int | None) -> bool:
    """Whether the KV of a row is worth nothing; `sample`: its first one."""
    error = result.error_of(row)
    if error is not None or result.sampled is None or sample is None:
        return error is not None
    return int(result.sampled.token_ids[sample]) < 0


def _guess(sampled: Sampled | None, sample: int) -> int:
    if sampled is None or sampled.drafts is None:
        return -1
    return int(sampled.drafts[sample])


def _problem(request: Request, token_id: int) -> Outcome | None:
    """Why a sampled token cannot be taken; a grammar takes one that can."""
    if token_id < 0:
        return failure(
            "invalid_logits", "the model gave NaN or infinite logits, or no allowed token"
        )
    if request.matcher is not None and not request.matcher.accept(token_id):
        return failure("grammar_rejected", f"the grammar does not allow sampled token {token_id}")
    return None


def finish_of(request: Request, token_id: int) -> Outcome | None:
    """How the request ends with its newest token, if it does."""
    if token_id in request.stop_ids:
        return Outcome(reason=api.FinishReason.STOP, stop_token_id=token_id)
    if request.matcher is not None and request.matcher.is_over:
        return Outcome(reason=api.FinishReason.STOP)
    if request.num_output >= request.params.max_new_tokens:
        return Outcome(reason=api.FinishReason.LENGTH)
    return None


def _report_progress(messages: list[Message], request: Request, num_done: int) -> None:
    total = request.prompt_len + len(request.resumed_ids)
    if num_done < total:
        progress = api.PrefillProgress(request_id=request.request_id, done=num_done, total=total)
        messages.append((request, progress))


def failure(code: str, text: str) -> Outcome:
    """An outcome that says what went wrong."""
    return Outcome(reason=api.FinishReason.ERROR, error_code=code, error_message=text)
