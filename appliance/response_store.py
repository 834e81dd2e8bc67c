# SPDX-License-Identifier: Apache-2.0
"""Responses that a client may come back to: to continue, read, cancel or delete them.

Kept in the memory of this process, bounded by number, size and age; what must outlive the process
is a session. Does not know: HTTP, how a response is made.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.errors import ApiError
from appliance.frame_log import FrameLog

MAX_RESPONSES = 1024
MAX_BYTES = 256 << 20
TTL_S = 3600.0


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """`wire`: as GET answers. `messages`: the conversation up to and with its output.

    input_items: what was asked, as items.
    log: its events, where it runs in the background.
    """

    tenant: str
    wire: dict[str, Any]
    input_items: list[dict[str, Any]] = field(default_factory=list)
    log: FrameLog | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_cancelled: bool = False
    expires_at_s: float = 0.0
    num_bytes: int = 0
    item_ids: tuple[str, ...] = ()  # as it was put: by these its items are found

    @property
    def id(self) -> str:
        return str(self.wire["id"])

    @property
    def items(self) -> list[dict[str, Any]]:
        """Its own items, those of the input first."""
        return [*self.input_items, *self.wire.get("output", ())]

    @property
    def is_running(self) -> bool:
        return self.wire["status"] in ("queued", "in_progress")


@dataclass(slots=True)
class ResponseStore:
    """The oldest go first; one that still runs stays."""

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    ttl_s: float = TTL_S
    clock_s: Callable[[], float] = time.monotonic
    _stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    # tenant, item id -> the responses that hold it
    _owners: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def put(self, response: StoredResponse) -> None:
        """Keep a response, anew where it is kept already."""
        self._drop(response.id)
        response.expires_at_s = self.clock_s() + self.ttl_s
        kept = (response.wire, response.input_items, response.messages)
        response.num_bytes = len(msgspec.json.encode(kept))
        if response.log is not None:
            response.num_bytes += response.log.num_bytes
        self._stored[response.id] = response
        self._num_bytes += response.num_bytes
        response.item_ids = tuple(str(item.get("id")) for item in response.items)
        for item_id in response.item_ids:
            self._owners.setdefault((response.tenant, item_id), set()).add(response.id)
        self._make_room()

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ApiError response_not_found, for another tenant's response too."""
        self._make_room()
        found = self._stored.get(response_id)
        if found is None or found.tenant != tenant:
            raise ApiError("response_not_found", f"no response {response_id[:64]!r} is stored here")
        return found

    def item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """Return an item of a tenant's stored response; None where there is none of this id."""
        self._make_room()
        for response_id in self._owners.get((tenant, item_id), ()):
            for item in self._stored[response_id].items:
                if item.get("id") == item_id:
                    return item
        return None

    def holds(self, response: StoredResponse) -> bool:
        """Whether nobody has deleted it."""
        found = self._stored.get(response.id)
        return found is not None and found is response

    def delete(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ApiError response_not_found."""
        found = self.get(tenant, response_id)
        self._drop(response_id)
        return found

    def _make_room(self) -> None:
        now_s = self.clock_s()
        for oldest in list(self._stored.values()):
            is_over = len(self._stored) > self.max_responses or self._num_bytes > self.max_bytes
            if not is_over and oldest.expires_at_s > now_s:
                return
            if not oldest.is_running:
                self._drop(oldest.id)

    def _drop(self, response_id: str) -> None:
        dropped = self._stored.pop(response_id, None)
        if dropped is not None:
            self._num_bytes -= dropped.num_bytes
            for item_id in dropped.item_ids:
                key = (dropped.tenant, item_id)
                owners = self._owners.get(key, set())
                owners.discard(dropped.id)
                if not owners:
                    self._owners.pop(key, None)
