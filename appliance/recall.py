# SPDX-License-Identifier: Apache-2.0
"""Answers of stateless conversations, found again when a client sends them back.

An agent sends its whole history each time, its arguments re-serialised. What this server sampled is
found by what it says (arguments compared as parsed JSON), and its own token ids stand in the next
prompt: so the prefix is the one in the cache. Conversations form a tree of prefixes; side requests
under the same identity are branches. Does not know: dialects, rendering, the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ChatMessage = Mapping[str, Any]
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Token ids of a conversation up to and with an answer."""

    token_ids: bytes
    is_closed: bool  # they end with the end-of-turn token


@dataclass(slots=True)
class Recall:
    """Bounded by bytes; what was not used for longest goes first."""

    max_bytes: int = MAX_BYTES
    _known: OrderedDict[bytes, Recalled] = field(default_factory=OrderedDict)
    _num_bytes: int = 0

    def put(self, key: bytes, recalled: Recalled) -> None:
        """Remember a conversation under the last of its `chain_keys`."""
        self._drop(key)
        self._known[key] = recalled
        self._num_bytes += len(recalled.token_ids)
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._known)))

    def longest(self, keys: Sequence[bytes]) -> tuple[int, Recalled] | None:
        """Return the longest known prefix: how many messages it holds, and its ids."""
        for index in range(len(keys) - 1, -1, -1):
            found = self._known.get(keys[index])
            if found is not None:
                self._known.move_to_end(keys[index])
                return index + 1, found
        return None

    def _drop(self, key: bytes) -> None:
        dropped = self._known.pop(key, None)
        if dropped is not None:
            self._num_bytes -= len(dropped.token_ids)


def root_key(*parts: str) -> bytes:
    """Return the key of an empty conversation: of this tenant, with these tools."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def chain_keys(root: bytes, messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return for each message the key of the conversation up to and with it."""
    keys: list[bytes] = []
    key = root
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    return keys


def next_key(key: bytes, message: ChatMessage) -> bytes:
    """Return the key of a conversation that goes on with this message.

    Reasoning does not count: many clients do not send it back.
    """
    content = message.get("content") or ""
    is_answer = message["role"] == "assistant"
    said = [
        message["role"],
        content.strip() if is_answer else content,
        message.get("tool_call_id") or "",
        [_call(call) for call in message.get("tool_calls") or ()],
    ]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(key + text.encode()).digest()


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    with contextlib.suppress(ValueError):  # no JSON: only the same text is the same
        arguments = [json.loads(arguments)]
    return [call.get("id") or "", function["name"], arguments]
