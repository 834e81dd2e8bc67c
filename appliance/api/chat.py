# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: one conversation, stateless, in OpenAI's dialect.

Does not know: how text is generated or parsed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from appliance.api.context import ApiContext, Caller, Context
from appliance.api.dialect import (
    chat_logprobs,
    chat_messages,
    log_unknown_once,
    new_request_id,
    usage_of,
)
from appliance.api.identity import session_headers, session_name
from appliance.api.replies import reply
from appliance.api.sse import DONE_FRAME, data_frame
from appliance.api.stateless import Ask, grammar_fallbacks, prepare, render_conversation
from appliance.api.wire import UNSUPPORTED_CHAT, ChatRequest, refuse_unsupported
from appliance.errors import ApiError, as_api_error, error_body
from appliance.generation import Generation, Step
from appliance.implicit_sessions import SessionName
from appliance.services import DEFAULT_TENANT
from appliance.turn_params import stop_list
from tools_schema import events as parsed
from tools_schema.response_format import parse_response_format
from tools_schema.structural_tag import GrammarPlan
from tools_schema.tool_choice import parse_tool_choice

logger = logging.getLogger(__name__)
router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Answer a conversation; with `stream`, in chunks."""
    refuse_unsupported(body, UNSUPPORTED_CHAT)
    log_unknown_once(body)
    context.services.check_model(body.model)
    name = session_name(request, body)
    chat = await _prepare(context, body, caller or DEFAULT_TENANT, name)
    headers = session_headers(name)
    return await reply(request, context, chat, stream=body.stream, headers=headers)


async def _prepare(context: ApiContext, body: ChatRequest, tenant: str, name: SessionName) -> _Chat:
    """Render and check everything; the engine has heard only of the grammar."""
    services = context.services
    toolset = services.toolset(body.tools or [])
    choice = parse_tool_choice(
        body.tool_choice, toolset, body.parallel_tool_calls, body.min_tool_calls, dialect="chat"
    )
    response_format = parse_response_format(body.response_format)
    messages = chat_messages(body.messages)
    conversation = await render_conversation(services, messages, toolset, tenant)
    num_logprobs = -1
    if body.logprobs:
        num_logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError("invalid_value", "top_logprobs: needs logprobs: true", "top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens
    ask = Ask(
        request_id=new_request_id("chatcmpl"),
        tenant=tenant,
        conversation=conversation,
        toolset=toolset,
        choice=choice,
        response_format=response_format,
        stop=stop_list(body.stop),
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        name=name,
    )
    run, plan = await prepare(services, body, ask)
    return _Chat(body=body, run=run, plan=plan)


@dataclass(slots=True, kw_only=True)
class _Chat:
    """One request on its way to its answer."""

    body: ChatRequest
    run: Generation
    plan: GrammarPlan
    created: int = field(default_factory=lambda: int(time.time()))
    has_role: bool = False

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield SSE frames; an error ends the stream with a frame of its own."""
        options = self.body.stream_options
        try:
            async for step in self.run.steps():
                for delta, logprobs in self._deltas(step):
                    yield self._chunk([self._choice(delta, logprobs=logprobs)])
            yield self._chunk([self._choice({}, finish_reason=self.run.finish_reason)])
            if options is not None and options.include_usage:
                yield self._chunk([], usage=usage_of(self.run))
        except Exception as error:
            api_error = as_api_error(error)
            if api_error.code == "internal_error":
                logger.exception("chat stream failed")
            yield data_frame(msgspec.json.encode(error_body(api_error)))
        yield DONE_FRAME

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        logprobs: list[dict[str, Any]] = []
        token_ids: list[int] = []
        tokenizer = self.run.answer.tokenizer
        async for step in self.run.steps():
            token_ids += step.token_ids
            logprobs += (
                chat_logprobs(tokenizer, step.token_ids, step.logprobs) if (step.logprobs) else []
            )
            for event in step.events:
                match event:
                    case parsed.TextDelta():
                        texts.append(event.text)
                    case parsed.ReasoningDelta():
                        thoughts.append(event.text)
                    case parsed.ToolCallEnd():
                        calls.append(_call(event.call_id, event.name, event.arguments))
        if texts or not calls:
            message["content"] = "".join(texts)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if self.body.logprobs else None,
            "finish_reason": self.run.finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
        return {
            **self._envelope("chat.completion"),
            "choices": [choice],
            "usage": usage_of(self.run),
        }

    def _deltas(self, step: Step) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """The deltas of one step; ids and logprobs ride on the first of them."""
        deltas = [delta for event in step.events for delta in _delta_of(event)]
        logprobs = None
        if self.body.logprobs and step.logprobs:
            content = chat_logprobs(self.run.answer.tokenizer, step.token_ids, step.logprobs)
            logprobs = {"content": content, "refusal": None}
        has_ids = self.body.return_token_ids and step.token_ids
        if not deltas and (logprobs is not None or has_ids):
            deltas = [{}]
        if deltas and not self.has_role:
            self.has_role = True
            deltas[0] = {"role": "assistant", "content": "", **deltas[0]}
        rest: list[tuple[dict[str, Any], dict[str, Any] | None]] = [(d, None) for d in deltas]
        if rest:
            rest[0] = (deltas[0], logprobs)
            if has_ids:
                rest[0][0]["token_ids"] = step.token_ids
        return rest

    def _choice(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        token_ids = delta.pop("token_ids", None)
        if finish_reason is not None and not self.has_role:
            self.has_role = True
            delta = {"role": "assistant", "content": "", **delta}
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return choice

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._envelope("chat.completion.chunk"), "choices": choices}
        options = self.body.stream_options
        if usage is None and options is not None and options.continuous_usage_stats:
            usage = usage_of(self.run)
        if options is not None and (options.include_usage or usage is not None):
            chunk["usage"] = usage
        return data_frame(msgspec.json.encode(chunk))

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.run.request.request_id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            **grammar_fallbacks(self.plan),
        }


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _delta_of(event: parsed.Event) -> list[dict[str, Any]]:
    match event:
        case parsed.TextDelta():
            return [{"content": event.text}]
        case parsed.ReasoningDelta():
            return [{"reasoning_content": event.text}]
        case parsed.ToolCallStart():
            return [
                {"tool_calls": [{"index": event.index, **_call(event.call_id, event.name, "")}]}
            ]
        case parsed.ToolCallArgs():
            part = {"index": event.index, "function": {"arguments": event.delta}}
            return [{"tool_calls": [part]}]
    return []
