# SPDX-License-Identifier: Apache-2.0
"""How the dialects hand an answer out: as a stream of frames, or whole unless the client has gone.

Does not know: any dialect, how an answer comes about.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from appliance.api.context import ApiContext, ClientGone, or_client_gone
from appliance.api.sse import event_stream
from appliance.errors import ApiError, as_api_error
from appliance.generation import peeked

logger = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499


class Answer(Protocol):
    """One request on its way to its answer; run once, by `frames` or by `whole`."""

    def frames(self) -> AsyncGenerator[bytes, None]: ...

    def error_frame(self, error: ApiError) -> bytes:
        """What ends a stream that has begun."""
        ...

    async def whole(self) -> dict[str, Any]: ...


async def reply(
    request: Request,
    context: ApiContext,
    answer: Answer,
    *,
    stream: bool,
    headers: dict[str, str] | None = None,
    pings: bool = False,
) -> Response:
    """Stream the answer, or wait for all of it and stop it where the client hangs up.

    Raises: what the engine refuses at once; later, a stream has begun, and says it in a frame.
    """
    if stream:
        heartbeat_s = context.services.config.server.heartbeat_s
        frames = await peeked(answer.frames())
        return event_stream(_ended_by_error(frames, answer), heartbeat_s, headers, pings=pings)
    try:
        return JSONResponse(await or_client_gone(request, answer.whole()), headers=headers)
    except ClientGone:
        return JSONResponse({}, status_code=CLIENT_GONE_STATUS)


def stream_error(error: Exception) -> ApiError:
    """Return what ended a stream in HTTP's terms; a bug is logged."""
    api_error = as_api_error(error)
    if api_error.code == "internal_error":
        logger.error("a stream failed", exc_info=error)
    return api_error


async def _ended_by_error(
    frames: AsyncGenerator[bytes, None], answer: Answer
) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(frames):
        try:
            async for frame in frames:
                yield frame
        except Exception as error:
            yield answer.error_frame(stream_error(error))
