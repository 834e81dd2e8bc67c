# SPDX-License-Identifier: Apache-2.0
"""What a client keeps of one request, and of the KV events, until its reader takes it.

Bounded by construction: a stream holds the output once (at most max_new_tokens ids) and the
newest prefill progress; the event queue drops what it holds, and says so, when it overflows.
Does not know: sockets, the engine's process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from engine import api

StreamItem = api.Started | api.PrefillProgress | api.Tokens | api.Finished

MAX_QUEUED_KV_BATCHES = 4096
# A reader that was given tokens waits so long for the next: each wake-up costs it far more than a
# token does. A model slower than this streams token by token.
TOKENS_EVERY_S = 0.015


class Pace:
    """Gives tokens out to all streams of a client at once, so that they share the wake-ups."""

    def __init__(self) -> None:
        self._waiting: list[OutputStream] = []

    def wait(self, stream: OutputStream) -> None:
        """Have `stream` give out what it has in `TOKENS_EVERY_S`, or a little sooner."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(TOKENS_EVERY_S, self._give)
        self._waiting.append(stream)

    def _give(self) -> None:
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            stream.give()


class OutputStream:
    """The output of one request: written by the client, read by one consumer."""

    def __init__(
        self, request_id: str, pace: Pace, *, request: api.GenerateRequest | None, base: int
    ) -> None:
        self.request_id = request_id
        self._pace = pace
        self.request = request
        self.num_resubmits = 0
        self.awaits_engine = False  # the one that runs takes no new requests
        self.is_to_end = False  # somebody asked for its end
        self.touched_s = 0.0
        self.submitted_s = time.monotonic()
        self._base = base  # output tokens before the first one held here
        self._ids = bytearray()
        self._logprobs: list[api.TokenLogprobs] = []
        self._num_read = 0
        self._started: api.Started | None = None
        self._started_life = -1  # the last life whose start the reader was told of
        self._progress: api.PrefillProgress | None = None
        self._finished: api.Finished | None = None
        self._is_ready = False  # the reader may take what is there
        self._is_paced = False  # it will be, when the pace says so
        self._given_s = 0.0  # when tokens were last given out
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """The request has ended (its reader may still be behind)."""
        return self._finished is not None

    @property
    def has_failed(self) -> bool:
        """It has ended with an error."""
        return self._finished is not None and self._finished.reason is api.FinishReason.ERROR

    @property
    def num_output(self) -> int:
        """Output tokens known, those before this stream began included."""
        return self._base + len(self._ids) // 4

    def touch(self) -> None:
        """Note that the request was heard of, or asked about, just now."""
        self.touched_s = time.monotonic()

    def feed(self, message: StreamItem) -> bool:
        """Take one message of the engine; False if tokens are missing before it."""
        self.touch()
        if self._finished is not None:
            return True
        if isinstance(message, api.Tokens):
            if message.start > self.num_output:
                return False
            self._append(message)
            self._give_tokens()
            return True
        match message:
            case api.Started():
                # Another life starts anew and costs anew; an attach only repeats what was said.
                if self._started_life < self.num_resubmits:
                    self._started, self._started_life = message, self.num_resubmits
            case api.PrefillProgress():
                self._progress = message
            case api.Finished():
                if message.num_output_tokens > self.num_output:
                    return False
                self._finished = message
        self.give()
        return True

    def end_aborted(self) -> None:
        """End it with what has come, without the engine, which may be gone."""
        self.feed(
            api.Finished(
                request_id=self.request_id,
                reason=api.FinishReason.ABORTED,
                num_output_tokens=self.num_output,
            )
        )

    def fail(self, code: str, text: str) -> None:
        """End the stream from this side."""
        self.feed(
            api.Finished(
                request_id=self.request_id,
                reason=api.FinishReason.ERROR,
                num_output_tokens=self.num_output,
                error_code=code,
                error_message=text,
            )
        )

    def catch_up(self) -> api.AttachRequest:
        """Ask for everything from the first token that is not here."""
        self.touch()
        return api.AttachRequest(request_id=self.request_id, from_output=self.num_output)

    def resume_request(self) -> api.GenerateRequest:
        """The request as another engine must be given it: with what it has produced."""
        assert self.request is not None
        self.awaits_engine = False
        self.touch()
        self.submitted_s = self.touched_s
        return msgspec.structs.replace(
            self.request, resume_token_ids=self.request.resume_token_ids + bytes(self._ids)
        )

    async def news(self) -> list[StreamItem]:
        """Wait until there is something to give out; nothing comes after `Finished`."""
        while not self._is_ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_ready = False
        return self._take()

    def give(self) -> None:
        """Let the reader have all that is here."""
        self._is_ready, self._is_paced = True, False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_tokens(self) -> None:
        """Give tokens out now, or with those that follow where the last went out just now."""
        if self._is_ready or self._is_paced:
            return
        if self.touched_s - self._given_s >= TOKENS_EVERY_S:
            self.give()
        else:
            self._is_paced = True
            self._pace.wait(self)

    def _append(self, message: api.Tokens) -> None:
        skip = self.num_output - message.start
        self._ids += message.token_ids[4 * skip :]
        if message.logprobs is not None:
            self._logprobs += message.logprobs[skip:]

    def _take(self) -> list[StreamItem]:
        items: list[StreamItem] = []
        if self._started is not None:
            items.append(self._started)
            self._started = None
        num_held = len(self._ids) // 4
        if self._progress is not None and num_held == 0:
            items.append(self._progress)
        self._progress = None
        if self._num_read < num_held:
            items.append(self._tokens(self._num_read, num_held))
            self._num_read = num_held
            self._given_s = time.monotonic()
        if self._finished is not None:
            items.append(self._finished)
        return items

    def _tokens(self, start: int, end: int) -> api.Tokens:
        logprobs = tuple(self._logprobs[start:end]) if self._logprobs else None
        return api.Tokens(
            request_id=self.request_id,
            start=self._base + start,
            token_ids=bytes(self._ids[4 * start : 4 * end]),
            logprobs=logprobs,
        )


class KvEventQueue:
    """KV events on their way to one reader; an overflow turns into a `reset`."""

    def __init__(self) -> None:
        self._batches: deque[api.KvEventBatch] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, batch: api.KvEventBatch) -> None:
        """Append a batch."""
        if len(self._batches) >= MAX_QUEUED_KV_BATCHES:
            self.reset()
        self._batches.append(batch)
        self._changed.set()

    def reset(self) -> None:
        """Forget what is queued and tell the reader so."""
        event = api.KvEvent(kind="reset", tier="all", page_hash=b"", parent_hash=b"", num_tokens=0)
        self._batches.clear()
        self._batches.append(api.KvEventBatch(events=(event,)))
        self._changed.set()

    def close(self) -> None:
        """End the reader's iteration."""
        self._is_closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncGenerator[api.KvEventBatch, None]:
        while not self._is_closed:
            await self._changed.wait()
            self._changed.clear()
            while self._batches:
                yield self._batches.popleft()
