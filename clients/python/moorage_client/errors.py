# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between a client and the server. Does not know: sessions."""

from __future__ import annotations

import json
from typing import Any

import httpx

# What a proxy, or a server that is starting, says.
AWAY = (502, 503, 504)


class ApiError(Exception):
    """The server refused: `{"error": {type, code, message, param, ...}}`.

    `status` is HTTP's, `code` stable, `param` the field at fault (or None), `details` the whole
    error object: some codes add fields of their own.
    """

    def __init__(self, status: int, details: dict[str, Any]) -> None:
        super().__init__(str(details.get("message") or f"HTTP {status}"))
        self.status = status
        self.code = str(details.get("code", "unknown"))
        self.param: str | None = details.get("param")
        self.details = details


class ServerAwayError(Exception):
    """The connection broke, and the server did not come back in time."""


def refusal_of(response: httpx.Response) -> ApiError:
    """The refusal in a response that was read; a proxy's page is one, too."""
    try:
        details = json.loads(response.content)["error"]
        if isinstance(details, dict):
            return ApiError(response.status_code, details)
    except (ValueError, KeyError, TypeError):
        pass
    return ApiError(response.status_code, {"message": response.text[:500]})


def is_away(error: Exception) -> bool:
    """Whether the same call may do better a little later."""
    return isinstance(error, httpx.TransportError) or (
        isinstance(error, ApiError) and error.status in AWAY
    )
