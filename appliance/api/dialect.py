# SPDX-License-Identifier: Apache-2.0
"""What the OpenAI dialects share: sampling fields, usage, logprobs, chat messages as text.

Does not know: chunks of one dialect or the other.

Source: OpenAI's API reference; the extra sampling fields are those vLLM's server takes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from appliance.api.wire import SamplingFields, unknown_fields
from appliance.errors import ApiError
from appliance.generation import Generation
from appliance.services import Services
from engine import api
from engine.text.tokenizer import Tokenizer
from sessions.token_codec import count

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_LOGGED = 1000
_logged: set[tuple[str, str]] = set()


def log_unknown_once(body: BaseModel) -> None:
    """Say once per field name that it is ignored."""
    for name in unknown_fields(body):
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


def usage_of(run: Generation) -> dict[str, Any]:
    """Return the usage of a generation; what the engine did not say is left out."""
    usage: dict[str, Any] = {
        "prompt_tokens": run.num_prompt,
        "completion_tokens": run.num_output,
        "total_tokens": run.num_prompt + run.num_output,
        "completion_tokens_details": {"reasoning_tokens": run.answer.num_reasoning},
    }
    if run.cache is not None:
        cached = run.cache.l1 + run.cache.l2 + run.cache.l3
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        usage["x_cache"] = {"l1": run.cache.l1, "l2": run.cache.l2, "l3": run.cache.l3}
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


def chat_messages(raw: Sequence[Any]) -> list[dict[str, Any]]:
    """Check chat messages and return them with their content as text.

    Raises: ApiError naming the field.
    """
    if not raw:
        raise ApiError("invalid_value", "messages: at least one message is needed", "messages")
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(raw)]


def _chat_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError("invalid_type", f"{path}: must be an object", path)
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(
            "invalid_value",
            f"{path}.role: must be one of {', '.join(ROLES)}; got {role!r}",
            f"{path}.role",
        )
    if role != "assistant" and "content" not in message:
        raise ApiError("missing_field", f"{path}.content: required", f"{path}.content")
    shaped: dict[str, Any] = {
        "role": role,
        "content": content_text(message.get("content"), f"{path}.content"),
    }
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            where = f"{path}.tool_call_id"
            raise ApiError("missing_field", f"{where}: must be a string; got {call_id!r}", where)
        shaped["tool_call_id"] = call_id
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(thought, str):
        shaped["reasoning_content"] = thought
    if role == "assistant" and message.get("tool_calls"):
        shaped["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    return shaped


def content_text(content: Any, path: str) -> str:
    """Return the text of a message's content. Raises: ApiError where it is anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ApiError("invalid_type", f"{path}: must be a string or a list of parts", path)
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(
                "unsupported_parameter",
                f"{where}.type: only text is supported; got {kind!r}",
                where,
            )
        if not isinstance(text, str):
            raise ApiError("invalid_type", f"{where}.text: must be a string", f"{where}.text")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError("invalid_type", f"{path}: must be a list", path)
    shaped = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError("invalid_type", f"{where}.function: must have a name", where)
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            where = f"{where}.function.arguments"
            raise ApiError("invalid_type", f"{where}: must be JSON text", where)
        shaped.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments or "{}"},
            }
        )
    return shaped
