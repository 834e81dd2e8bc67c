# SPDX-License-Identifier: Apache-2.0
"""One answer in the Responses dialect: its events in order, or the whole object.

Does not know: how the request was read.

Source: the events and objects of OpenAI's Responses API.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.api.conversation import ChatMessage
from appliance.api.replies import stream_error
from appliance.api.responses_input import ITEM_PREFIXES, chat_messages_of, seal
from appliance.api.sse import named_frame
from appliance.api.stateless import Prepared
from appliance.api.wire_agents import ENCRYPTED_REASONING, ResponsesRequest
from appliance.errors import ApiError, as_api_error
from appliance.frame_log import FrameLog
from appliance.generation import Generation, Step, peeked, steps_of
from appliance.response_events import ResponseEvents, WireEvent
from appliance.response_store import ResponseStore, StoredResponse
from tools_schema.tool_spec import ToolSet

Steps = AsyncGenerator[tuple[int, Step], None]

QUEUED = "queued"
IN_PROGRESS = "in_progress"


class ResponseCancelled(Exception):
    """It was cancelled before the engine knew of it."""


@dataclass(slots=True, kw_only=True)
class ResponseAnswer:
    """Run it once, by `frames` or by `whole`."""

    body: ResponsesRequest
    prepared: Prepared
    toolset: ToolSet
    messages: list[ChatMessage]  # what it answers, without the instructions
    input_items: list[dict[str, Any]]  # what of it this request brought
    store: ResponseStore | None
    tenant: str
    output: list[dict[str, Any]] = field(default_factory=list)
    _created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _stored: StoredResponse | None = None

    @property
    def run(self) -> Generation:
        return self.prepared.runs[0]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield SSE frames; exactly one terminal event comes last.

        Raises: what the engine refuses at once, before the first frame.
        """
        self._open()
        try:
            steps = await peeked(steps_of([self.run]))
        except Exception as error:
            self._close("failed", as_api_error(error))
            raise
        async with contextlib.aclosing(self._frames(steps)) as frames:
            async for frame in frames:
                yield frame

    def error_frame(self, error: ApiError) -> bytes:
        """Only a bug can end its frames without a terminal event."""
        return self._lifecycle("failed", "failed", error)

    async def _frames(self, steps: Steps) -> AsyncGenerator[bytes, None]:
        yield self._lifecycle("created", IN_PROGRESS)
        yield self._lifecycle("in_progress", IN_PROGRESS)
        if self._stored is not None and not self._is_cancelled:
            self._stored.wire = self._object(IN_PROGRESS)
        try:
            async for event in self._events(steps):
                yield self._frame(*event)
            status = self._end_status
            self._close(status)
            yield self._lifecycle(status, status)
        except Exception as error:
            if self._is_cancelled:
                self._close("cancelled")
                yield self._lifecycle("incomplete", "cancelled")
                return
            api_error = stream_error(error)
            self._close("failed", api_error)
            yield self._lifecycle("failed", "failed", api_error)
        finally:
            self._close("cancelled")  # the reader hung up; no effect where it has ended

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        self._open()
        status = "cancelled"  # the client hung up
        try:
            async for _ in self._events(steps_of([self.run])):
                pass
            status = self._end_status
        except Exception:
            if not self._is_cancelled:
                self._close("failed")
                raise
        finally:
            self._close(status)
        return self._object(status)

    def in_background(self) -> tuple[dict[str, Any], FrameLog]:
        """Return the object as it stands now, and the log that `keep_frames` is to fill."""
        log = FrameLog()
        self._open(log)
        assert self._stored is not None
        return self._stored.wire, log

    async def keep_frames(self, log: FrameLog) -> None:
        """Run it for whoever reads the log."""
        try:
            async with contextlib.aclosing(self._frames(steps_of([self.run]))) as frames:
                async for frame in frames:
                    log.add(frame)
        finally:
            log.end()

    async def _events(self, steps: Steps) -> AsyncGenerator[WireEvent, None]:
        events = ResponseEvents(self.run.request.request_id, self.toolset, ITEM_PREFIXES)
        async with contextlib.aclosing(steps):
            async for _, step in steps:
                if self._is_cancelled:
                    raise ResponseCancelled
                for event in events.take(step.events):
                    yield self._noted(event)
        for event in events.finish(self._end_status):
            yield self._noted(event)

    def _noted(self, event: WireEvent) -> WireEvent:
        """Add what this dialect wants beside what a turn's events say; keep finished items."""
        name, fields = event
        if name.startswith("response.output_text."):
            return name, {**fields, "logprobs": []}
        item = fields.get("item")
        if item is not None and item["type"] == "reasoning":
            item = {"summary": [], **item}
            texts = "".join(part["text"] for part in item["content"])
            if texts and ENCRYPTED_REASONING in (self.body.include or ()):
                item["encrypted_content"] = seal(texts)
            fields = {**fields, "item": item}
        if name == "response.output_item.done":
            self.output.append(fields["item"])
        return name, fields

    # What is stored -----------------------------------------------------------------------

    def _open(self, log: FrameLog | None = None) -> None:
        if self.store is not None:
            self._stored = StoredResponse(
                tenant=self.tenant,
                wire=self._object(IN_PROGRESS if log is None else QUEUED),
                input_items=self.input_items,
                log=log,
            )
            self.store.put(self._stored)

    def _close(self, status: str, error: ApiError | None = None) -> None:
        stored, self._stored = self._stored, None
        if stored is None or self.store is None or not self.store.holds(stored):
            return
        stored.wire = self._object("cancelled" if stored.is_cancelled else status, error)
        spoken = chat_messages_of(self._kept_output())
        stored.messages = [*self.messages, *spoken]
        self.store.put(stored)

    def _kept_output(self) -> list[dict[str, Any]]:
        """What of the answer goes on in a conversation: all but half a call."""
        return [
            item
            for item in self.output
            if item["type"] != "function_call" or item["status"] == "completed"
        ]

    @property
    def _is_cancelled(self) -> bool:
        return self._stored is not None and self._stored.is_cancelled

    # The object ---------------------------------------------------------------------------

    @property
    def _end_status(self) -> str:
        return "incomplete" if self.run.finish_reason == "length" else "completed"

    def _object(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        body = self.body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        reasoning = body.reasoning
        text_format = body.text.format if body.text is not None else None
        has_ended = status not in (QUEUED, IN_PROGRESS)
        return {
            "id": self.run.request.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": body.background,
            "error": None if error is None else _error(error),
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": list(self.output) if has_ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "store": body.store,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [_tool(tool.as_chat()["function"], tool.strict) for tool in self.toolset],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if has_ended else None,
            **self.prepared.notes,
        }

    def _usage(self) -> dict[str, Any] | None:
        cache = self.run.cache
        if cache is None:  # the engine had not begun
            return None
        return {
            "input_tokens": self.run.num_prompt,
            "input_tokens_details": {
                "cached_tokens": cache.l1 + cache.l2 + cache.l3,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.run.num_output,
            "output_tokens_details": {"reasoning_tokens": self.run.answer.num_reasoning},
            "total_tokens": self.run.num_prompt + self.run.num_output,
            "x_cache": {"l1": cache.l1, "l2": cache.l2, "l3": cache.l3},
        }

    def _lifecycle(self, event: str, status: str, error: ApiError | None = None) -> bytes:
        return self._frame(f"response.{event}", {"response": self._object(status, error)})

    def _frame(self, name: str, fields: dict[str, Any]) -> bytes:
        event = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_frame(name, msgspec.json.encode(event))


def _tool(function: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {"type": "function", "description": None, "strict": bool(strict), **function}


def _error(error: ApiError) -> dict[str, Any]:
    """The object's own error codes are few; ours rides along."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    code = "rate_limit_exceeded" if error.status == 429 else code
    return {"code": code, "message": error.message, "x_code": error.code}
