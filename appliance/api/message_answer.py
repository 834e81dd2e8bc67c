# SPDX-License-Identifier: Apache-2.0
"""The answer to a request in Anthropic's dialect: its events in order, or the whole object.

Does not know: how the request was read.

Source: the events and objects of Anthropic's Messages API.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from pydantic_core import from_json

from appliance.api.message_blocks import MessageBlocks, WireEvent
from appliance.api.sse import named_frame
from appliance.api.stateless import Prepared
from appliance.errors import ApiError, anthropic_error_body
from appliance.generation import Step, steps_of

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# By the type of a delta: the field of its block that it goes on with.
_GROWS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
}


class MessageAnswer:
    """Run it once, by `frames` or by `whole`."""

    def __init__(self, model: str, prepared: Prepared) -> None:
        self._model = model
        self._run = prepared.runs[0]
        self._notes = prepared.notes

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield SSE frames."""
        blocks, has_begun = MessageBlocks(), False
        async with contextlib.aclosing(steps_of([self._run])) as steps:
            async for _, step in steps:
                if not has_begun:
                    has_begun = True
                    yield _frame({"type": "message_start", "message": self._message([], None)})
                for event in _events(blocks, step):
                    yield _frame(event)
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield _frame({"type": "message_delta", "delta": delta, "usage": self._usage()})
        yield _frame({"type": "message_stop"})

    def error_frame(self, error: ApiError) -> bytes:
        return _frame(anthropic_error_body(error))

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer: what its events make when they are put together."""
        blocks, content = MessageBlocks(), _Content()
        async for _, step in steps_of([self._run]):
            for event in _events(blocks, step):
                content.take(event)
        return self._message(content.blocks, self._stop_reason)

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._run.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence if stop_reason else None,
            "usage": self._usage(),
            **self._notes,
        }

    @property
    def _stop_reason(self) -> str:
        if self._stop_sequence is not None:
            return "stop_sequence"
        return STOP_REASONS[self._run.finish_reason]

    @property
    def _stop_sequence(self) -> str | None:
        is_stop = self._run.finish_reason == "stop"
        return self._run.answer.stop_string if is_stop else None

    def _usage(self) -> dict[str, Any]:
        """What was read from the cache is no part of `input_tokens` here."""
        usage = {"input_tokens": self._run.num_prompt, "output_tokens": self._run.num_output}
        cache = self._run.cache
        if cache is not None:
            cached = cache.l1 + cache.l2 + cache.l3
            usage["input_tokens"] -= cached
            usage["cache_read_input_tokens"] = cached
            usage["cache_creation_input_tokens"] = 0
        return usage


class _Content:
    """Content blocks, put together from their events as clients do it."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._input: list[str] = []

    def take(self, event: WireEvent) -> None:
        match event["type"]:
            case "content_block_start":
                self.blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                self._add(event["delta"])
            case "content_block_stop":
                self._close()

    def _add(self, delta: dict[str, Any]) -> None:
        if delta["type"] == "input_json_delta":
            self._input.append(delta["partial_json"])
        else:
            name = _GROWS[delta["type"]]
            self.blocks[-1][name] += delta[name]

    def _close(self) -> None:
        """The input of a call that was cut is what it says so far."""
        if self._input:
            self.blocks[-1]["input"] = from_json("".join(self._input), allow_partial=True)
            self._input.clear()


def _events(blocks: MessageBlocks, step: Step) -> list[WireEvent]:
    events = blocks.take(step.events)
    return events + blocks.finish() if step.is_last else events


def _frame(event: WireEvent) -> bytes:
    return named_frame(event["type"], msgspec.json.encode(event))
