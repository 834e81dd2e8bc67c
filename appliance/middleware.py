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
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.body_encoding import BodyDecoder, NotCompressedError, decoder_for
from appliance.body_text import BodyRefused, check_text
from appliance.errors import ApiError, error_body_for, is_anthropic
from appliance.metrics import Metrics

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Keys in the ASGI scope: when the request's head was read; a tuple of the body's value, if known.
RECEIVED_S = "moorage.received_s"
PARSED_BODY = "moorage.parsed_body"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class RequestFrame:
    """Wraps the app; see the module docstring."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, max_body_bytes: int, origins: Collection[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope[RECEIVED_S] = time.monotonic()

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent["X-Request-Id"] = request_id
                if is_anthropic(str(scope["path"])):
                    sent["Request-Id"] = request_id  # where its clients look for it
                self._count(scope, message["status"])
            await send(message)

        if scope["method"] not in SAFE_METHODS and self._is_foreign(headers):
            message = (
                f"a page of {headers.get('origin', 'another site')[:200]} may not do this; "
                "allowed: this server's own page, and server.cors_origins"
            )
            await _refuse(str(scope["path"]), "cross_site_request", message, send_framed)
            return
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            message = f"the body is larger than {self._max_body_bytes} bytes"
            await _refuse(str(scope["path"]), "request_too_large", message, send_framed)
            return
        try:
            decoder = decoder_for(headers.get("content-encoding", ""), self._max_body_bytes)
        except ValueError as error:
            await _refuse(str(scope["path"]), "unsupported_encoding", str(error), send_framed)
            return
        await self._app(scope, self._limited(scope, receive, decoder), send_framed)

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a browser sends this for a page of another site, which it does unasked where
        the body is a form's or none. A server without API keys would do what such a page says.

        Source: Fetch Metadata (Sec-Fetch-Site); RFC 6454 (Origin), where a browser sends only that.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._origins or origin in self._origins:
            return False
        if site is not None:
            return site in ("cross-site", "same-site")
        return origin is not None and origin.partition("://")[2] != headers.get("host")

    def _limited(self, scope: Scope, receive: Receive, decoder: BodyDecoder | None) -> Receive:
        """Bodies without a declared length are measured as they come; what no store, hash or
        engine could hold is refused here, for every route.
        """
        num_bytes = 0
        chunks: list[bytes] = []

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                if decoder is not None:
                    message = _decoded(message, decoder)
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                if num_bytes > self._max_body_bytes:
                    raise BodyRefused(
                        "request_too_large", f"more than {self._max_body_bytes} bytes"
                    )
                if not message.get("more_body", False):
                    scope[PARSED_BODY] = check_text(b"".join(chunks))
                    chunks.clear()
            return message

        return receive_limited

    def _count(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._metrics.http_requests.labels(path, str(status)).inc()


async def _refuse(path: str, code: str, text: str, send: Send) -> None:
    """Answer without having read the body."""
    error = ApiError(code, text)
    body = json.dumps(error_body_for(path, error)).encode()
    head = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _decoded(message: Message, decoder: BodyDecoder) -> Message:
    """The message with its piece of the body decompressed. Raises: BodyRefused."""
    piece = message.get("body", b"")
    is_last = not message.get("more_body", False)
    try:
        body = decoder.decode(piece)
    except NotCompressedError:
        raise BodyRefused("invalid_json", "the body is not compressed as it says") from None
    if is_last and not decoder.is_whole and len(body) <= decoder.max_bytes:
        raise BodyRefused("invalid_json", "the compressed body is cut short, or goes on")
    return {**message, "body": body}


def _request_id(headers: Headers) -> str:
    for name in ("x-request-id", "x-client-request-id"):
        value = headers.get(name, "")
        if _REQUEST_ID.match(value):
            return value
    return f"req_{secrets.token_hex(12)}"
