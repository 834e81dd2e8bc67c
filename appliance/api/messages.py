# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages: one conversation, stateless, in Anthropic's dialect; and its token count.

Does not know: how messages are read, text is generated or parsed, an answer is spelled.
"""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request, Response

from appliance.api.context import ApiContext, Caller, Context
from appliance.api.conversation import Conversation, render_conversation
from appliance.api.dialect import check_fields, log_ignored_once
from appliance.api.identity import session_headers, session_name
from appliance.api.json_body import JsonRoute
from appliance.api.known_fields import REFUSED_MESSAGES
from appliance.api.message_answer import MessageAnswer
from appliance.api.messages_input import chat_messages_of
from appliance.api.omitted_parts import OmittedParts
from appliance.api.replies import reply
from appliance.api.stateless import Ask, prepare
from appliance.api.thinking_fields import Thinking, thinking_of
from appliance.api.wire_agents import CountTokensRequest, MessagesRequest
from appliance.errors import ApiError
from appliance.implicit_sessions import SessionName
from appliance.services import DEFAULT_TENANT, Services
from appliance.turn_params import stop_list
from sessions.token_codec import count
from tools_schema.response_format import ResponseFormat, parse_response_format
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet

router = APIRouter(tags=["anthropic"], route_class=JsonRoute)


@router.head("/", include_in_schema=False)
async def root() -> Response:
    """Answer agents that look whether somebody is there."""
    return Response(status_code=200)


@router.post("/v1/messages", response_model=None)
async def messages(
    body: MessagesRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Answer a conversation; with `stream`, in events."""
    check_fields(body, REFUSED_MESSAGES)
    context.services.check_model(body.model)
    name = session_name(request, body)
    answer = await _prepare(context, body, caller or DEFAULT_TENANT, name)
    headers = session_headers(name)
    return await reply(request, context, answer, stream=body.stream, headers=headers, pings=True)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, context: Context, caller: Caller) -> Any:
    """Return how many tokens the prompt of such a request has."""
    check_fields(body, REFUSED_MESSAGES)
    services = context.services
    services.check_model(body.model)
    thinking = thinking_of(body, services)
    tenant = caller or DEFAULT_TENANT
    conversation, _ = await _rendered(services, body, tenant, thinking, OmittedParts())
    return {"input_tokens": count(conversation.prompt)}


async def _rendered(
    services: Services,
    body: MessagesRequest | CountTokensRequest,
    tenant: str,
    thinking: Thinking,
    omitted: OmittedParts,
) -> tuple[Conversation, ToolSet]:
    toolset = services.toolset(body.tools or [], skip_unknown=True)
    for kind in toolset.skipped:
        log_ignored_once("tool of type", kind)
    chat = chat_messages_of(body.system, body.messages, omitted)
    conversation = await render_conversation(
        services, chat, toolset, tenant, options=thinking.options
    )
    return conversation, toolset


async def _prepare(
    context: ApiContext, body: MessagesRequest, tenant: str, name: SessionName
) -> MessageAnswer:
    """Render and check everything; the engine has heard only of the grammar."""
    services = context.services
    thinking, omitted = thinking_of(body, services), OmittedParts()
    conversation, toolset = await _rendered(services, body, tenant, thinking, omitted)
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
        thinking=thinking,
        omitted=omitted,
        call_prefix="toolu_",
    )
    return MessageAnswer(body.model, await prepare(services, body, ask))


def _response_format(body: MessagesRequest) -> ResponseFormat | None:
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
