# SPDX-License-Identifier: Apache-2.0
"""Stateless generations: a prompt in, parse events and token ids out, for the dialects.

Does not know: HTTP, the shape of any dialect's chunks, sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from appliance.answer import AnswerReader
from appliance.errors import ApiError, known_code
from appliance.implicit_sessions import Asked
from appliance.metrics import Metrics
from engine import api
from engine.client import EngineClient
from sessions.token_codec import count, decode_ids
from tools_schema import events as parsed

T = TypeVar("T")

QUEUE_FULL = "queue_full"
FIRST_WORD_S = 0.2  # an engine that refuses does so at once; a queue may be long


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one message of the engine brought; nothing where it said that it has begun."""

    token_ids: list[int] = field(default_factory=list)
    events: list[parsed.Event] = field(default_factory=list)
    logprobs: tuple[api.TokenLogprobs, ...] = ()
    is_last: bool = False  # the outcome is known


@dataclass(slots=True, kw_only=True)
class Generation:
    """Run it once, by iterating `steps`; then the outcome is here."""

    client: EngineClient
    metrics: Metrics
    request: api.GenerateRequest
    answer: AnswerReader
    cache: api.CacheHit | None = None
    finish_reason: str = ""  # stop | length | tool_calls
    problems: list[parsed.ParseProblem] = field(default_factory=list)
    on_end: Callable[[Generation], None] | None = None  # where it ended by itself
    asked: Asked | None = None  # what its implicit session says of it
    text: list[str] = field(default_factory=list)
    calls: list[parsed.ToolCallEnd] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return count(self.request.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.answer.token_ids)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield what comes; closing the iterator aborts the request in the engine.

        Raises: ApiError where the engine fails the request.
        """
        stream = self.client.generate(self.request)
        try:
            async for item in stream:
                match item:
                    case api.Started():
                        self.cache = item.cache
                        self.metrics.count_cache(item.cache, None)
                        if self.asked is not None:
                            self.asked.note_cache(item.cache)
                        yield Step()
                    case api.Tokens():
                        yield self._take(item)
                        if self.answer.is_stopped:
                            self.finish_reason = "stop"
                            break
                    case api.Finished():
                        self._finish(item)
                    case _:
                        pass
        finally:
            await stream.aclose()
        events = self.answer.finish(is_cut=self.finish_reason == "length")
        self._note(events)
        is_whole = self.answer.has_calls and not self.answer.has_truncated_call
        if is_whole and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        self.metrics.output_tokens.inc(self.num_output)
        if self.asked is not None:
            self.asked.note_end(self.num_output, self.finish_reason)
        if self.on_end is not None:
            self.on_end(self)
        yield Step(events=events, is_last=True)

    def _take(self, item: api.Tokens) -> Step:
        ids = decode_ids(item.token_ids)
        num_known = self.num_output
        events = [event for event, _ in self.answer.take(ids)]
        self._note(events)
        num_taken = self.num_output - num_known
        logprobs = (item.logprobs or ())[:num_taken]
        return Step(token_ids=ids[:num_taken], events=events, logprobs=logprobs)

    def _note(self, events: list[parsed.Event]) -> None:
        for event in events:
            match event:
                case parsed.ParseProblem():
                    self.problems.append(event)
                case parsed.TextDelta():
                    self.text.append(event.text)
                case parsed.ToolCallEnd():
                    self.calls.append(event)

    def _finish(self, item: api.Finished) -> None:
        match item.reason:
            case api.FinishReason.LENGTH:
                self.finish_reason = "length"
            case api.FinishReason.STOP:
                self.finish_reason = "stop"
            case _:
                is_full = item.error_code == QUEUE_FULL
                code = QUEUE_FULL if is_full else known_code(item.error_code)
                raise ApiError(code, item.error_message or "the engine ended this request")


async def steps_of(runs: Sequence[Generation]) -> AsyncGenerator[tuple[int, Step], None]:
    """Yield the steps of generations that run side by side, each with the index of its run.

    Closing the iterator aborts them all, before `aclose` returns.
    Raises: ApiError where the engine fails one of them; the others are aborted.
    """
    if len(runs) == 1:
        async with contextlib.aclosing(runs[0].steps()) as steps:
            async for step in steps:
                yield 0, step
        return
    arrived: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, run, arrived)) for index, run in enumerate(runs)]
    num_running = len(runs)
    try:
        while num_running:
            index, arrival = await arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_running -= 1
            else:
                yield index, arrival
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def peeked(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Return `items` once its first one is there, or after a short time without it.

    So what is refused at once can still be answered with a status. Closing what is returned closes
    `items`. Raises: what `items` raised in that time.
    """
    first = asyncio.ensure_future(anext(items))
    try:
        await asyncio.wait({first}, timeout=FIRST_WORD_S)
    except asyncio.CancelledError:
        await _close(first, items)
        raise
    if first.done() and isinstance(first.exception(), Exception):
        await first
    return _from_first(first, items)


async def _from_first(
    first: asyncio.Future[T], items: AsyncGenerator[T, None]
) -> AsyncGenerator[T, None]:
    try:
        yield await first
        async for item in items:
            yield item
    finally:
        await _close(first, items)


async def _close(first: asyncio.Future[T], items: AsyncGenerator[T, None]) -> None:
    """Close `items`. Where a task still waits for the first one, it is that task which does so:
    who hangs up may cancel this one at every await.
    """
    if first.done():
        await items.aclose()
    else:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def _pump(
    index: int, run: Generation, arrived: asyncio.Queue[tuple[int, Step | Exception | None]]
) -> None:
    try:
        async with contextlib.aclosing(run.steps()) as steps:
            async for step in steps:
                arrived.put_nowait((index, step))
        arrived.put_nowait((index, None))
    except Exception as error:
        arrived.put_nowait((index, error))
