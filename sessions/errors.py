# SPDX-License-Identifier: Apache-2.0
"""Every error of the session domain, each with a stable snake_case code.

Does not know: HTTP status codes (appliance.errors maps codes to them).

    SessionError
      BadInput (ValueError)      a value from outside; `param` is the path of the field
        ItemError                invalid_type | unknown_item_type | unknown_field
        SettingError             invalid_setting
        ForkPointError           invalid_fork_point
        ImportFormatError        invalid_import
        SessionsConfigError      invalid_config
      SessionNotFound            session_not_found (also: it belongs to another tenant)
      TurnNotFound               turn_not_found
      ItemNotFound               item_not_found
      LeaseNotFound              lease_not_found
      SessionExists              session_exists
      SessionExpired             session_expired
      TurnInProgress             turn_in_progress, with the turn's id
      RevisionConflict           revision_conflict: the client expected another revision
      VersionConflict            version_conflict: lost a race; re-read and try again
      UnresolvedToolCalls        unresolved_tool_calls, with the call ids
      UnknownCallId              unknown_call_id
      IdempotencyKeyReused       idempotency_key_reused: same key, another body
      QuotaExceeded              session_quota_exceeded
        TokenQuotaExceeded       kv_quota_exceeded
      StoreError
        StoreUnavailable         store_unavailable: down, locked, read-only, timed out
        StoreFull                store_full: disk or quota; reads go on
        StoreCorrupt             store_corrupt: bytes that do not decode
        StoreSchemaTooNew        store_schema_too_new: written by a later Moorage
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class SessionError(Exception):
    """Root. `message` is for people, `code` for programs, `param` the field at fault."""

    code: ClassVar[str] = "session_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadInput(SessionError, ValueError):
    """A value from outside is wrong; nothing was changed."""

    code = "invalid_value"


class ItemError(BadInput):
    """An item does not parse. The code is one of three, so it is set per error."""

    def __init__(self, code: str, message: str, *, param: str) -> None:
        super().__init__(message, param=param)
        self.code = code  # type: ignore[misc]


class SettingError(BadInput):
    code = "invalid_setting"


class ForkPointError(BadInput):
    code = "invalid_fork_point"


class ImportFormatError(BadInput):
    code = "invalid_import"


class SessionsConfigError(BadInput):
    code = "invalid_config"


class SessionNotFound(SessionError):
    code = "session_not_found"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"no session {session_id!r}")
        self.session_id = session_id


class TurnNotFound(SessionError):
    code = "turn_not_found"

    def __init__(self, turn_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no turn {turn_id!r} in this session", param=param)
        self.turn_id = turn_id


class ItemNotFound(SessionError):
    code = "item_not_found"

    def __init__(self, item_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no item {item_id!r} in this session", param=param)
        self.item_id = item_id


class LeaseNotFound(SessionError):
    code = "lease_not_found"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"no lease {lease_id!r} in this session")
        self.lease_id = lease_id


class SessionExists(SessionError):
    code = "session_exists"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} exists already")
        self.session_id = session_id


class SessionExpired(SessionError):
    code = "session_expired"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} has expired")
        self.session_id = session_id


class TurnInProgress(SessionError):
    code = "turn_in_progress"

    def __init__(self, turn_id: str) -> None:
        super().__init__(f"turn {turn_id!r} is in progress in this session")
        self.turn_id = turn_id


class RevisionConflict(SessionError):
    code = "revision_conflict"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(
            f"the session is at revision {actual}, expected {expected}", param="expect_revision"
        )
        self.expected = expected
        self.actual = actual


class VersionConflict(SessionError):
    """Another writer changed the session between this writer's read and its write."""

    code = "version_conflict"

    def __init__(self, session_id: str, expected: int, actual: int) -> None:
        super().__init__(f"session {session_id!r} is at version {actual}, not {expected}")
        self.session_id = session_id
        self.expected = expected
        self.actual = actual


class UnresolvedToolCalls(SessionError):
    code = "unresolved_tool_calls"

    def __init__(self, call_ids: Sequence[str], *, param: str = "input") -> None:
        ids = tuple(call_ids)
        super().__init__(
            f"tool calls without an output: {', '.join(ids)} (send their function_call_output "
            "items, or auto_close_calls: true)",
            param=param,
        )
        self.call_ids = ids


class UnknownCallId(SessionError):
    code = "unknown_call_id"

    def __init__(self, call_id: str, *, param: str, open_call_ids: Sequence[str] = ()) -> None:
        allowed = ", ".join(open_call_ids) if open_call_ids else "none"
        super().__init__(f"{param}: {call_id!r} is not an open call (open: {allowed})", param=param)
        self.call_id = call_id


class IdempotencyKeyReused(SessionError):
    code = "idempotency_key_reused"

    def __init__(self, key: str, turn_id: str) -> None:
        super().__init__(
            f"Idempotency-Key {key!r} was used with another body (turn {turn_id!r})",
            param="Idempotency-Key",
        )
        self.key = key
        self.turn_id = turn_id


class QuotaExceeded(SessionError):
    code = "session_quota_exceeded"


class TokenQuotaExceeded(QuotaExceeded):
    code = "kv_quota_exceeded"


class StoreError(SessionError):
    code = "store_error"


class StoreUnavailable(StoreError):
    code = "store_unavailable"


class StoreFull(StoreError):
    code = "store_full"


class StoreCorrupt(StoreError):
    code = "store_corrupt"


class StoreSchemaTooNew(StoreError):
    code = "store_schema_too_new"
