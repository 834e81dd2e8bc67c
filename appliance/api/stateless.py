# SPDX-License-Identifier: Apache-2.0
"""What the chat dialects do alike: a rendered conversation becomes a grammar and generations.

Does not know: how a dialect spells its messages or its answer, how a prompt is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from appliance.api.conversation import ChatMessage, Conversation
from appliance.api.dialect import request_of, sampling_of
from appliance.api.omitted_parts import OmittedParts
from appliance.api.thinking_fields import Thinking
from appliance.api.wire import SamplingFields
from appliance.errors import ApiError
from appliance.generation import Generation
from appliance.grammars import GrammarQuestion, constrained, spec_of
from appliance.implicit_sessions import Asked, SessionName
from appliance.recall import Recalled, next_key
from appliance.services import Services
from engine import api
from sessions.token_codec import count
from tools_schema.reasoning import Reasoning
from tools_schema.response_format import ResponseFormat
from tools_schema.structural_tag import GrammarPlan
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, read and checked.

    name: what its client calls the conversation.
    param: the field that holds the conversation.
    call_prefix: what ids of calls begin with.
    """

    request_id: str
    tenant: str
    conversation: Conversation
    toolset: ToolSet
    choice: ToolChoice
    response_format: ResponseFormat | None
    stop: Sequence[str]
    max_tokens: int | None
    num_logprobs: int = -1
    num_choices: int = 1
    param: str = "messages"
    name: SessionName = SessionName()
    thinking: Thinking = Thinking()
    omitted: OmittedParts = field(default_factory=OmittedParts)
    call_prefix: str = "call_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What answers a request. `notes`: fields of the answer that say what is not as was asked."""

    runs: list[Generation]
    notes: Mapping[str, Any]


async def prepare(services: Services, body: SamplingFields, ask: Ask) -> Prepared:
    """Check the rest and have the grammar compiled; the generations have not begun.

    Raises: ApiError context_length_exceeded, unsupported_parameter; ToolSchemaError.
    """
    prompt = ask.conversation.prompt
    sampling = sampling_of(
        body, services, prompt, ask.max_tokens, ask.num_logprobs, param=ask.param
    )
    question = _question(services, ask, sampling.max_new_tokens)
    plan = (
        _free_plan(services, body, question)
        if body.ignore_eos or body.min_tokens
        else await services.grammars.compiled(question)
    )
    if plan.fallbacks:
        services.metrics.grammar_fallbacks.inc()
    request = request_of(
        ask.request_id,
        prompt,
        constrained(sampling, plan),
        services,
        ask.tenant,
        priority=body.priority,
        grammar=spec_of(plan),
    )
    runs = [
        _generation(services, ask, _choice_of(request, index), question.reasoning)
        for index in range(ask.num_choices)
    ]
    runs[0].asked = _note_request(services, ask)
    return Prepared(runs=runs, notes={**_grammar_fallbacks(plan), **ask.omitted.as_wire()})


def _question(services: Services, ask: Ask, max_new_tokens: int) -> GrammarQuestion:
    reasoning, budget = services.reasoning_of(ask.conversation.prompt), ask.thinking.budget
    if reasoning == "off" or (budget is not None and budget >= max_new_tokens):
        budget = None  # it is kept anyway
    return GrammarQuestion(ask.toolset, ask.choice, ask.response_format, reasoning, budget)


def _generation(
    services: Services, ask: Ask, request: api.GenerateRequest, reasoning: Reasoning
) -> Generation:
    return Generation(
        client=services.client,
        metrics=services.metrics,
        request=request,
        answer=services.answer_reader(
            None, ask.toolset, ask.choice, ask.stop, reasoning, call_prefix=ask.call_prefix
        ),
        on_end=lambda run: remember(services, run, ask.conversation.keys),
    )


def _choice_of(request: api.GenerateRequest, index: int) -> api.GenerateRequest:
    """The request of one of several choices."""
    if index == 0:
        return request
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}-{index}",
        sampling=sampling_of_choice(request.sampling, index),
    )


def sampling_of_choice(sampling: api.SamplingParams, index: int) -> api.SamplingParams:
    """The sampling of one of several choices: each draws with a seed of its own."""
    if sampling.seed is None or index == 0:
        return sampling
    seed = (sampling.seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)


def _free_plan(services: Services, body: SamplingFields, question: GrammarQuestion) -> GrammarPlan:
    """The plan of an answer that shall go on behind its end: no grammar could be held there."""
    name = "ignore_eos" if body.ignore_eos else "min_tokens"
    other = _constraint_of(question)
    if other:
        raise ApiError("unsupported_parameter", f"{name}: cannot be had with {other}", name)
    return replace(services.grammars.plan(question), text=None, fallbacks=())


def _constraint_of(question: GrammarQuestion) -> str:
    """What its grammar is needed for; "" if for nothing that was asked for."""
    if question.response_format is not None:
        return "a format of the answer"
    if question.choice.kind != "none":
        return "tools"
    return "a budget of reasoning" if question.reasoning_budget is not None else ""


def _grammar_fallbacks(plan: GrammarPlan) -> dict[str, Any]:
    """The field that says where the grammar is looser than what was asked for."""
    if not plan.fallbacks:
        return {}
    found = [{"tool": f.tool, "reason": f.reason, "path": f.path} for f in plan.fallbacks]
    return {"x_grammar_fallback": found}


def _note_request(services: Services, ask: Ask) -> Asked:
    """Add the request to the tree of its implicit session."""
    found = ask.conversation
    now_ms = services.clock_ms()
    session = services.implicit_sessions.take(ask.tenant, ask.name, found.opening, now_ms)
    recalled = (found.num_recalled, found.recalled_tokens)
    asked = session.ask(ask.request_id, found.keys, now_ms, recalled)
    asked.input_tokens = count(found.prompt)
    return asked


def remember(services: Services, run: Generation, keys: Sequence[bytes]) -> None:
    """Keep an answer for when its conversation comes back."""
    if run.finish_reason == "length" or run.answer.has_truncated_call:
        return
    message: ChatMessage = {"role": "assistant", "content": "".join(run.text)}
    message["tool_calls"] = [
        {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in run.calls
    ]
    kept = run.answer.kept()
    token_ids = run.request.token_ids + kept.token_ids
    services.recall.put(
        (*keys, next_key(keys[-1], message)),
        Recalled(token_ids=token_ids, is_closed=kept.is_closed),
    )
