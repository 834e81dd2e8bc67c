# SPDX-License-Identifier: Apache-2.0
"""Routes that tell which model is served, and turn text into token ids and back.

Does not know: generation. Shapes: OpenAI's for models, vLLM's for /tokenize and /detokenize.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from appliance.api.context import Caller, Context
from appliance.api.dialect import chat_messages, log_unknown_once
from appliance.api.wire import DetokenizeRequest, TokenizeRequest
from appliance.errors import ApiError
from appliance.services import Services
from appliance.text_limits import check_can_fit, num_chars
from sessions.token_codec import decode_ids

router = APIRouter(tags=["openai"])


@router.get("/v1/models")
async def list_models(context: Context, caller: Caller) -> Any:
    """List the model, under its own name and its aliases."""
    services = context.services
    return {
        "object": "list",
        "data": [_model(services, name) for name in services.model_names],
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
    log_unknown_once(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("invalid_value", "prompt, messages: give exactly one of them", "prompt")
    param = "messages" if body.prompt is None else "prompt"
    given = [body.messages, body.tools] if body.prompt is None else body.prompt
    room = services.assets.tokenizer.max_token_bytes
    check_can_fit(num_chars(given), services.max_context_len, room, param)
    if body.prompt is not None:
        ids = decode_ids(services.renderer.encode_prompt(body.prompt))
    else:
        toolset = services.toolset(body.tools or [])
        rendered = services.renderer.render_chat(
            chat_messages(body.messages or []),
            toolset,
            add_generation_prompt=body.add_generation_prompt,
        )
        ids = decode_ids(rendered)
    return {"count": len(ids), "max_model_len": services.max_context_len, "tokens": ids}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context, caller: Caller) -> Any:
    """Return the text of token ids, control tokens spelled out."""
    log_unknown_once(body)
    try:
        text = context.services.assets.tokenizer.decode(body.tokens, with_control=True)
    except IndexError:
        size = context.services.assets.tokenizer.vocab_size
        index = next(i for i, token_id in enumerate(body.tokens) if not 0 <= token_id < size)
        where = f"tokens[{index}]"
        message = f"{where}: {body.tokens[index]} is no token id; allowed: 0 to {size - 1}"
        raise ApiError("invalid_value", message, where) from None
    return {"prompt": text}


def _model(services: Services, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "moorage",
        "root": services.model_name,
        "max_model_len": services.max_context_len,
        "context_length": services.max_context_len,
    }
