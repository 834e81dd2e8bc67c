# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: the response object, its heartbeat, and where a reader wants to start.

Does not know: turns, or what an event says.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request

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


def event_stream(
    frames: AsyncIterator[bytes],
    heartbeat_s: float,
    headers: dict[str, str] | None = None,
    *,
    pings: bool = False,
) -> EventSourceResponse:
    """Stream ready-made frames; headers go out at once, a comment every `heartbeat_s`.

    `pings`: Anthropic's ping event in place of the comment.
    """
    return EventSourceResponse(
        frames,
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
