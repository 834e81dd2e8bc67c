# SPDX-License-Identifier: Apache-2.0
"""The answer to a chat completion: its chunks in order, or the whole object.

Does not know: how the request was read.

Source: the objects of OpenAI's Chat Completions API.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from appliance.api import legacy_functions
from appliance.api.dialect import chat_logprobs, usage_of
from appliance.api.sse import DONE_FRAME, data_frame
from appliance.api.stateless import Prepared
from appliance.api.wire import ChatRequest
from appliance.errors import ApiError, error_body
from appliance.generation import Generation, Step, steps_of
from sessions.token_codec import decode_ids
from tools_schema import events as parsed

Json = dict[str, Any]


class ChatAnswer:
    """Run it once, by `frames` or by `whole`."""

    def __init__(self, body: ChatRequest, prepared: Prepared, *, legacy: bool = False) -> None:
        """`legacy`: calls are spelled as `function_call` (see `legacy_functions`)."""
        self._body = body
        self._runs = prepared.runs
        self._notes = prepared.notes
        self._created = int(time.time())
        self._choices = [_Choice(body, i, run, legacy) for i, run in enumerate(prepared.runs)]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield SSE frames."""
        async with contextlib.aclosing(steps_of(self._runs)) as steps:
            async for index, step in steps:
                choice = self._choices[index]
                for delta in choice.deltas(step):
                    yield self._chunk([delta])
                if step.is_last:
                    yield self._chunk([choice.end()])
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], self._usage())
        yield DONE_FRAME

    def error_frame(self, error: ApiError) -> bytes:
        return data_frame(_json(error_body(error))) + DONE_FRAME

    async def whole(self) -> Json:
        """Return the whole answer."""
        async for index, step in steps_of(self._runs):
            self._choices[index].take(step)
        answer = {
            **self._envelope("chat.completion"),
            **self._notes,
            "choices": [choice.whole() for choice in self._choices],
            "usage": self._usage(),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = decode_ids(self._runs[0].request.token_ids)
        return answer

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        chunk = {**self._envelope("chat.completion.chunk"), "choices": choices, **self._notes}
        self._notes = {}  # they ride on the first chunk
        options = self._body.stream_options
        if usage is None and options is not None and options.continuous_usage_stats:
            usage = self._usage()
        if options is not None and (options.include_usage or usage is not None):
            chunk["usage"] = usage
        return data_frame(_json(chunk))

    def _usage(self) -> Json:
        return usage_of(self._runs, len(self._runs))

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self._runs[0].request.request_id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
        }


class _Choice:
    """One of the answers to a request."""

    def __init__(self, body: ChatRequest, index: int, run: Generation, legacy: bool) -> None:
        self._body = body
        self._legacy = legacy
        self._index = index
        self._run = run
        self._has_role = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []

    # Whole --------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Keep what a step brought, for `whole`."""
        self._logprobs += self._step_logprobs(step)
        for event in step.events:
            match event:
                case parsed.TextDelta():
                    self._texts.append(event.text)
                case parsed.ReasoningDelta():
                    self._thoughts.append(event.text)
                case parsed.ToolCallStart():
                    self._calls.append(_call(event.call_id, event.name, ""))
                case parsed.ToolCallArgs():
                    self._calls[event.index]["function"]["arguments"] += event.delta

    def whole(self) -> Json:
        """Return the choice. A call that was cut has the arguments that were sampled of it."""
        message: Json = {"role": "assistant", "content": None}
        if self._texts or not self._calls:
            message["content"] = "".join(self._texts)
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls and self._legacy:
            message["function_call"] = self._calls[0]["function"]
        elif self._calls:
            message["tool_calls"] = self._calls
        choice: Json = {
            "index": self._index,
            "message": message,
            "logprobs": _logprobs(self._logprobs) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(self._run.answer.token_ids)
        return choice

    # In chunks ----------------------------------------------------------------------------

    def deltas(self, step: Step) -> list[Json]:
        """The choices of a step's chunks; ids and logprobs ride on the first of them."""
        deltas = [delta for event in step.events for delta in self._deltas_of(event)]
        logprobs = self._step_logprobs(step)
        has_ids = self._body.return_token_ids and bool(step.token_ids)
        if not deltas and (logprobs or has_ids):
            deltas = [{}]
        choices = [self._choice(delta) for delta in deltas]
        if choices and logprobs:
            choices[0]["logprobs"] = _logprobs(logprobs)
        if choices and has_ids:
            choices[0]["token_ids"] = step.token_ids
        return choices

    def _deltas_of(self, event: parsed.Event) -> list[Json]:
        deltas = legacy_functions.deltas_of(event) if self._legacy else None
        return _delta_of(event) if deltas is None else deltas

    def end(self) -> Json:
        """The choice of the last chunk."""
        return {**self._choice({}), "finish_reason": self._finish_reason()}

    def _finish_reason(self) -> str:
        reason = self._run.finish_reason
        is_call = self._legacy and reason == "tool_calls"
        return legacy_functions.FINISH_REASON if is_call else reason

    def _choice(self, delta: Json) -> Json:
        if not self._has_role:
            self._has_role = True
            delta = {"role": "assistant", "content": "", **delta}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _step_logprobs(self, step: Step) -> list[Json]:
        if not self._body.logprobs or not step.logprobs:
            return []
        return chat_logprobs(self._run.answer.tokenizer, step.token_ids, step.logprobs)


def _delta_of(event: parsed.Event) -> list[Json]:
    match event:
        case parsed.TextDelta():
            return [{"content": event.text}]
        case parsed.ReasoningDelta():
            return [{"reasoning_content": event.text}]
        case parsed.ToolCallStart():
            call = {"index": event.index, **_call(event.call_id, event.name, "")}
            return [{"tool_calls": [call]}]
        case parsed.ToolCallArgs():
            part = {"index": event.index, "function": {"arguments": event.delta}}
            return [{"tool_calls": [part]}]
    return []


def _call(call_id: str, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _logprobs(content: list[Json]) -> Json:
    return {"content": content, "refusal": None}


def _json(value: Json) -> bytes:
    return msgspec.json.encode(value)
