# SPDX-License-Identifier: Apache-2.0
"""Implicit sessions: what was asked under one name, as a tree of prefixes, and how much was cached.

A name is what an agent calls its conversation, or, where it says nothing, a hash of how the
conversation begins. It decides no prefix: titles, summaries and sub-agents come under the same
name and are branches. Nothing here holds memory of the engine, and no name gets a lease. Kept in
the memory of this process, bounded. Does not know: dialects, tokens' text, HTTP.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ApiError
from engine import api

MAX_SESSIONS = 1024
MAX_MESSAGES = 8192  # of one conversation's tree
NUM_RECENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionName:
    """What a client calls its conversation, and the one this is a part of; "" where it says none.

    Sub-agents of some clients have names of their own.
    """

    name: str = ""
    parent: str = ""


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request of a conversation; counts of tokens where their names do not say otherwise.

    num_known: messages at its front that came under this name before, in this order.
    is_branch: what follows them is not what followed them first.
    num_recalled: messages at its front whose tokens are those this server sampled or was sent.
    """

    request_id: str
    at_ms: int
    num_messages: int
    num_known: int
    is_branch: bool
    num_recalled: int
    recalled_tokens: int
    input_tokens: int = 0
    cache: api.CacheHit | None = None
    output_tokens: int = 0
    finish_reason: str | None = None

    def note_cache(self, hit: api.CacheHit) -> None:
        """The engine has said where the prompt's tokens were."""
        self.cache = hit

    @property
    def cached_tokens(self) -> int | None:
        """None: the engine has not begun."""
        return None if self.cache is None else self.cache.l1 + self.cache.l2 + self.cache.l3

    def note_end(self, output_tokens: int, finish_reason: str) -> None:
        """The answer is whole."""
        self.output_tokens = output_tokens
        self.finish_reason = finish_reason

    def as_wire(self) -> dict[str, Any]:
        """Return the object that the API answers with."""
        usage: dict[str, Any] = {
            "input_tokens": self.input_tokens,
            "recalled_tokens": self.recalled_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }
        if self.cache is not None:
            usage["x_cache"] = {"l1": self.cache.l1, "l2": self.cache.l2, "l3": self.cache.l3}
        return {
            "id": self.request_id,
            "created_at": self.at_ms // 1000,
            "messages": self.num_messages,
            "known_messages": self.num_known,
            "branches_at": self.num_known if self.is_branch else None,
            "recalled_messages": self.num_recalled,
            "usage": usage,
            "finish_reason": self.finish_reason,
        }


@dataclass(slots=True, kw_only=True)
class ImplicitSession:
    """What came under one name. `_children`: by a message's key, how many followed it."""

    name: str
    is_named: bool
    parent: str = ""
    created_ms: int
    num_requests: int = 0
    recent: deque[Asked] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    _children: dict[bytes, int] = field(default_factory=dict)

    def ask(
        self, request_id: str, keys: Sequence[bytes], now_ms: int, recalled: tuple[int, int]
    ) -> Asked:
        """Note a request by its `chain_keys`; `recalled`: messages and tokens."""
        num_known = 0
        while num_known < len(keys) and keys[num_known] in self._children:
            num_known += 1
        asked = Asked(
            request_id=request_id,
            at_ms=now_ms,
            num_messages=len(keys),
            num_known=num_known,
            is_branch=self._grow(keys, num_known),
            num_recalled=recalled[0],
            recalled_tokens=recalled[1],
        )
        self.num_requests += 1
        self.recent.append(asked)
        return asked

    @property
    def num_branches(self) -> int:
        """Ends of the tree: conversations that were not gone on with, or not yet."""
        return sum(1 for num in self._children.values() if num == 0)

    def as_wire(self) -> dict[str, Any]:
        """Return the object that the API answers with."""
        counted = [asked for asked in self.recent if asked.cached_tokens is not None]
        return {
            "object": "implicit_session",
            "name": self.name,
            "named_by": "client" if self.is_named else "opening",
            "parent": self.parent or None,
            "created_at": self.created_ms // 1000,
            "last_active_at": (self.recent[-1].at_ms if self.recent else self.created_ms) // 1000,
            "requests": self.num_requests,
            "messages": len(self._children),
            "branches": self.num_branches,
            "recent_input_tokens": sum(asked.input_tokens for asked in counted),
            "recent_cached_tokens": sum(asked.cached_tokens or 0 for asked in counted),
        }

    def _grow(self, keys: Sequence[bytes], num_known: int) -> bool:
        """Add what is new; returns whether it stands beside something that is there."""
        if len(self._children) + len(keys) - num_known > MAX_MESSAGES:
            self._children.clear()
            num_known = 0
        new = keys[num_known:]
        if not new:
            return False
        is_branch = bool(self._children)
        if num_known:
            parent = keys[num_known - 1]
            is_branch = self._children[parent] > 0
            self._children[parent] += 1
        self._children.update(dict.fromkeys(new, 1))
        self._children[new[-1]] = 0
        return is_branch


@dataclass(slots=True)
class ImplicitSessions:
    """By tenant and name; those not used for longest go first."""

    max_sessions: int = MAX_SESSIONS
    _known: OrderedDict[tuple[str, str], ImplicitSession] = field(default_factory=OrderedDict)

    def take(self, tenant: str, name: SessionName, opening: bytes, now_ms: int) -> ImplicitSession:
        """Return the one of this name, new or known; without a name, that of this opening.

        opening: the key of a conversation up to and with its first message of the user.
        """
        key = (tenant, name.name or f"opening-{opening.hex()[:24]}")
        found = self._known.get(key)
        if found is None:
            found = ImplicitSession(
                name=key[1], is_named=bool(name.name), parent=name.parent, created_ms=now_ms
            )
            self._known[key] = found
            if len(self._known) > self.max_sessions:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found

    def list(self, tenant: str | None) -> list[ImplicitSession]:
        """Those of a tenant (None: of all), the last used first."""
        return [
            found
            for (owner, _), found in reversed(self._known.items())
            if tenant is None or owner == tenant
        ]

    def get(self, tenant: str | None, name: str) -> ImplicitSession:
        """Raises ApiError implicit_session_not_found, for another tenant's too."""
        for found in self.list(tenant):
            if found.name == name:
                return found
        message = f"no conversation named {name[:128]!r} came here"
        raise ApiError("implicit_session_not_found", message)
