# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: one conversation, stateless, in OpenAI's dialect.

Does not know: how text is generated or parsed, how an answer is spelled.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from appliance.api.chat_answer import ChatAnswer
from appliance.api.chat_input import chat_messages
from appliance.api.context import ApiContext, Caller, Context
from appliance.api.conversation import render_conversation
from appliance.api.dialect import check_fields, new_request_id
from appliance.api.identity import session_headers, session_name
from appliance.api.json_body import JsonRoute
from appliance.api.known_fields import REFUSED_CHAT
from appliance.api.legacy_functions import functions_of, is_legacy, with_tool_calls
from appliance.api.omitted_parts import OmittedParts
from appliance.api.replies import reply
from appliance.api.stateless import Ask, prepare
from appliance.api.thinking_fields import thinking_of
from appliance.api.wire import ChatRequest
from appliance.errors import ApiError
from appliance.implicit_sessions import SessionName
from appliance.services import DEFAULT_TENANT
from appliance.turn_params import stop_list
from tools_schema.response_format import (
    ResponseFormat,
    parse_response_format,
    parse_structured_outputs,
)
from tools_schema.tool_choice import parse_tool_choice

router = APIRouter(tags=["openai"], route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Answer a conversation; with `stream`, in chunks."""
    check_fields(body, REFUSED_CHAT)
    context.services.check_model(body.model)
    name = session_name(request, body)
    answer = await _prepare(context, body, caller or DEFAULT_TENANT, name)
    headers = session_headers(name)
    return await reply(request, context, answer, stream=body.stream, headers=headers)


async def _prepare(
    context: ApiContext, body: ChatRequest, tenant: str, name: SessionName
) -> ChatAnswer:
    """Render and check everything; the engine has heard only of the grammar."""
    services = context.services
    legacy = is_legacy(body)
    if legacy:
        toolset, choice = functions_of(body)
    else:
        toolset = services.toolset(body.tools or [])
        choice = parse_tool_choice(
            body.tool_choice, toolset, body.parallel_tool_calls, body.min_tool_calls, dialect="chat"
        )
    omitted = OmittedParts()
    messages = chat_messages(with_tool_calls(body.messages), omitted)
    thinking = thinking_of(body, services)
    ask = Ask(
        request_id=new_request_id("chatcmpl"),
        tenant=tenant,
        conversation=await render_conversation(
            services, messages, toolset, tenant, options=thinking.options
        ),
        toolset=toolset,
        choice=choice,
        response_format=_response_format(body),
        stop=stop_list(body.stop),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_logprobs=_num_logprobs(body),
        num_choices=body.n or 1,
        name=name,
        thinking=thinking,
        omitted=omitted,
    )
    return ChatAnswer(body, await prepare(services, body, ask), legacy=legacy)


def _response_format(body: ChatRequest) -> ResponseFormat | None:
    wanted = parse_response_format(body.response_format)
    structured = parse_structured_outputs(body.structured_outputs)
    if wanted is not None and structured is not None:
        message = "structured_outputs: cannot be had with response_format"
        raise ApiError("invalid_value", message, "structured_outputs")
    return wanted or structured


def _num_logprobs(body: ChatRequest) -> int:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError("invalid_value", "top_logprobs: needs logprobs: true", "top_logprobs")
    return -1
