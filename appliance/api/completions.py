# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: prompts of text or token ids, continued.

Does not know: chat, tools, how text is generated.

Source: OpenAI's legacy Completions API; token ids in answers as vLLM's server has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from appliance.answer import AnswerReader
from appliance.api.completion_answer import CompletionAnswer
from appliance.api.context import Caller, Context
from appliance.api.dialect import check_fields, new_request_id, request_of, sampling_of
from appliance.api.known_fields import REFUSED_COMPLETIONS
from appliance.api.packed_ids import PackedIds, PackedRoute
from appliance.api.replies import reply
from appliance.api.stateless import sampling_of_choice
from appliance.api.wire import CompletionRequest
from appliance.errors import ApiError
from appliance.generation import Generation
from appliance.services import DEFAULT_TENANT, Services
from appliance.text_limits import check_can_fit
from appliance.turn_params import stop_list
from sessions.token_codec import encode_ids

router = APIRouter(tags=["openai"], route_class=PackedRoute)

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint
MAX_COMPLETIONS = 128  # prompts times n


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and the field it came in."""

    path: str
    token_ids: bytes


@router.post("/v1/completions", response_model=None)
async def completions(
    body: CompletionRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Continue one prompt, or several; with `stream`, in chunks."""
    check_fields(body, REFUSED_COMPLETIONS)
    _check_choices(body)
    services = context.services
    services.check_model(body.model)
    request_id = new_request_id("cmpl")
    runs: list[Generation] = []
    for prompt in prompts_of(body.prompt, services):
        runs += _runs(services, body, prompt, request_id, caller or DEFAULT_TENANT, len(runs))
    answer = CompletionAnswer(body, runs, request_id)
    return await reply(request, context, answer, stream=body.stream)


def _runs(
    services: Services,
    body: CompletionRequest,
    prompt: Prompt,
    request_id: str,
    tenant: str,
    num_before: int,
) -> list[Generation]:
    """The `n` continuations of one prompt."""
    num_logprobs = -1 if body.logprobs is None else body.logprobs
    max_tokens = body.max_tokens or DEFAULT_MAX_TOKENS
    sampling = sampling_of(
        body, services, prompt.token_ids, max_tokens, num_logprobs, param=prompt.path
    )
    runs = []
    for index in range(body.n or 1):
        engine_request = request_of(
            f"{request_id}-{num_before + index}",
            prompt.token_ids,
            sampling_of_choice(sampling, index),
            services,
            tenant,
            priority=body.priority,
        )
        answer = AnswerReader(
            tokenizer=services.assets.tokenizer,
            eos_ids=frozenset(services.assets.eos_ids),
            stop_strings=stop_list(body.stop),
        )
        runs.append(
            Generation(
                client=services.client,
                metrics=services.metrics,
                request=engine_request,
                answer=answer,
            )
        )
    return runs


def _check_choices(body: CompletionRequest) -> None:
    """Raises: ApiError for what no number of samples could give."""
    if body.best_of not in (None, 1, body.n or 1):
        message = f"best_of: only n is supported, which returns all of them; got {body.best_of}"
        raise ApiError("unsupported_parameter", message, "best_of")
    if body.echo and body.logprobs is not None:
        message = "logprobs: cannot be had with echo: those of a prompt are not computed"
        raise ApiError("unsupported_parameter", message, "logprobs")
    prompts: Any = body.prompt
    is_one = isinstance(prompts, str | PackedIds) or not prompts or isinstance(prompts[0], int)
    total = (body.n or 1) * (1 if is_one else len(prompts))
    if total > MAX_COMPLETIONS:
        message = f"prompt: {total} completions are more than the {MAX_COMPLETIONS} of one request"
        raise ApiError("invalid_value", message, "prompt")


def prompts_of(prompt: Any, services: Services) -> list[Prompt]:
    """Return each prompt. Raises: ApiError for an empty one, or ids out of range."""
    if isinstance(prompt, str | PackedIds):
        return [_prompt(prompt, services, "prompt")]
    if not prompt:
        raise ApiError("invalid_value", "prompt: must not be empty", "prompt")
    if isinstance(prompt[0], int):
        return [_prompt(prompt, services, "prompt")]
    return [_prompt(one, services, f"prompt[{index}]") for index, one in enumerate(prompt)]


def _prompt(one: str | Sequence[int] | PackedIds, services: Services, path: str) -> Prompt:
    if isinstance(one, str):
        return Prompt(path, _text_ids(one, services, path))
    if isinstance(one, PackedIds):
        if _is_in_vocabulary(one.token_ids, services.assets.vocab_size):
            return Prompt(path, one.token_ids)
        one = one.as_list()
    return Prompt(path, _checked_ids(one, services, path))


def _text_ids(text: str, services: Services, path: str) -> bytes:
    max_token_bytes = services.assets.tokenizer.max_token_bytes
    check_can_fit(len(text), services.max_context_len, max_token_bytes, path)
    ids = services.renderer.encode_prompt(text)
    if not ids:
        raise ApiError("invalid_value", f"{path}: must not be empty", path)
    return ids


def _checked_ids(token_ids: Sequence[int], services: Services, path: str) -> bytes:
    if not token_ids:
        raise ApiError("invalid_value", f"{path}: must not be empty", path)
    vocab_size = services.assets.vocab_size
    raw = _encoded(token_ids, vocab_size)
    if raw is None:
        index = next(i for i, one in enumerate(token_ids) if not 0 <= one < vocab_size)
        where = f"{path}[{index}]"
        message = f"{where}: {token_ids[index]} is no token id; allowed: 0 to {vocab_size - 1}"
        raise ApiError("invalid_value", message, where)
    return raw


def _encoded(token_ids: Sequence[int], vocab_size: int) -> bytes | None:
    """Return the ids as the engine takes them; None if one is no id of the vocabulary.

    They are compared once they are packed: a context of ids costs 2 ms more one by one.
    """
    try:
        raw = encode_ids(token_ids)
    except OverflowError:
        return None
    return raw if _is_in_vocabulary(raw, vocab_size) else None


def _is_in_vocabulary(token_ids: bytes, vocab_size: int) -> bool:
    """Whether each of them, of which there is one at least, is an id."""
    values = np.frombuffer(token_ids, dtype="<i4")
    return bool(values.min() >= 0 and values.max() < vocab_size)
