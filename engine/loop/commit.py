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
from engine.loop.requests import Outcome, Request
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
    sampled_requests: Sequence[Request]  # [S]
    num_tokens: int
    dispatched_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Committed:
    """What a step's result means."""

    step_done: StepDone
    messages: list[Message]
    num_sampled: int


def remember(
    plan: Plan,
    requests: Sequence[Request],
    sampling: SampleBatch,
    sampled: Sequence[Request],
    now_ms: int,
) -> DispatchedStep:
    """Copy what is needed of a plan whose views die with the next one."""
    return DispatchedStep(
        step_id=plan.step_id,
        requests=requests,
        samples=np.array(plan.row_samples),
        num_done=plan.row_starts + plan.row_lens,
        sampling=sampling,
        sampled_requests=sampled,
        num_tokens=len(plan.input_ids),
        dispatched_ms=now_ms,
    )


def commit(step: DispatchedStep, result: StepResult) -> Committed:
    """Give every row its token, decide who is over; `request.outcome` says how."""
    num_rows = len(step.requests)
    accepted = np.zeros(num_rows, dtype=np.int32)
    token_ids = np.full((num_rows, 1), -1, dtype=np.int32)
    finished = np.zeros(num_rows, dtype=np.uint8)
    failed = np.zeros(num_rows, dtype=np.uint8)
    messages: list[Message] = []
    sample_index = -1
    for row, request in enumerate(step.requests):
        sample_index += int(step.samples[row])
        if request.outcome is not None:
            continue
        if result.error is not None:
            request.outcome = failure("step_failed", f"the step failed: {result.error}")
        elif not step.samples[row]:
            _report_progress(messages, request, int(step.num_done[row]))
        else:
            token_id = _take(messages, request, result.sampled, sample_index)
            if token_id is not None:
                accepted[row], token_ids[row, 0] = 1, token_id
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
    )


def _take(
    messages: list[Message], request: Request, sampled: Sampled | None, sample_index: int
) -> int | None:
    """Give a request its token; None if the row failed."""
    assert sampled is not None
    token_id = int(sampled.token_ids[sample_index])
    if token_id < 0:
        request.outcome = failure(
            "invalid_logits", "the model gave NaN or infinite logits, or no allowed token"
        )
        return None
    if request.matcher is not None and not request.matcher.accept(token_id):
        request.outcome = failure(
            "grammar_rejected", f"the grammar does not allow sampled token {token_id}"
        )
        return None
    start = request.num_output
    logprob = sampled.logprobs.get(sample_index)
    request.append(token_id, logprob)
    request.outcome = finish_of(request, token_id)
    tokens = api.Tokens(
        request_id=request.request_id,
        start=start,
        token_ids=pack_ids([token_id]),
        logprobs=None if logprob is None else (logprob,),
    )
    messages.append((request, tokens))
    return token_id


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
