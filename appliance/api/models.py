# SPDX-License-Identifier: Apache-2.0
"""Routes that tell which model is served, and turn text into token ids and back.

Does not know: generation. Shapes: OpenAI's and Anthropic's for models, vLLM's for the others.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from appliance.api.chat_input import chat_messages
from appliance.api.context import Caller, Context
from appliance.api.dialect import check_fields
from appliance.api.json_body import JsonRoute
from appliance.api.known_fields import REFUSED_TOKENIZE
from appliance.api.legacy_functions import with_tool_calls
from appliance.api.thinking_fields import template_options
from appliance.api.wire import DetokenizeRequest, TokenizeRequest
from appliance.errors import ApiError
from appliance.services import Services
from appliance.text_limits import check_can_fit, num_chars
from sessions.token_codec import decode_ids

router = APIRouter(tags=["openai"], route_class=JsonRoute)


@router.get("/v1/models")
async def list_models(context: Context, caller: Caller) -> Any:
    """List the model, under its own name and its aliases; in OpenAI's and Anthropic's shapes."""
    services = context.services
    names = services.model_names
    return {
        "object": "list",
        "data": [_model(services, name) for name in names],
        "first_id": names[0],
        "last_id": names[-1],
        "has_more": False,
    }


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context, caller: Caller) -> Any:
    """Return one model by name or alias."""
    context.services.check_model(name)
    return _model(context.services, name)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, context: Context, caller: Caller) -> Any:
    """Return the ids of a prompt, or of messages as the chat template renders them."""
    services = context.services
    check_fields(body, REFUSED_TOKENIZE)
    if body.model is not None:
        services.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("invalid_value", "prompt, messages: give exactly one of them", "prompt")
    param = "messages" if body.prompt is None else "prompt"
    given = [body.messages, body.tools] if body.prompt is None else body.prompt
    room = services.assets.tokenizer.max_token_bytes
    check_can_fit(num_chars(given), services.max_context_len, room, param)
    ids = _prompt_ids(body, services) if body.messages is None else _chat_ids(body, services)
    tokenizer = services.assets.tokenizer
    return {
        "count": len(ids),
        "max_model_len": services.max_context_len,
        "tokens": ids,
        "token_strs": [
            tokenizer.token_bytes(i, with_control=True).decode("utf-8", "replace") for i in ids
        ]
        if body.return_token_strs
        else None,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context, caller: Caller) -> Any:
    """Return the text of token ids, control tokens spelled out."""
    check_fields(body, REFUSED_TOKENIZE)
    if body.model is not None:
        context.services.check_model(body.model)
    size = context.services.assets.tokenizer.vocab_size
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < size:
            where = f"tokens[{index}]"
            message = f"{where}: {token_id} is no token id; allowed: 0 to {size - 1}"
            raise ApiError("invalid_value", message, where)
    return {"prompt": context.services.assets.tokenizer.decode(body.tokens, with_control=True)}


def _prompt_ids(body: TokenizeRequest, services: Services) -> list[int]:
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name):
            raise ApiError("unsupported_parameter", f"{name}: needs messages", name)
    if body.add_special_tokens is False:
        return services.assets.tokenizer.encode(body.prompt or "")
    return decode_ids(services.renderer.encode_prompt(body.prompt or ""))


def _chat_ids(body: TokenizeRequest, services: Services) -> list[int]:
    if body.add_special_tokens:
        where = "add_special_tokens"
        message = f"{where}: cannot be had with messages: the chat template has its own"
        raise ApiError("unsupported_parameter", message, where)
    rendered = services.renderer.render_chat(
        chat_messages(with_tool_calls(body.messages or [])),
        services.toolset(body.tools or []),
        add_generation_prompt=body.add_generation_prompt,
        options=template_options(body.chat_template_kwargs, services),
    )
    return decode_ids(rendered)


def _model(services: Services, name: str) -> dict[str, Any]:
    created = services.started_s
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "moorage",
        "root": services.model_name,
        "max_model_len": services.max_context_len,
        "context_length": services.max_context_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
    }
