# SPDX-License-Identifier: Apache-2.0
"""What the chat dialects do alike: a conversation becomes a prompt, its grammar, a generation.

Does not know: how a dialect spells its messages or its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.api.dialect import request_of, sampling_of
from appliance.api.wire import SamplingFields
from appliance.generation import Generation
from appliance.grammars import GrammarQuestion, spec_of
from appliance.services import Services
from engine.text.errors import TemplateRenderError
from tools_schema.structural_tag import GrammarPlan, ResponseFormat
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet

ChatMessage = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, read and checked. `param`: the field that holds the conversation."""

    request_id: str
    tenant: str
    prompt: bytes
    toolset: ToolSet
    choice: ToolChoice
    response_format: ResponseFormat | None
    stop: Sequence[str]
    max_tokens: int | None
    num_logprobs: int = -1
    param: str = "messages"


async def prepare(
    services: Services, body: SamplingFields, ask: Ask
) -> tuple[Generation, GrammarPlan]:
    """Check the rest and have the grammar compiled; the generation has not begun.

    Raises: ApiError context_length_exceeded; ToolSchemaError.
    """
    sampling = sampling_of(
        body, services, ask.prompt, ask.max_tokens, ask.num_logprobs, param=ask.param
    )
    reasoning = services.reasoning_of(ask.prompt)
    plan = await services.grammars.compiled(
        GrammarQuestion(ask.toolset, ask.choice, ask.response_format, reasoning)
    )
    if plan.fallbacks:
        services.metrics.grammar_fallbacks.inc()
    request = request_of(
        ask.request_id,
        ask.prompt,
        sampling,
        services,
        ask.tenant,
        priority=body.priority,
        grammar=spec_of(plan),
    )
    answer = services.answer_reader(None, ask.toolset, ask.choice, ask.stop, reasoning)
    run = Generation(
        client=services.client, metrics=services.metrics, request=request, answer=answer
    )
    return run, plan


def grammar_fallbacks(plan: GrammarPlan) -> dict[str, Any]:
    """Return the field that says where the grammar is looser than what was asked for."""
    if not plan.fallbacks:
        return {}
    found = [{"tool": f.tool, "reason": f.reason, "path": f.path} for f in plan.fallbacks]
    return {"x_grammar_fallback": found}


def render_conversation(
    services: Services, messages: Sequence[ChatMessage], toolset: ToolSet
) -> bytes:
    """Render a conversation with system messages anywhere.

    Neighbouring ones become one. A template that refuses one in mid-list gets it as a user's
    message: an agent's reminder is better read there than not at all.
    Raises: TemplateRenderError where the template refuses the rest as well.
    """
    merged = _merged(messages, SYSTEM_ROLES)
    try:
        return services.renderer.render_chat(merged, toolset)
    except TemplateRenderError:
        if not any(message["role"] in SYSTEM_ROLES for message in merged[1:]):
            raise
    as_users = [
        {**message, "role": "user"} if index and message["role"] in SYSTEM_ROLES else message
        for index, message in enumerate(merged)
    ]
    return services.renderer.render_chat(_merged(as_users, ("user",)), toolset)


def _merged(messages: Sequence[ChatMessage], roles: Sequence[str]) -> list[ChatMessage]:
    """Join neighbours of these roles by an empty line."""
    merged: list[ChatMessage] = []
    for message in messages:
        if merged and message["role"] in roles and merged[-1]["role"] in roles:
            content = f"{merged[-1]['content']}\n\n{message['content']}"
            merged[-1] = {**merged[-1], "content": content}
        else:
            merged.append(message)
    return merged
