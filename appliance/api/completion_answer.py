# SPDX-License-Identifier: Apache-2.0
"""The answer to a completion: its chunks in order, or the whole object.

Does not know: how the request was read.

Source: the objects of OpenAI's legacy Completions API.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from appliance.api.dialect import usage_of
from appliance.api.sse import DONE_FRAME, data_frame
from appliance.api.wire import CompletionRequest
from appliance.errors import ApiError, error_body
from appliance.generation import Generation, Step, steps_of
from engine import api
from sessions.token_codec import decode_ids
from tools_schema import events as parsed

Json = dict[str, Any]


class CompletionAnswer:
    """Run it once, by `frames` or by `whole`. `runs`: `n` in a row for each prompt."""

    def __init__(
        self, body: CompletionRequest, runs: Sequence[Generation], request_id: str
    ) -> None:
        self._body = body
        self._runs = runs
        self._request_id = request_id
        self._created = int(time.time())
        self._choices = [_Choice(body, index, run) for index, run in enumerate(runs)]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield SSE frames."""
        has_begun = not self._body.echo
        async with contextlib.aclosing(steps_of(self._runs)) as steps:
            async for index, step in steps:
                choice = self._choices[index]
                if not has_begun:
                    has_begun = True
                    for each in self._choices:
                        yield self._chunk([each.echo()])
                if step.token_ids or _text_of(step) or choice.owes_prompt_ids:
                    yield self._chunk([choice.part(step)])
                if step.is_last:
                    yield self._chunk([choice.end()])
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], self._usage())
        yield DONE_FRAME

    def error_frame(self, error: ApiError) -> bytes:
        return data_frame(msgspec.json.encode(error_body(error))) + DONE_FRAME

    async def whole(self) -> Json:
        """Return the whole answer."""
        async for index, step in steps_of(self._runs):
            self._choices[index].take(step)
        choices = [choice.whole() for choice in self._choices]
        return {**self._envelope(), "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        chunk = {**self._envelope(), "choices": choices}
        options = self._body.stream_options
        if usage is None and options is not None and options.continuous_usage_stats:
            usage = self._usage()
        if options is not None and (options.include_usage or usage is not None):
            chunk["usage"] = usage
        return data_frame(msgspec.json.encode(chunk))

    def _usage(self) -> Json:
        return usage_of(self._runs, self._body.n or 1)

    def _envelope(self) -> Json:
        return {
            "id": self._request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
        }


class _Choice:
    """One continuation."""

    def __init__(self, body: CompletionRequest, index: int, run: Generation) -> None:
        self._body = body
        self._index = index
        self._run = run
        self._text_len = 0
        self._texts: list[str] = [self._prompt_text()] if body.echo else []
        self._logprobs: list[api.TokenLogprobs] = []
        # A context of ids takes milliseconds to write and to read: it goes out once the engine has
        # begun, while it computes the prompt.
        self.owes_prompt_ids = body.return_token_ids

    # Whole --------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Keep what a step brought, for `whole`."""
        self._texts.append(_text_of(step))
        self._logprobs += step.logprobs

    def whole(self) -> Json:
        """Return the choice."""
        ids = list(self._run.answer.token_ids)
        step = Step(token_ids=ids, logprobs=tuple(self._logprobs))
        choice = self._choice("".join(self._texts), step)
        return {**choice, "finish_reason": self._run.finish_reason}

    # In chunks ----------------------------------------------------------------------------

    def echo(self) -> Json:
        """What comes first: the prompt."""
        return self._choice(self._texts[0], Step())

    def part(self, step: Step) -> Json:
        """What a step brought."""
        return self._choice(_text_of(step), step)

    def end(self) -> Json:
        """What comes last."""
        choice = self._choice("", Step())
        return {**choice, "finish_reason": self._run.finish_reason}

    def _choice(self, text: str, step: Step) -> Json:
        choice: Json = {
            "index": self._index,
            "text": text,
            "logprobs": self._wire_logprobs(step) if self._body.logprobs is not None else None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = step.token_ids
        if self.owes_prompt_ids:
            self.owes_prompt_ids = False
            choice["prompt_token_ids"] = decode_ids(self._run.request.token_ids)
        return choice

    def _prompt_text(self) -> str:
        prompt: Any = self._body.prompt
        if isinstance(prompt, list):
            prompt = prompt[self._index // (self._body.n or 1)]
        if isinstance(prompt, str):
            return prompt
        ids = decode_ids(self._run.request.token_ids)
        return self._run.answer.tokenizer.decode(ids)

    def _wire_logprobs(self, step: Step) -> Json:
        tokens = [self._spelled(token_id) for token_id in step.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._text_len)
            self._text_len += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [found.logprob for found in step.logprobs],
            "top_logprobs": [
                dict(zip(map(self._spelled, found.top_ids), found.top_logprobs, strict=True))
                for found in step.logprobs
            ],
            "text_offset": offsets,
        }

    def _spelled(self, token_id: int) -> str:
        tokenizer = self._run.answer.tokenizer
        return tokenizer.token_bytes(token_id, with_control=True).decode("utf-8", "replace")


def _text_of(step: Step) -> str:
    return "".join(e.text for e in step.events if isinstance(e, parsed.TextDelta))
