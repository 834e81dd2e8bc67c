# SPDX-License-Identifier: Apache-2.0
"""Answers of stateless conversations, found again when a client sends them back.

An agent sends its whole history each time, its arguments re-serialised. What this server sampled is
found by what it says (arguments compared as parsed JSON), and its own token ids stand in the next
prompt: so the prefix is the one in the cache. Conversations form a tree of prefixes: an answer
keeps the ids it adds to the one before it, so that a conversation costs memory once, however many
turns it has, and side requests are branches. Does not know: dialects, rendering, the engine.

Invariant: whoever was built upon was used more lately than what was built on it, so that what was
not used for longest is always a leaf.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.recall_journal import Entry, RecallJournal

ChatMessage = Mapping[str, Any]
MAX_BYTES = 256 << 20
ANSWER_BYTES = 400  # what an answer costs beside its ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Token ids of a conversation up to and with an answer."""

    token_ids: bytes
    is_closed: bool  # they end with the end-of-turn token


@dataclass(slots=True, kw_only=True)
class _Answer:
    """`added`: the ids behind those of the answer before, `before`."""

    added: bytes
    is_closed: bool
    before: bytes | None
    num_built_on: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.added) + ANSWER_BYTES


@dataclass(slots=True)
class Recall:
    """Bounded by bytes; what was not used for longest goes first.

    `journal`: what keeps it for the next process; what is there is known from the start.
    """

    max_bytes: int = MAX_BYTES
    journal: RecallJournal | None = None
    _known: OrderedDict[bytes, _Answer] = field(default_factory=OrderedDict)
    _num_bytes: int = 0

    def __post_init__(self) -> None:
        for entry in self.journal.read() if self.journal is not None else ():
            if entry.before is None or entry.before in self._known:
                self._forget(entry.key)
                self._insert(entry)

    @property
    def num_bytes(self) -> int:
        """What all that is remembered takes."""
        return self._num_bytes

    def put(self, keys: Sequence[bytes], recalled: Recalled) -> None:
        """Remember a conversation by its `chain_keys`, the answer's own the last of them.

        One that is known and was gone on with stays as it is: others are built on its ids.
        """
        key = keys[-1]
        known = self._known.get(key)
        if known is None or not known.num_built_on:
            self._drop(key)
            before = self._start_of(keys[:-1], recalled.token_ids)
            num_known = len(self._ids(before)) if before is not None else 0
            added = recalled.token_ids[num_known:]
            entry = Entry(key=key, before=before, added=added, is_closed=recalled.is_closed)
            if self.journal is not None:
                self.journal.add(entry, lambda: recalled.token_ids)
            self._insert(entry)
        else:
            self._touch(key)

    def longest(self, keys: Sequence[bytes]) -> tuple[int, Recalled] | None:
        """Return the longest known prefix: how many messages it holds, and its ids."""
        for index in range(len(keys) - 1, -1, -1):
            found = self._known.get(keys[index])
            if found is not None:
                self._touch(keys[index])
                ids = self._ids(keys[index])
                return index + 1, Recalled(token_ids=ids, is_closed=found.is_closed)
        return None

    def _insert(self, entry: Entry) -> None:
        answer = _Answer(added=entry.added, is_closed=entry.is_closed, before=entry.before)
        self._known[entry.key] = answer
        self._num_bytes += answer.num_bytes
        if entry.before is not None:
            self._known[entry.before].num_built_on += 1
        self._touch(entry.key)
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._known)))

    def _start_of(self, keys: Sequence[bytes], token_ids: bytes) -> bytes | None:
        """The last known of these conversations whose very ids `token_ids` begins with."""
        for key in reversed(keys):
            if key in self._known and token_ids.startswith(self._ids(key)):
                return key
        return None

    def _line(self, key: bytes) -> Iterator[bytes]:
        """An answer's key, and those of all that it was built on."""
        place: bytes | None = key
        while place is not None:
            yield place
            place = self._known[place].before

    def _ids(self, key: bytes) -> bytes:
        added = [self._known[place].added for place in self._line(key)]
        return b"".join(reversed(added))

    def _touch(self, key: bytes) -> None:
        for place in list(self._line(key)):
            self._known.move_to_end(place)

    def _forget(self, key: bytes) -> None:
        """Drop an answer, if it is known, and before it all that was built on it."""
        known = self._known.get(key)
        if known is not None and known.num_built_on:
            for built in [place for place in self._known if key in self._line(place)]:
                self._drop(built)
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        """Forget a leaf, if it is known."""
        dropped = self._known.pop(key, None)
        if dropped is not None:
            self._num_bytes -= dropped.num_bytes
            if dropped.before is not None:
                self._known[dropped.before].num_built_on -= 1


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
        arguments = [json.loads(arguments, parse_int=_number, parse_float=_number)]
    return [call.get("id") or "", function["name"], arguments]


def _number(text: str) -> float | int:
    """A number as a client has it that knows only doubles: 1.0 comes back as 1, 1e2 as 100."""
    value = float(text)
    return int(value) if value.is_integer() else value
