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

import msgspec
import numpy as np
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.body_encoding import BodyDecoder, NotCompressedError, decoder_for
from appliance.errors import STATUS_BY_CODE, ApiError, error_body_for, is_anthropic
from appliance.metrics import Metrics

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Keys in the ASGI scope: when the request's head was read; a tuple of the body's value, if known.
RECEIVED_S = "moorage.received_s"
PARSED_BODY = "moorage.parsed_body"
# JSON text up to what may not be stored: half of a surrogate pair, an integer of 19 digits or more.
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}")
_STRING = (
    rb'"(?:[^"\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|\\(?!u[dD][89a-fA-F]).)*+"
)
_STRING_HEAD = re.compile(_STRING, re.DOTALL)
_FLOAT = rb"[0-9]++(?:\.[0-9]++(?:[eE][+-]?+[0-9]++)?+|[eE][+-]?+[0-9]++)"
_PLAIN = re.compile(
    rb'(?:[^"0-9]++|' + _STRING + rb'"|' + _FLOAT + rb"|[0-9]{1,18}+(?![0-9]))*+", re.DOTALL
)
_LONG_INTEGER = re.compile(rb"[0-9]{19,}")
_SURROGATE = re.compile(rb"\\u[dD]")
# Shifts that add up: with each, what is left stands for a run as many digits longer.
_TO_LONG_RUN = (1, 2, 4, 8, 3)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class BodyRefused(HTTPException):
    """A body that no route can read. The kind of error that passes the framework's body reader
    unchanged.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(STATUS_BY_CODE[code], message)
        self.code = code


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


def check_text(body: bytes) -> tuple[object] | None:
    """Raise BodyRefused unless a JSON body spells Unicode text, in UTF-8, and 64-bit integers.

    Python's reader lets halves of surrogate pairs through, and integers of any length. Returns
    the body's value where it had to be read for that: nobody need read it again.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BodyRefused("invalid_json", f"the body is not UTF-8: {error.reason}") from error
    has_surrogates = b"\\" in body and _SURROGATE.search(body) is not None
    parsed = _read_strictly(body) if has_surrogates else None
    is_text = parsed is not None or not has_surrogates
    if is_text and not has_long_number(body):
        return parsed  # nearly every body; what follows takes 30 ms for an agent's half a megabyte
    at = 0
    while _SUSPECT.search(body, at):
        at = _end(_PLAIN, body, at)
        digits = _LONG_INTEGER.match(body, at)
        if digits is None:
            break
        _check_integer(body, digits)
        at = digits.end()
    at = _end(_STRING_HEAD, body, at)
    if body[at : at + 2] == b"\\u":
        escape = body[at : at + 6].decode("ascii", "replace")
        raise BodyRefused(
            "invalid_json", f"the body is not Unicode text: {escape} at byte {at} stands alone"
        )
    return parsed


def has_long_number(body: bytes) -> bool:
    """Whether 19 digits follow each other anywhere. A context of token ids is mostly digits: a
    search stops at each of them."""
    is_run = (np.frombuffer(body, np.uint8) - np.uint8(ord("0"))) < 10
    for shift in _TO_LONG_RUN:
        is_run = is_run[shift:] & is_run[:-shift]
    return bool(is_run.any())


def _read_strictly(body: bytes) -> tuple[object] | None:
    """The value a reader finds that, unlike Python's, refuses half of a surrogate pair."""
    try:
        return (msgspec.json.decode(body),)
    except (msgspec.DecodeError, RecursionError):
        return None


def _check_integer(body: bytes, digits: re.Match[bytes]) -> None:
    sign = "-" if body[digits.start() - 1 : digits.start()] == b"-" else ""
    shown = sign + digits[0].decode()
    if len(digits[0]) > 20 or not -(2**63) <= int(shown) < 2**64:
        raise BodyRefused(
            "invalid_value", f"{shown[:24]} at byte {digits.start()}: integers have 64 bits at most"
        )


def _end(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    found = pattern.match(body, at)
    return at if found is None else found.end()


def _request_id(headers: Headers) -> str:
    for name in ("x-request-id", "x-client-request-id"):
        value = headers.get(name, "")
        if _REQUEST_ID.match(value):
            return value
    return f"req_{secrets.token_hex(12)}"
