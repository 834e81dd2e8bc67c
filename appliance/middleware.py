# SPDX-License-Identifier: Apache-2.0
"""What surrounds every request: its id, the body limit, the request counter. Pure ASGI, so that
streams pass through untouched.

Does not know: routes.
"""

from __future__ import annotations

import json
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.errors import ApiError, error_body_for
from appliance.metrics import Metrics

RECEIVED_S = "moorage.received_s"  # key in the ASGI scope: when the request's head was read
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class RequestFrame:
    """Wraps the app; see the module docstring."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, max_body_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope[RECEIVED_S] = time.monotonic()

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                self._count(scope, message["status"])
            await send(message)

        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            await self._refuse_body(str(scope["path"]), send_framed)
            return
        await self._app(scope, self._limited(receive), send_framed)

    def _limited(self, receive: Receive) -> Receive:
        """Bodies without a declared length are measured as they come."""
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    # The one kind of error that passes the framework's body reader unchanged.
                    raise HTTPException(413, f"more than {self._max_body_bytes} bytes")
            return message

        return receive_limited

    async def _refuse_body(self, path: str, send: Send) -> None:
        message = f"the body is larger than {self._max_body_bytes} bytes"
        error = ApiError("request_too_large", message)
        body = json.dumps(error_body_for(path, error)).encode()
        head = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    def _count(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._metrics.http_requests.labels(path, str(status)).inc()


def _request_id(headers: Headers) -> str:
    for name in ("x-request-id", "x-client-request-id"):
        value = headers.get(name, "")
        if _REQUEST_ID.match(value):
            return value
    return f"req_{secrets.token_hex(12)}"
