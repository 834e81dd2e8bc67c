# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: the response object, its heartbeat, and where a reader wants to start.

Does not know: turns, or what an event says.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
from prometheus_client import Gauge
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from appliance.errors import ApiError

# A stream ends when its turn does; uvicorn's graceful timeout bounds the wait at shutdown.
# Otherwise the library cuts every stream the moment SIGTERM arrives.
AppStatus.enable_automatic_graceful_drain = False

_CURSOR = re.compile(r"[0-9]{1,18}\Z")
DONE_FRAME = b"data: [DONE]\n\n"


def _heartbeat() -> ServerSentEvent:
    return ServerSentEvent(comment="heartbeat", sep="\n")


def _ping() -> ServerSentEvent:
    return ServerSentEvent(event="ping", data='{"type":"ping"}', sep="\n")


class FrameResponse(EventSourceResponse):
    """The library's response, but for how its body goes out: ready-made frames need no encoding,
    and no cancel scope each for a send timeout that is not used. Heartbeats, disconnects and the
    end are the library's.
    """

    def __init__(self, frames: AsyncIterator[bytes], readers: Gauge | None, **options: Any) -> None:
        super().__init__(self, **options)
        self._frames = frames
        self._readers = readers
        self._to_client: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._to_client = send
        await super().__call__(scope, receive, send)

    def __aiter__(self) -> FrameResponse:
        return self

    async def __anext__(self) -> bytes:
        """What the library takes for the first chunk: all of them are sent, and none is left."""
        send = self._to_client
        with self._readers.track_inprogress() if self._readers else contextlib.nullcontext():
            try:
                async for frame in self._frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            finally:
                await self._close_frames()
        raise StopAsyncIteration

    async def _close_frames(self) -> None:
        close = getattr(self._frames, "aclose", None)
        if close is not None:
            with anyio.move_on_after(self.DEFAULT_CLEANUP_TIMEOUT, shield=True):
                await close()


def event_stream(
    frames: AsyncIterator[bytes],
    heartbeat_s: float,
    headers: dict[str, str] | None = None,
    *,
    pings: bool = False,
    readers: Gauge | None = None,
) -> EventSourceResponse:
    """Stream ready-made frames; headers go out at once, a comment every `heartbeat_s`.

    `pings`: Anthropic's ping event in place of the comment. `readers` counts who reads.
    """
    return FrameResponse(
        frames,
        readers,
        ping=heartbeat_s,
        ping_message_factory=_ping if pings else _heartbeat,
        sep="\n",
        headers=headers,
    )


def data_frame(body: bytes) -> bytes:
    """Frame one JSON body as OpenAI's dialects do: no id, no event name."""
    return b"data: %s\n\n" % body


def named_frame(event: str, body: bytes) -> bytes:
    """Frame one JSON body under an event name."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), body)


def cursor_of(request: Request, starting_after: int | None) -> int:
    """Return the number of the last event the reader has, from the query or Last-Event-ID.

    Raises: ApiError where Last-Event-ID is no number.
    """
    if starting_after is not None:
        return starting_after
    header = request.headers.get("last-event-id", "")
    if not header:
        return 0
    if not _CURSOR.match(header):
        raise ApiError("invalid_value", f"Last-Event-ID must be a number; got {header!r}")
    return int(header)
