# SPDX-License-Identifier: Apache-2.0
"""What HTTP says when something is wrong: error code -> status, in OpenAI's envelope.

The only module that knows HTTP status codes. Rooms raise errors with a stable `code`; the table
below gives each its status. Every answer is `{"error": {type, code, message, param, ...}}`.

    ApiError               anything this room itself refuses
    room errors            SessionError, EngineError, ToolSchemaError: mapped by their `code`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RETRY_AFTER_S = 1
MAX_MESSAGE = 2000  # characters: a message shows what was sent, which may be any length

STATUS_BY_CODE: dict[str, int] = {
    # what was sent cannot be understood
    "invalid_json": 400,
    "invalid_type": 400,
    "invalid_value": 400,
    "missing_field": 400,
    "unknown_field": 400,
    "unknown_item_type": 400,
    "unsupported_parameter": 400,
    "invalid_schema": 400,
    "invalid_setting": 400,
    "invalid_fork_point": 400,
    "invalid_import": 400,
    "invalid_tool_choice": 400,
    "reasoning_unsupported": 400,
    "invalid_message": 400,
    "template_refused": 400,
    "invalid_request": 400,
    "invalid_grammar": 400,
    "previous_response_not_found": 400,
    "grammar_budget_exceeded": 400,
    "context_length_exceeded": 400,
    # who asks, and for what
    "invalid_api_key": 401,
    "cross_site_request": 403,
    "model_not_found": 404,
    "not_found": 404,
    "session_not_found": 404,
    "turn_not_found": 404,
    "item_not_found": 404,
    "response_not_found": 404,
    "implicit_session_not_found": 404,
    "lease_not_found": 404,
    "method_not_allowed": 405,
    # the state of the session is against it
    "turn_in_progress": 409,
    "revision_conflict": 409,
    "session_exists": 409,
    "version_conflict": 409,
    "model_changed": 409,
    "compaction_in_progress": 409,
    "session_expired": 410,
    "events_expired": 410,
    "request_too_large": 413,
    "unsupported_encoding": 415,
    "unresolved_tool_calls": 422,
    "unknown_call_id": 422,
    "idempotency_key_reused": 422,
    "nothing_to_compact": 422,
    "compaction_failed": 422,
    # load and trouble
    "kv_quota_exceeded": 429,
    "session_quota_exceeded": 429,
    "queue_full": 429,
    "internal_error": 500,
    "capacity": 503,
    "draining": 503,
    "engine_unavailable": 503,
    "engine_restarted": 503,
    "api_restarted": 503,
    "store_unavailable": 503,
    "store_full": 503,
    "store_corrupt": 500,
    "store_schema_too_new": 500,
}

# Codes of other rooms that say the same as one of ours; a full queue is 429 in the dialects, as
# their clients know it.
SAME_CODE = {
    "queue_full": "capacity",
    "context_too_long": "context_length_exceeded",
    "client_closed": "api_restarted",
}
# Facts that errors of other rooms carry as attributes and clients need as fields.
EXTRA_ATTRIBUTES = ("turn_id", "call_id", "call_ids", "expected", "actual")

ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def type_of_status(status: int) -> str:
    """Return OpenAI's error `type` for a status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal with its code; the status follows from the code alone."""

    code: str
    message: str
    param: str | None = None
    extra: Mapping[str, Any] | None = None  # more fields of the error object

    def __post_init__(self) -> None:
        if len(self.message) > MAX_MESSAGE:
            self.message = self.message[: MAX_MESSAGE - 3] + "..."
        super().__init__(self.message)

    @property
    def status(self) -> int:
        return STATUS_BY_CODE[self.code]


def as_api_error(error: BaseException) -> ApiError:
    """Map a room's error to HTTP terms; one without a known code is an internal error."""
    if isinstance(error, ApiError):
        return error
    code = getattr(error, "code", None)
    if not isinstance(code, str):
        return ApiError("internal_error", "internal error; the log of the server has the details")
    code = known_code(code, default="invalid_value" if isinstance(error, ValueError) else None)
    param = getattr(error, "param", None) or getattr(error, "field", None)
    extra = {name: getattr(error, name) for name in EXTRA_ATTRIBUTES if hasattr(error, name)}
    return ApiError(code, str(error), str(param) if param else None, extra or None)


def known_code(code: str | None, *, default: str | None = None) -> str:
    """Return a code this table knows: `code`, its synonym here, or the default."""
    code = SAME_CODE.get(code or "", code or "")
    return code if code in STATUS_BY_CODE else default or "internal_error"


def error_object(error: ApiError) -> dict[str, Any]:
    """Return the inner object, as terminal events and batch answers carry it."""
    body: dict[str, Any] = {
        "type": type_of_status(error.status),
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    body.update(error.extra or {})
    return body


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the whole JSON body."""
    return {"error": error_object(error)}


def is_anthropic(path: str) -> bool:
    """Whether Anthropic's dialect lives at this path."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_body_for(path: str, error: ApiError) -> dict[str, Any]:
    """Return the body in the envelope of the dialect that lives at this path."""
    if is_anthropic(path):
        return anthropic_error_body(error)
    return error_body(error)


def anthropic_error_body(error: ApiError) -> dict[str, Any]:
    """Return the whole JSON body in Anthropic's envelope; our code and path ride along."""
    kind = ANTHROPIC_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    inner = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": inner}


def error_headers(error: ApiError) -> dict[str, str]:
    """Return the headers that go with an error: when to come back, where shortage passes."""
    if error.status in (429, 503):
        return {"Retry-After": str(RETRY_AFTER_S)}
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}
