# SPDX-License-Identifier: Apache-2.0
"""The session API's calls as values, one function an endpoint. Does not know: how they are sent."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from moorage_client import types

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Answer]):
    """A request whose answer is JSON of type `Answer`."""

    method: str
    path: str
    query: Mapping[str, str | int] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    # It may be sent again: it reads, or carries a key that tells repeats.
    is_repeatable: bool = False


def root_of(base_url: str) -> str:
    """Where paths begin: without a slash, and without the `/v1` that OpenAI's clients are given."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def create_session(body: types.SessionCreate) -> Call[types.Session]:
    return Call(method="POST", path="/v1/sessions", body=body)


def list_sessions(
    metadata: Mapping[str, str] | None, query: Mapping[str, str | int]
) -> Call[types.SessionPage]:
    narrowed = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
    return _get("/v1/sessions", {**query, **narrowed})


def get_session(session_id: str) -> Call[types.Session]:
    return _get(session_path(session_id))


def update_session(session_id: str, body: types.SessionUpdate) -> Call[types.SessionUpdated]:
    return Call(method="POST", path=session_path(session_id), body=body)


def close_session(session_id: str, cache: str) -> Call[types.SessionDeleted]:
    path = session_path(session_id)
    return Call(method="DELETE", path=path, query={"cache": cache}, is_repeatable=True)


def create_turn(
    session_id: str, body: types.TurnCreate, idempotency_key: str | None, *, stream: bool
) -> Call[types.Turn]:
    return Call(
        method="POST",
        path=f"{session_path(session_id)}/turns",
        body={**body, "stream": stream},
        headers={"idempotency-key": idempotency_key or str(uuid.uuid4())},
        is_repeatable=True,
    )


def turn_events(session_id: str, turn_id: str, starting_after: int) -> Call[Any]:
    return _get(f"{turn_path(session_id, turn_id)}/events", {"starting_after": starting_after})


def get_turn(session_id: str, turn_id: str) -> Call[types.Turn]:
    return _get(turn_path(session_id, turn_id))


def list_turns(session_id: str) -> Call[types.TurnPage]:
    return _get(f"{session_path(session_id)}/turns")


def cancel_turn(session_id: str, turn_id: str) -> Call[types.Turn]:
    path = f"{turn_path(session_id, turn_id)}/cancel"
    return Call(method="POST", path=path, body={}, is_repeatable=True)


def append_items(session_id: str, body: types.ItemsAppend) -> Call[types.ItemsAppended]:
    return Call(method="POST", path=f"{session_path(session_id)}/items", body=body)


def list_items(session_id: str, query: Mapping[str, str | int]) -> Call[types.ItemPage]:
    return _get(f"{session_path(session_id)}/items", query)


def tokens(session_id: str) -> Call[types.SessionTokens]:
    return _get(f"{session_path(session_id)}/tokens")


def fork(session_id: str, body: types.ForkCreate) -> Call[types.ForkAnswer]:
    return Call(method="POST", path=f"{session_path(session_id)}/fork", body=body)


def rollback(session_id: str, body: types.Rollback) -> Call[types.RolledBack]:
    return Call(method="POST", path=f"{session_path(session_id)}/rollback", body=body)


def compact(session_id: str, body: types.CompactCreate) -> Call[types.Compacted]:
    return Call(method="POST", path=f"{session_path(session_id)}/compact", body=body)


def suspend(session_id: str) -> Call[types.Suspended]:
    path = f"{session_path(session_id)}/suspend"
    return Call(method="POST", path=path, body={}, is_repeatable=True)


def resume(session_id: str) -> Call[types.Resumed]:
    path = f"{session_path(session_id)}/resume"
    return Call(method="POST", path=path, body={}, is_repeatable=True)


def lease(session_id: str, body: types.LeaseCreate) -> Call[types.Lease]:
    return Call(method="POST", path=f"{session_path(session_id)}/leases", body=body)


def list_leases(session_id: str) -> Call[types.LeaseList]:
    return _get(f"{session_path(session_id)}/leases")


def release_lease(session_id: str, lease_id: str) -> Call[types.LeaseDeleted]:
    path = f"{session_path(session_id)}/leases/{quote(lease_id, safe='')}"
    return Call(method="DELETE", path=path, is_repeatable=True)


def signal(session_id: str, body: types.SignalCreate) -> Call[types.Signal]:
    path = f"{session_path(session_id)}/signals"
    return Call(method="POST", path=path, body=body, is_repeatable=True)


def cache(session_id: str) -> Call[types.CacheView]:
    return _get(f"{session_path(session_id)}/cache")


def session_path(session_id: str) -> str:
    """Path of a session."""
    return f"/v1/sessions/{quote(session_id, safe='')}"


def turn_path(session_id: str, turn_id: str) -> str:
    """Path of a turn."""
    return f"{session_path(session_id)}/turns/{quote(turn_id, safe='')}"


def _get(path: str, query: Mapping[str, str | int] | None = None) -> Call[Any]:
    return Call(method="GET", path=path, query=query or {}, is_repeatable=True)
