# SPDX-License-Identifier: Apache-2.0
"""What the chat dialects do alike: a conversation becomes a prompt, its grammar, a generation.

Does not know: how a dialect spells its messages or its answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.api.dialect import request_of, sampling_of
from appliance.api.wire import SamplingFields
from appliance.generation import Generation
from appliance.grammars import GrammarQuestion, constrained, spec_of
from appliance.implicit_sessions import Asked, SessionName
from appliance.recall import Recalled, chain_keys, next_key, root_key
from appliance.services import Services
from appliance.text_limits import check_can_fit, num_chars, off_loop
from engine.text.errors import TemplateRenderError
from sessions.token_codec import count
from tools_schema.response_format import ResponseFormat
from tools_schema.structural_tag import GrammarPlan
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet

ChatMessage = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A rendered conversation.

    keys: its `chain_keys`; an answer to it is remembered under the one that follows them.
    opening: the one of its first message that is no system's.
    num_recalled, recalled_tokens: how much of its front is ids of this server.
    """

    prompt: bytes
    keys: tuple[bytes, ...]
    opening: bytes
    num_recalled: int = 0
    recalled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, read and checked.

    name: what its client calls the conversation.
    param: the field that holds the conversation.
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
    param: str = "messages"
    name: SessionName = SessionName()


async def prepare(
    services: Services, body: SamplingFields, ask: Ask
) -> tuple[Generation, GrammarPlan]:
    """Check the rest and have the grammar compiled; the generation has not begun.

    Raises: ApiError context_length_exceeded; ToolSchemaError.
    """
    prompt = ask.conversation.prompt
    sampling = sampling_of(
        body, services, prompt, ask.max_tokens, ask.num_logprobs, param=ask.param
    )
    reasoning = services.reasoning_of(prompt)
    plan = await services.grammars.compiled(
        GrammarQuestion(ask.toolset, ask.choice, ask.response_format, reasoning)
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
    answer = services.answer_reader(None, ask.toolset, ask.choice, ask.stop, reasoning)
    asked = _note_request(services, ask)
    run = Generation(
        client=services.client,
        metrics=services.metrics,
        request=request,
        answer=answer,
        on_end=lambda run: remember(services, run, ask.conversation.keys),
        asked=asked,
    )
    return run, plan


def grammar_fallbacks(plan: GrammarPlan) -> dict[str, Any]:
    """Return the field that says where the grammar is looser than what was asked for."""
    if not plan.fallbacks:
        return {}
    found = [{"tool": f.tool, "reason": f.reason, "path": f.path} for f in plan.fallbacks]
    return {"x_grammar_fallback": found}


async def render_conversation(
    services: Services,
    messages: Sequence[ChatMessage],
    toolset: ToolSet,
    tenant: str,
    *,
    param: str = "messages",
) -> Conversation:
    """Render a conversation; answers of this server in it keep the ids they were sampled as.

    Neighbouring system messages become one. A template that refuses one in mid-list gets it as a
    user's message: an agent's reminder is better read there than not at all. Long text is read
    beside the event loop.
    Raises: TemplateRenderError where the template refuses the rest as well; ApiError naming
        `param` where so much text can never fit.
    """
    chars, room = num_chars([dict(message) for message in messages]), services.max_context_len
    check_can_fit(chars, room, services.assets.tokenizer.max_token_bytes, param)
    merged = _merged(messages, SYSTEM_ROLES)
    root = root_key(tenant, toolset.content_hash)
    keys = await off_loop(chars, lambda: chain_keys(root, merged))
    is_head = merged[0]["role"] in SYSTEM_ROLES and len(keys) > 1
    found = services.recall.longest(keys[:-1])
    prompt = b""
    if found is not None:
        num_known, recalled = found
        new_chars = num_chars([dict(message) for message in merged[num_known:]])
        prompt = await off_loop(
            new_chars, lambda: _continued(services, merged, num_known, recalled)
        )
    if not prompt:
        found = None
        tool_chars = num_chars([tool.as_chat() for tool in toolset])
        prompt = await off_loop(chars + tool_chars, lambda: _rendered(services, merged, toolset))
    return Conversation(
        prompt=prompt,
        keys=tuple(keys),
        opening=keys[1] if is_head else keys[0],
        num_recalled=found[0] if found is not None else 0,
        recalled_tokens=count(found[1].token_ids) if found is not None else 0,
    )


def _rendered(services: Services, messages: list[ChatMessage], toolset: ToolSet) -> bytes:
    try:
        return services.renderer.render_chat(messages, toolset)
    except TemplateRenderError:
        if not any(message["role"] in SYSTEM_ROLES for message in messages[1:]):
            raise
    return services.renderer.render_chat(_systems_as_users(messages), toolset)


def _continued(
    services: Services, messages: Sequence[ChatMessage], num_known: int, recalled: Recalled
) -> bytes:
    """The ids of a history that was answered here, and the rest rendered; b"" if refused."""
    history, new = messages[:num_known], messages[num_known:]
    as_users = [{**m, "role": "user"} if m["role"] in SYSTEM_ROLES else m for m in new]
    for tail in (new, _merged(as_users, ("user",))):
        with contextlib.suppress(TemplateRenderError):
            rest = services.renderer.append_chat(history, tail, recalled.is_closed)
            return recalled.token_ids + rest
    return b""


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


def _systems_as_users(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    shaped = [
        {**message, "role": "user"} if index and message["role"] in SYSTEM_ROLES else message
        for index, message in enumerate(messages)
    ]
    return _merged(shaped, ("user",))


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
