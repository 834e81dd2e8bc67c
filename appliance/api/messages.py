# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages: one conversation, stateless, in Anthropic's dialect; and its token count.

Does not know: how messages are read, text is generated or parsed.

Source: the events and objects of Anthropic's Messages API.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from appliance.api.context import ApiContext, Caller, Context
from appliance.api.dialect import log_ignored_once, log_unknown_once
from appliance.api.identity import session_headers, session_name
from appliance.api.message_blocks import MessageBlocks
from appliance.api.messages_input import chat_messages_of
from appliance.api.replies import reply
from appliance.api.sse import named_frame
from appliance.api.stateless import (
    Ask,
    Conversation,
    grammar_fallbacks,
    prepare,
    render_conversation,
)
from appliance.api.wire import refuse_unsupported
from appliance.api.wire_agents import UNSUPPORTED_MESSAGES, CountTokensRequest, MessagesRequest
from appliance.errors import ApiError, anthropic_error_body, as_api_error
from appliance.generation import Generation
from appliance.implicit_sessions import SessionName
from appliance.services import DEFAULT_TENANT, Services
from appliance.turn_params import stop_list
from sessions.token_codec import count
from tools_schema import events as parsed
from tools_schema.response_format import parse_response_format
from tools_schema.structural_tag import GrammarPlan
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet

logger = logging.getLogger(__name__)
router = APIRouter(tags=["anthropic"])

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.head("/", include_in_schema=False)
async def root() -> Response:
    """Answer agents that look whether somebody is there."""
    return Response(status_code=200)


@router.post("/v1/messages", response_model=None)
async def messages(
    body: MessagesRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Answer a conversation; with `stream`, in events."""
    refuse_unsupported(body, UNSUPPORTED_MESSAGES)
    log_unknown_once(body)
    context.services.check_model(body.model)
    name = session_name(request, body)
    answer = await _prepare(context, body, caller or DEFAULT_TENANT, name)
    headers = session_headers(name)
    return await reply(request, context, answer, stream=body.stream, headers=headers, pings=True)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, context: Context, caller: Caller) -> Any:
    """Return how many tokens the prompt of such a request has."""
    log_unknown_once(body)
    context.services.check_model(body.model)
    conversation, _ = await _rendered(context.services, body, caller or DEFAULT_TENANT)
    return {"input_tokens": count(conversation.prompt)}


async def _rendered(
    services: Services, body: MessagesRequest | CountTokensRequest, tenant: str
) -> tuple[Conversation, ToolSet]:
    toolset = services.toolset(body.tools or [], skip_unknown=True)
    for kind in toolset.skipped:
        log_ignored_once("tool of type", kind)
    chat = chat_messages_of(body.system, body.messages)
    return await render_conversation(services, chat, toolset, tenant), toolset


async def _prepare(
    context: ApiContext, body: MessagesRequest, tenant: str, name: SessionName
) -> _Answer:
    """Render and check everything; the engine has heard only of the grammar."""
    services = context.services
    conversation, toolset = await _rendered(services, body, tenant)
    if body.messages[-1]["role"] == "assistant":
        where = f"messages[{len(body.messages) - 1}].role"
        message = f"{where}: the start of an answer cannot be given; the last is a user's message"
        raise ApiError("unsupported_parameter", message, where)
    ask = Ask(
        request_id=f"msg_{secrets.token_hex(12)}",
        tenant=tenant,
        conversation=conversation,
        toolset=toolset,
        choice=parse_tool_choice(body.tool_choice, toolset, dialect="anthropic"),
        response_format=_response_format(body),
        stop=_stop_sequences(body),
        max_tokens=body.max_tokens,
        name=name,
    )
    run, plan = await prepare(services, body, ask)
    return _Answer(body.model, run, plan)


def _response_format(body: MessagesRequest) -> Any:
    if body.output_format is not None:
        return parse_response_format(body.output_format, "output_format")
    wanted = (body.output_config or {}).get("format")
    return parse_response_format(wanted, "output_config.format")


def _stop_sequences(body: MessagesRequest) -> tuple[str, ...]:
    try:
        return stop_list(body.stop_sequences)
    except ApiError as error:
        message = error.message.replace("stop:", "stop_sequences:")
        raise ApiError(error.code, message, "stop_sequences") from None


class _Answer:
    """One request on its way to its answer."""

    def __init__(self, model: str, run: Generation, plan: GrammarPlan) -> None:
        self._model = model
        self._run = run
        self._plan = plan

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield SSE frames; an error ends the stream with a frame of its own."""
        blocks = MessageBlocks()
        has_begun = False
        try:
            async for step in self._run.steps():
                if not has_begun:
                    has_begun = True
                    start = self._message([], None)
                    yield _frame({"type": "message_start", "message": start})
                for event in blocks.take(step.events):
                    yield _frame(event)
            for event in blocks.finish():
                yield _frame(event)
            delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
            yield _frame({"type": "message_delta", "delta": delta, "usage": self._usage()})
            yield _frame({"type": "message_stop"})
        except Exception as error:
            api_error = as_api_error(error)
            if api_error.code == "internal_error":
                logger.exception("messages stream failed")
            yield _frame(anthropic_error_body(api_error))

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer. A call that was cut short is left out."""
        content: list[dict[str, Any]] = []
        async for step in self._run.steps():
            for event in step.events:
                match event:
                    case parsed.TextDelta():
                        _append(content, "text", event.text)
                    case parsed.ReasoningDelta():
                        _append(content, "thinking", event.text)
                    case parsed.ToolCallEnd():
                        content.append(_tool_use(event))
        return self._message(content, self._stop_reason)

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._run.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence if stop_reason else None,
            "usage": self._usage(),
            **grammar_fallbacks(self._plan),
        }

    @property
    def _stop_reason(self) -> str:
        if self._stop_sequence is not None:
            return "stop_sequence"
        return STOP_REASONS[self._run.finish_reason]

    @property
    def _stop_sequence(self) -> str | None:
        is_stop = self._run.finish_reason == "stop"
        return self._run.answer.stop_string if is_stop else None

    def _usage(self) -> dict[str, Any]:
        """What was read from the cache is no part of `input_tokens` here."""
        usage = {"input_tokens": self._run.num_prompt, "output_tokens": self._run.num_output}
        cache = self._run.cache
        if cache is not None:
            cached = cache.l1 + cache.l2 + cache.l3
            usage["input_tokens"] -= cached
            usage["cache_read_input_tokens"] = cached
            usage["cache_creation_input_tokens"] = 0
        return usage


def _append(content: list[dict[str, Any]], kind: str, text: str) -> None:
    """Add text to the last block, or to a new one where that is of another kind."""
    if content and content[-1]["type"] == kind:
        content[-1][kind] += text
    elif kind == "thinking":
        content.append({"type": kind, kind: text, "signature": ""})
    else:
        content.append({"type": kind, kind: text})


def _tool_use(event: parsed.ToolCallEnd) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": event.call_id,
        "name": event.name,
        "input": msgspec.json.decode(event.arguments or "{}"),
    }


def _frame(event: dict[str, Any]) -> bytes:
    return named_frame(event["type"], msgspec.json.encode(event))
