# SPDX-License-Identifier: Apache-2.0
"""What the dialects share: sampling fields, engine requests, usage, logprobs, what is logged once.

Does not know: chunks of one dialect or the other.

Source: OpenAI's API reference; the extra sampling fields are those vLLM's server takes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from appliance.api.known_fields import HarmlessValues, refuse_unsupported, unknown_fields
from appliance.api.wire import SamplingFields
from appliance.errors import ApiError
from appliance.generation import Generation
from appliance.services import Services
from engine import api
from engine.text.tokenizer import Tokenizer
from sessions.token_codec import count

logger = logging.getLogger(__name__)

MAX_LOGGED = 1000
_logged: set[tuple[str, str]] = set()


def check_fields(body: BaseModel, refused: HarmlessValues) -> None:
    """Refuse what is known and cannot be had; say once per unknown field that it is ignored.

    Raises: ApiError unsupported_parameter naming the field.
    """
    refuse_unsupported(body, refused)
    for name in unknown_fields(body, refused):
        log_ignored_once("unknown request field", name)


def log_ignored_once(what: str, name: str) -> None:
    """Say once that a part of requests has no effect."""
    if (what, name) not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add((what, name))
        logger.warning("ignored: %s %r", what, name[:64])


def sampling_of(
    body: SamplingFields,
    services: Services,
    prompt: bytes,
    max_tokens: int | None,
    num_logprobs: int = -1,
    *,
    param: str = "messages",
) -> api.SamplingParams:
    """Return the sampling of a request; the output limit is cut to what the context holds.

    Raises: ApiError context_length_exceeded.
    """
    room = services.max_context_len - count(prompt)
    if room < 1:
        raise ApiError(
            "context_length_exceeded",
            f"the prompt has {count(prompt)} tokens; the context holds "
            f"{services.max_context_len}, output included",
            param,
        )
    _check_ids(body.stop_token_ids or (), services, "stop_token_ids")
    _check_ids(body.logit_bias or (), services, "logit_bias")
    num_new = min(max_tokens or room, room)
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        message = f"min_tokens: {body.min_tokens} is more than the limit of {max_tokens}"
        raise ApiError("invalid_value", message, "min_tokens")
    return api.SamplingParams(
        max_new_tokens=num_new,
        min_new_tokens=min(body.min_tokens or 0, num_new),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        num_logprobs=num_logprobs,
    )


def _check_ids(token_ids: Any, services: Services, path: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < services.assets.vocab_size:
            raise ApiError(
                "invalid_value",
                f"{path}: {token_id} is no token id; allowed: 0 to "
                f"{services.assets.vocab_size - 1}",
                path,
            )


def request_of(
    request_id: str,
    prompt: bytes,
    sampling: api.SamplingParams,
    services: Services,
    tenant: str,
    *,
    priority: int = 0,
    grammar: api.GrammarSpec | None = None,
) -> api.GenerateRequest:
    """Return the engine request."""
    return api.GenerateRequest(
        request_id=request_id,
        token_ids=prompt,
        sampling=sampling,
        grammar=grammar,
        priority=priority,
        tenant=tenant,
        salt=services.salt_of(tenant),
    )


def new_request_id(prefix: str) -> str:
    """Return a fresh id such as `chatcmpl-...`."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage_of(runs: Sequence[Generation], num_choices: int = 1) -> dict[str, Any]:
    """Return the usage of generations; what the engine did not say is left out.

    num_choices: so many in a row answer the same prompt, which counts once.
    """
    prompts = runs[::num_choices]
    num_prompt = sum(run.num_prompt for run in prompts)
    num_output = sum(run.num_output for run in runs)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "completion_tokens_details": {
            "reasoning_tokens": sum(run.answer.num_reasoning for run in runs)
        },
    }
    hits = [run.cache for run in prompts if run.cache is not None]
    if hits:
        tiers = {tier: sum(getattr(hit, tier) for hit in hits) for tier in ("l1", "l2", "l3")}
        usage["prompt_tokens_details"] = {"cached_tokens": sum(tiers.values())}
        usage["x_cache"] = tiers
    return usage


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[api.TokenLogprobs]
) -> list[dict[str, Any]]:
    """Return `choices[].logprobs.content` of these tokens."""
    return [
        {
            **_token_entry(tokenizer, token_id, found.logprob),
            "top_logprobs": [
                _token_entry(tokenizer, top_id, logprob)
                for top_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
            ],
        }
        for token_id, found in zip(token_ids, logprobs, strict=True)
    ]


def _token_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id, with_control=True)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(spelled),
    }
