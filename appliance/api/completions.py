# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: a prompt of text or token ids, continued.

Does not know: chat, tools, how text is generated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from appliance.answer import AnswerReader
from appliance.api.context import Caller, Context
from appliance.api.dialect import (
    log_unknown_once,
    new_request_id,
    request_of,
    sampling_of,
    usage_of,
)
from appliance.api.replies import reply
from appliance.api.sse import DONE_FRAME, data_frame
from appliance.api.wire import UNSUPPORTED_COMPLETIONS, CompletionRequest, refuse_unsupported
from appliance.errors import ApiError, as_api_error, error_body
from appliance.generation import Generation, Step
from appliance.services import DEFAULT_TENANT, Services
from appliance.text_limits import check_can_fit
from appliance.turn_params import stop_list
from engine import api
from sessions.token_codec import decode_ids, encode_ids
from tools_schema import events as parsed

logger = logging.getLogger(__name__)
router = APIRouter(tags=["openai"])

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


@router.post("/v1/completions", response_model=None)
async def completions(
    body: CompletionRequest, request: Request, context: Context, caller: Caller
) -> Any:
    """Continue a prompt; with `stream`, in chunks."""
    refuse_unsupported(body, UNSUPPORTED_COMPLETIONS)
    log_unknown_once(body)
    services = context.services
    services.check_model(body.model)
    prompt = prompt_ids(body.prompt, services)
    num_logprobs = -1 if body.logprobs is None else body.logprobs
    max_tokens = body.max_tokens or DEFAULT_MAX_TOKENS
    sampling = sampling_of(body, services, prompt, max_tokens, num_logprobs, param="prompt")
    engine_request = request_of(
        new_request_id("cmpl"),
        prompt,
        sampling,
        services,
        caller or DEFAULT_TENANT,
        priority=body.priority,
    )
    answer = AnswerReader(
        tokenizer=services.assets.tokenizer,
        eos_ids=frozenset(services.assets.eos_ids),
        stop_strings=stop_list(body.stop),
    )
    run = Generation(
        client=services.client, metrics=services.metrics, request=engine_request, answer=answer
    )
    completion = _Completion(body=body, run=run)
    return await reply(request, context, completion, stream=body.stream)


def prompt_ids(prompt: Any, services: Services) -> bytes:
    """Return the prompt as ids. Raises: ApiError for several prompts, or ids out of range."""
    if isinstance(prompt, str):
        max_token_bytes = services.assets.tokenizer.max_token_bytes
        check_can_fit(len(prompt), services.max_context_len, max_token_bytes, "prompt")
        ids = services.renderer.encode_prompt(prompt)
        if not ids:
            raise ApiError("invalid_value", "prompt: must not be empty", "prompt")
        return ids
    if not prompt:
        raise ApiError("invalid_value", "prompt: must not be empty", "prompt")
    if not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(
                "unsupported_parameter", f"prompt: one at a time; got {len(prompt)}", "prompt"
            )
        return prompt_ids(prompt[0], services)
    vocab_size = services.assets.vocab_size
    for index, token_id in enumerate(prompt):
        if not 0 <= token_id < vocab_size:
            where = f"prompt[{index}]"
            message = f"{where}: {token_id} is no token id; allowed: 0 to {vocab_size - 1}"
            raise ApiError("invalid_value", message, where)
    return encode_ids(prompt)


@dataclass(slots=True, kw_only=True)
class _Completion:
    """One request on its way to its answer."""

    body: CompletionRequest
    run: Generation
    created: int = field(default_factory=lambda: int(time.time()))
    _text_len: int = 0

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield SSE frames; an error ends the stream with a frame of its own."""
        options = self.body.stream_options
        try:
            async for step in self.run.steps():
                text = _text_of(step)
                if text or step.token_ids:
                    yield self._chunk([self._choice(text, step, None)])
            end = Step(token_ids=[], events=[])
            yield self._chunk([self._choice("", end, self.run.finish_reason)])
            if options is not None and options.include_usage:
                yield self._chunk([], usage=usage_of(self.run))
        except Exception as error:
            api_error = as_api_error(error)
            if api_error.code == "internal_error":
                logger.exception("completion stream failed")
            yield data_frame(msgspec.json.encode(error_body(api_error)))
        yield DONE_FRAME

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[api.TokenLogprobs] = []
        async for step in self.run.steps():
            texts.append(_text_of(step))
            token_ids += step.token_ids
            logprobs += step.logprobs
        whole = Step(token_ids=token_ids, events=[], logprobs=tuple(logprobs))
        choice = self._choice("".join(texts), whole, self.run.finish_reason)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = decode_ids(self.run.request.token_ids)
        return {**self._envelope(), "choices": [choice], "usage": usage_of(self.run)}

    def _choice(self, text: str, step: Step, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(step) if self.body.logprobs is not None else None,
            "finish_reason": finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = step.token_ids
        return choice

    def _logprobs(self, step: Step) -> dict[str, Any]:
        tokenizer = self.run.answer.tokenizer

        def spell(token_id: int) -> str:
            return tokenizer.token_bytes(token_id, with_control=True).decode("utf-8", "replace")

        tokens = [spell(token_id) for token_id in step.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._text_len)
            self._text_len += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [found.logprob for found in step.logprobs],
            "top_logprobs": [
                dict(zip(map(spell, found.top_ids), found.top_logprobs, strict=True))
                for found in step.logprobs
            ],
            "text_offset": offsets,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._envelope(), "choices": choices}
        options = self.body.stream_options
        if usage is None and options is not None and options.continuous_usage_stats:
            usage = usage_of(self.run)
        if options is not None and (options.include_usage or usage is not None):
            chunk["usage"] = usage
        return data_frame(msgspec.json.encode(chunk))

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.run.request.request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
        }


def _text_of(step: Step) -> str:
    return "".join(e.text for e in step.events if isinstance(e, parsed.TextDelta))
