# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: OpenAI's Responses dialect, stateless or continuing a stored response.

Does not know: how items are read, text is generated or parsed, what is done with a stored
response. A client that wants its history's tokens kept as they were sampled uses a session.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from appliance.api.context import ApiContext, Caller, Context
from appliance.api.conversation import ChatMessage, Conversation, render_conversation
from appliance.api.dialect import check_fields, log_ignored_once
from appliance.api.identity import session_headers, session_name
from appliance.api.json_body import JsonRoute
from appliance.api.known_fields import REFUSED_RESPONSES
from appliance.api.omitted_parts import OmittedParts
from appliance.api.replies import reply
from appliance.api.response_answer import ResponseAnswer
from appliance.api.responses_input import chat_messages_of, input_items_of, with_referenced
from appliance.api.sse import event_stream
from appliance.api.stateless import Ask, prepare
from appliance.api.thinking_fields import Thinking, thinking_of
from appliance.api.wire_agents import INCLUDES, ResponsesInput, ResponsesRequest
from appliance.errors import ApiError
from appliance.implicit_sessions import SessionName
from appliance.services import DEFAULT_TENANT, Services
from sessions.token_codec import count
from tools_schema.response_format import parse_response_format
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet

router = APIRouter(tags=["openai"], route_class=JsonRoute)


@router.post("/v1/responses", response_model=None)
async def create_response(
    body: ResponsesRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Answer a conversation of items; with `stream`, in events; with `background`, later."""
    check_fields(body, REFUSED_RESPONSES)
    _check_include(body)
    if body.background and not body.store:
        message = "background: needs store, or nobody could read the answer"
        raise ApiError("invalid_value", message, "background")
    context.services.check_model(body.model)
    name = session_name(request, body)
    answer = await _prepare(context, body, caller or DEFAULT_TENANT, name)
    headers = session_headers(name)
    if body.background:
        return _started(context, answer, headers)
    return await reply(request, context, answer, stream=body.stream, headers=headers)


@router.post("/v1/responses/input_tokens", response_model=None)
async def count_input_tokens(body: ResponsesInput, context: Context, caller: Caller) -> Any:
    """Return how many tokens the prompt of such a request has."""
    check_fields(body, REFUSED_RESPONSES)
    context.services.check_model(body.model)
    rendered = await _rendered(context.services, body, caller or DEFAULT_TENANT)
    num_tokens = count(rendered.conversation.prompt)
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _started(context: ApiContext, answer: ResponseAnswer, headers: dict[str, str]) -> Response:
    """Let it run beside the request, whoever reads it."""
    wire, log = answer.in_background()
    context.services.background.start(answer.keep_frames(log))
    if answer.body.stream:
        return event_stream(log.read(), context.services.config.server.heartbeat_s, headers)
    return JSONResponse(wire, headers=headers)


def _check_include(body: ResponsesRequest) -> None:
    for index, wanted in enumerate(body.include or ()):
        if wanted not in INCLUDES:
            where = f"include[{index}]"
            raise ApiError("unsupported_parameter", f"{where}: {wanted!r} is not supported", where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """A request's input. `messages`: the conversation without the instructions.

    given: the input, with the items that it refers to.
    """

    given: str | Sequence[Any]
    conversation: Conversation
    toolset: ToolSet
    messages: list[ChatMessage]
    thinking: Thinking
    omitted: OmittedParts


async def _rendered(services: Services, body: ResponsesInput, tenant: str) -> _Rendered:
    toolset = services.toolset(body.tools or [], skip_unknown=True)
    for kind in toolset.skipped:
        log_ignored_once("tool of type", kind)
    omitted = OmittedParts()
    given = with_referenced(body.input, lambda name: services.responses.item(tenant, name))
    messages = [*_previous(services, body, tenant), *chat_messages_of(given, omitted)]
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not messages and not head:
        raise ApiError("invalid_value", "input: there is nothing to answer", "input")
    thinking = thinking_of(body, services)
    conversation = await render_conversation(
        services,
        [*head, *messages],
        toolset,
        tenant,
        param="input",
        options=thinking.options,
    )
    return _Rendered(
        given=given,
        conversation=conversation,
        toolset=toolset,
        messages=messages,
        thinking=thinking,
        omitted=omitted,
    )


async def _prepare(
    context: ApiContext, body: ResponsesRequest, tenant: str, name: SessionName
) -> ResponseAnswer:
    """Render and check everything; the engine has heard only of the grammar."""
    services = context.services
    rendered = await _rendered(services, body, tenant)
    ask = Ask(
        request_id=f"resp_{secrets.token_hex(16)}",
        tenant=tenant,
        conversation=rendered.conversation,
        toolset=rendered.toolset,
        choice=parse_tool_choice(
            body.tool_choice, rendered.toolset, body.parallel_tool_calls, dialect="responses"
        ),
        response_format=parse_response_format(
            body.text.format if body.text is not None else None, "text.format"
        ),
        stop=(),
        max_tokens=body.max_output_tokens,
        param="input",
        name=name,
        thinking=rendered.thinking,
        omitted=rendered.omitted,
    )
    return ResponseAnswer(
        body=body,
        prepared=await prepare(services, body, ask),
        toolset=rendered.toolset,
        messages=rendered.messages,
        input_items=input_items_of(rendered.given),
        store=services.responses if body.store else None,
        tenant=tenant,
    )


def _previous(services: Services, body: ResponsesInput, tenant: str) -> list[ChatMessage]:
    """The conversation that is continued; its instructions are not part of it."""
    if body.previous_response_id is None:
        return []
    try:
        stored = services.responses.get(tenant, body.previous_response_id)
    except ApiError as error:
        where = "previous_response_id"
        message = f"{where}: {error.message}"
        raise ApiError("previous_response_not_found", message, where) from None
    if stored.is_running:
        where = "previous_response_id"
        raise ApiError("invalid_value", f"{where}: that response has not ended yet", where)
    return stored.messages
