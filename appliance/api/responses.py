# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: OpenAI's Responses dialect, stateless or continuing a stored response.

Does not know: how items are read, text is generated or parsed. A client that wants its history's
tokens kept as they were sampled uses a session.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

from fastapi import APIRouter, Request

from appliance.api.context import ApiContext, Caller, Context
from appliance.api.conversation import ChatMessage, render_conversation
from appliance.api.dialect import check_fields, log_ignored_once
from appliance.api.identity import session_headers, session_name
from appliance.api.known_fields import REFUSED_RESPONSES
from appliance.api.omitted_parts import OmittedParts
from appliance.api.replies import reply
from appliance.api.response_answer import ResponseAnswer
from appliance.api.responses_input import chat_messages_of
from appliance.api.stateless import Ask, prepare
from appliance.api.thinking_fields import thinking_of
from appliance.api.wire_agents import INCLUDES, ResponsesRequest
from appliance.errors import ApiError
from appliance.implicit_sessions import SessionName
from appliance.services import DEFAULT_TENANT, Services
from tools_schema.response_format import parse_response_format
from tools_schema.tool_choice import parse_tool_choice

logger = logging.getLogger(__name__)
router = APIRouter(tags=["openai"])


@router.post("/v1/responses", response_model=None)
async def create_response(
    body: ResponsesRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Answer a conversation of items; with `stream`, in events."""
    check_fields(body, REFUSED_RESPONSES)
    _check_include(body)
    context.services.check_model(body.model)
    name = session_name(request, body)
    answer = await _prepare(context, body, caller or DEFAULT_TENANT, name)
    headers = session_headers(name)
    return await reply(request, context, answer, stream=body.stream, headers=headers)


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(
    response_id: str, context: Context, caller: Caller, stream: bool = False
) -> Any:
    """Return a stored response."""
    if stream:
        message = "stream: events of a stored response are not kept; sessions keep a turn's"
        raise ApiError("unsupported_parameter", message, "stream")
    return context.services.responses.get(caller or DEFAULT_TENANT, response_id).wire


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, context: Context, caller: Caller) -> Any:
    """Forget a stored response; one that still runs goes on for its reader."""
    context.services.responses.delete(caller or DEFAULT_TENANT, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, context: Context, caller: Caller) -> Any:
    """Stop a stored response that still runs; one that has ended is returned as it is."""
    services = context.services
    stored = services.responses.get(caller or DEFAULT_TENANT, response_id)
    if stored.is_running:
        stored.is_cancelled = True
        stored.wire = {**stored.wire, "status": "cancelled"}
        await services.client.abort(response_id)
    return stored.wire


def _check_include(body: ResponsesRequest) -> None:
    for index, wanted in enumerate(body.include or ()):
        if wanted not in INCLUDES:
            where = f"include[{index}]"
            raise ApiError("unsupported_parameter", f"{where}: {wanted!r} is not supported", where)


async def _prepare(
    context: ApiContext, body: ResponsesRequest, tenant: str, name: SessionName
) -> ResponseAnswer:
    """Render and check everything; the engine has heard only of the grammar."""
    services = context.services
    toolset = services.toolset(body.tools or [], skip_unknown=True)
    for kind in toolset.skipped:
        log_ignored_once("tool of type", kind)
    omitted = OmittedParts()
    messages = [*_previous(services, body, tenant), *chat_messages_of(body.input, omitted)]
    thinking = thinking_of(body, services)
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not messages and not head:
        raise ApiError("invalid_value", "input: there is nothing to answer", "input")
    ask = Ask(
        request_id=f"resp_{secrets.token_hex(16)}",
        tenant=tenant,
        conversation=await render_conversation(
            services,
            [*head, *messages],
            toolset,
            tenant,
            param="input",
            options=thinking.options,
        ),
        toolset=toolset,
        choice=parse_tool_choice(
            body.tool_choice, toolset, body.parallel_tool_calls, dialect="responses"
        ),
        response_format=parse_response_format(
            body.text.format if body.text is not None else None, "text.format"
        ),
        stop=(),
        max_tokens=body.max_output_tokens,
        param="input",
        name=name,
        thinking=thinking,
        omitted=omitted,
    )
    return ResponseAnswer(
        body=body,
        prepared=await prepare(services, body, ask),
        toolset=toolset,
        messages=messages,
        store=services.responses if body.store else None,
        tenant=tenant,
    )


def _previous(services: Services, body: ResponsesRequest, tenant: str) -> list[ChatMessage]:
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
